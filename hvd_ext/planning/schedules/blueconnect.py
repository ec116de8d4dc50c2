"""BlueConnect: reduce-scatters along the levels of the cluster, on smaller and smaller parts, then all-gathers back."""

from __future__ import annotations

from hvd_ext.planning.model import LogicalPlan
from hvd_ext.planning.registry import Card
from hvd_ext.planning.stages import method_of, staged_plan, stages_of
from hvd_ext.topology.tree import Tree

card = Card(
    name="blueconnect",
    idea="One reduce-scatter for each level of the network, all ranks at work in each, then all-gathers in reverse.",
    drawing="""\
P = 4 on 2 hosts, |P| = 2 x 2, chunks a b c d:
  in hosts:        {0 1} {2 3}     0: ab..   1: ..cd   2: ab..   3: ..cd
  between hosts:   {0 2} {1 3}     0: A...   1: ..C.   2: .B..   3: ...D
  and back with all-gathers""",
    rounds="2 * sum over stages of log2 p (p a power of two) or p - 1",
    bytes="2 (P - 1) / P * n sent by each rank, of which a host sends 2 (m - 1) / m * n to the others (m hosts)",
    limits="levels must be even: from the first uneven level on it is one stage, and a ring where hosts differ",
    source="BlueConnect Section 3, Fig. 3-4, Alg. 1, Eq. 3, 8-10",
)


def build(tree: Tree) -> LogicalPlan:
    """A plan of P units, whose note has the factorisation; Eq. 3 decides whether a stage is a ring or recursive."""
    stages = stages_of(tree)
    if not all(stage.follows for stage in stages):
        note = "no factorisation follows the topology (its lowest level is uneven): falls back to one ring"
        return staged_plan("blueconnect", tree, stages, ["ring"], note)
    factors = " x ".join(str(stage.degree) for stage in stages)
    note = f"{tree.size} = {factors}, from the inside" if len(stages) > 1 else ""
    return staged_plan("blueconnect", tree, stages, [method_of(stage) for stage in stages], note)
