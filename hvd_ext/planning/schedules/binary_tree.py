"""Binary tree: a binomial reduce to one rank and a binomial broadcast from it."""

from __future__ import annotations

from hvd_ext.planning.model import Call, Level, LogicalPlan, Span, reversed_level
from hvd_ext.planning.registry import Card
from hvd_ext.topology.tree import Tree

card = Card(
    name="binary_tree",
    idea="Half of the ranks give their sums to the other half until one has all; then the result comes back.",
    drawing="""\
P = 4:  2 -> 0   3 -> 1      then  1 -> 0       then  0 -> 1      then  0 -> 2   1 -> 3
On several hosts: in each host first, then between the hosts' first ranks.""",
    rounds="2 * sum over levels of ceil(log2 degree)",
    bytes="up to log2 P * n by one rank; 2 n over each link between hosts that has no host behind it",
    limits="none; for small buffers: the busiest rank sends and receives the whole buffer in each round",
    source="MG-WFBP Table II; Thakur et al. 2005",
)


def build(tree: Tree) -> LogicalPlan:
    """A plan of one unit, which follows the tree: the first rank of each branch is its head.

    A host's link carries the buffer once each way if it is a leaf of its level.
    """
    up = []
    for depth, nodes in enumerate(tree.levels()):
        heads = [tuple(child.ranks[0] for child in node.children) for node in nodes if len(node.children) > 1]
        calls = tuple(Call("reduce", group, (Span(0, 1),), group[0], "recursive") for group in heads)
        if calls:
            up.append(Level(calls, f"reduce, level {depth}"))
    down = [reversed_level(level, level.name.replace("reduce", "broadcast")) for level in reversed(up)]
    return LogicalPlan("binary_tree", "allreduce", tree.size, 1, (*up, *down))
