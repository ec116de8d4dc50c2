"""Torus: rings along each dimension of an even cluster: hosts x ranks per host, and further levels of the tree."""

from __future__ import annotations

from hvd_ext.planning.model import LogicalPlan
from hvd_ext.planning.registry import Card
from hvd_ext.planning.stages import staged_plan, stages_of
from hvd_ext.topology.tree import Tree

card = Card(
    name="torus2d",
    idea="A ring in each host, then a ring through the ranks of equal place on all hosts, then the first ring back.",
    drawing="""\
P = 4 on 2 hosts, chunks a b:
  0 - 1     rows:    reduce-scatter    0: A   1: B      (of each host)
  |   |     columns: allreduce         0 <-> 2,  1 <-> 3
  2 - 3     rows:    all-gather        0..3: A B""",
    rounds="2 * sum over dimensions of (p - 1)",
    bytes="2 (P - 1) / P * n sent by each rank, of which a host sends 2 (m - 1) / m * n to the others (m hosts)",
    limits="all hosts must have as many ranks; from the first uneven level on it is one dimension; at least two",
    source="CommLib Section 5.3 (2DTAR); Mikami et al. 2018; BlueConnect Eq. 9, and Eq. 10 on links of its own",
)


def supports(tree: Tree) -> str | None:
    """Says why the schedule cannot run on a cluster, in words; None if the cluster is even in all dimensions."""
    stages = stages_of(tree)
    if any(not stage.follows for stage in stages):
        return "a torus is even: every host has as many ranks as the others"
    if len(stages) < 2:
        return "a torus has two dimensions or more, such as hosts x ranks per host"
    return None


def build(tree: Tree) -> LogicalPlan:
    """A plan of P units, whose note has the dimensions."""
    stages = stages_of(tree)
    note = " x ".join(str(stage.degree) for stage in reversed(stages)) + " torus"
    return staged_plan("torus2d", tree, stages, ["ring"] * len(stages), note)
