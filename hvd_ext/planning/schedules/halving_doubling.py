"""Recursive halving and doubling: a reduce-scatter and an all-gather in log2 P rounds each, for any number of ranks."""

from __future__ import annotations

from hvd_ext.planning.model import Call, Level, LogicalPlan, Span, reversed_level
from hvd_ext.planning.registry import Card
from hvd_ext.topology.tree import Node, Tree

card = Card(
    name="halving_doubling",
    idea="Half of the buffer goes half way around, then a quarter a quarter of the way, ...; then all comes back.",
    drawing="""\
P = 4, chunks a b c d:  round 1, distance 2: 0 sends c d to 2, 1 sends d a to 3, ...   each keeps 2 chunks
                        round 2, distance 1: 0 sends b to 1, 1 sends c to 2, ...       each keeps 1 chunk
                        then the same rounds backwards, with finished chunks""",
    rounds="2 * ceil(log2 P)",
    bytes="2 (P - 1) / P * n sent by each rank",
    limits="none; on several hosts it loads the network more than blueconnect, unless their number is a power of two",
    source="MG-WFBP Table II; Thakur et al. 2005; any P: Bruck et al. 1997, Traeff 2023",
)


def build(tree: Tree) -> LogicalPlan:
    """A plan of P units.

    The ranks of a host are far from each other in the circle, because the large messages go far.
    """
    order = order_of(tree)
    spans = tuple(Span(place, 1) for place in range(tree.size))
    down = Level((Call("reduce_scatter", order, spans, method="recursive"),), "recursive halving")
    levels = (down, reversed_level(down, "recursive doubling")) if tree.size > 1 else ()
    return LogicalPlan("halving_doubling", "allreduce", tree.size, tree.size, levels)


def order_of(tree: Tree) -> tuple[int, ...]:
    """An order of the ranks in which neighbours are on different hosts, and each host's ranks are spread evenly."""

    def spread(node: Node) -> list[int]:
        if not node.children:
            return [node.rank]
        placed = []
        for number, child in enumerate(node.children):
            ranks = spread(child)
            placed += [((2 * i + 1) / len(ranks), number, rank) for i, rank in enumerate(ranks)]
        return [rank for _, _, rank in sorted(placed)]

    return tuple(spread(tree.root))
