"""Ring: one flat ring over all ranks in tree order."""

from __future__ import annotations

from hvd_ext.planning.model import Call, Level, LogicalPlan, Span, reversed_level
from hvd_ext.planning.registry import Card
from hvd_ext.topology.tree import Tree

card = Card(
    name="ring",
    idea="Each rank passes partial sums to its neighbour until each owns one finished chunk; then these go around.",
    drawing="""\
P = 4, chunks a b c d:          reduce-scatter, 3 rounds        all-gather, 3 rounds
  0 -> 1 -> 2 -> 3 -> 0         0: A . . .                      0: A B C D
  round 1: 0 sends d, 1 a,      1: . B . .           ->         1: A B C D
           2 b, 3 c             2: . . C .                      2: A B C D
  ...                           3: . . . D                      3: A B C D""",
    rounds="2 (P - 1)",
    bytes="2 (P - 1) / P * n sent by each rank; as much over each link between hosts",
    limits="none; latency grows with P, and the slowest link carries almost twice the buffer",
    source="BlueConnect Eq. 5-6; MG-WFBP Table II; Patarasuk and Yuan 2009",
)


def build(tree: Tree) -> LogicalPlan:
    """A plan of P units: reduce-scatter and all-gather over all ranks, with 4 (P - 1) rows for each.

    The ring follows the tree's order, so that it enters and leaves each host once.
    """
    spans = tuple(Span(i, 1) for i in range(tree.size))
    scatter = Level((Call("reduce_scatter", tree.ranks, spans),), "reduce-scatter over all ranks")
    levels = (scatter, reversed_level(scatter, "all-gather over all ranks")) if tree.size > 1 else ()
    return LogicalPlan("ring", "allreduce", tree.size, tree.size, levels)
