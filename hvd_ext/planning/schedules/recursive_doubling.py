"""Recursive doubling: pairs exchange whole vectors, at twice the distance each time."""

from __future__ import annotations

from hvd_ext.planning.model import Call, Level, LogicalPlan, Span, reversed_level
from hvd_ext.planning.registry import Card
from hvd_ext.topology.tree import Tree

card = Card(
    name="recursive_doubling",
    idea="In each round every rank exchanges its whole sum with a partner, so the sums cover twice as many ranks.",
    drawing="""\
P = 4:  0 <-> 1   2 <-> 3      then      0 <-> 2   1 <-> 3
P = 5:  before, 1 gives its vector to 0 and sits out; at the end 0 gives it the result""",
    rounds="log2 P; floor(log2 P) + 2 where P is no power of two",
    bytes="log2 P * n sent by each rank",
    limits="none; for small buffers: every rank sends the whole buffer in each round",
    source="MG-WFBP Table II; Thakur et al. 2005 (folding)",
)

_WHOLE = (Span(0, 1),)
_Pairs = list[tuple[int, int]]


def rounds_of(tree: Tree) -> tuple[_Pairs, list[_Pairs]]:
    """The pairs (from, to) of ranks that fold, and the pairs of each round, with neighbours in the tree first."""
    ranks, power = tree.ranks, 1 << (tree.size.bit_length() - 1)
    extra = tree.size - power
    folded = [(ranks[2 * i + 1], ranks[2 * i]) for i in range(extra)]
    active = [*ranks[: 2 * extra : 2], *ranks[2 * extra :]]
    steps = power.bit_length() - 1
    return folded, [
        [(active[i], active[i | 1 << step]) for i in range(power) if not i & 1 << step] for step in range(steps)
    ]


def build(tree: Tree) -> LogicalPlan:
    """A plan of one unit. Partners compute a + b and b + a, which have equal bits."""
    folded, rounds = rounds_of(tree)
    fold = Level(tuple(Call("reduce", pair, _WHOLE, pair[1]) for pair in folded), "fold the extra ranks in")
    levels = [
        Level(tuple(Call("exchange", pair, _WHOLE) for pair in pairs), f"exchange at distance {1 << step}")
        for step, pairs in enumerate(rounds)
    ]
    if folded:
        levels = [fold, *levels, reversed_level(fold, "give the extra ranks the result")]
    return LogicalPlan("recursive_doubling", "allreduce", tree.size, 1, tuple(levels))
