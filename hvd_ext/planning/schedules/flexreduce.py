"""FlexReduce: an uneven reduce-scatter and all-gather along any tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from math import floor, lcm

import numpy as np
from numpy.typing import NDArray

from hvd_ext.planning.model import Call, Level, LogicalPlan, Span, reversed_level
from hvd_ext.planning.registry import Card
from hvd_ext.topology.tree import Node, Tree

card = Card(
    name="flexreduce",
    idea="Each learner's share is divided by the degree of every node above it, so every link carries little.",
    drawing="""\
P = 2 + 3 learners, n = 12 (the paper's Fig. 2); reduce in hosts, then between them, then broadcast backwards:
  0: 0..5    1: 6..11                     0: 2..4    1: 7..9
  2: 0..3    3: 4..7    4: 8..11    ->    2: 0..1    3: 5..6    4: 10..11""",
    rounds="2 * sum over levels of (degree - 1), on an even tree",
    bytes="2 * sum over levels of the largest (d - 1) / d * n / (degrees below) sent by each rank",
    limits="none; on very uneven trees a learner takes part in several calls per level (Eq. 12)",
    source="FlexReduce Section III, Fig. 2-3, Eq. 2-12",
)

# Shares are exact if their common denominator is at most this; else they are rounded to this many units.
MOST_UNITS = 1 << 20


def build(tree: Tree) -> LogicalPlan:
    """FlexReduce_plan() of the paper's Fig. 3, with the ranges in units: reduces upwards and broadcasts downwards."""
    units = min(denominator(tree.root), MOST_UNITS)
    up = [level for _, level, _ in climb(tree, units) if level.calls]
    down = [reversed_level(level, level.name.replace("reduce", "broadcast")) for level in reversed(up)]
    return LogicalPlan("flexreduce", "allreduce", tree.size, units, (*up, *down))


def climb(
    tree: Tree, units: int, wanted: Callable[[Node], bool] = lambda node: True
) -> Iterator[tuple[tuple[Node, ...], Level, dict[int, tuple[int, int]]]]:
    """Makes the reduces of each level of the tree, the deepest level first.

    Args:
        wanted: whether to reduce in a branch; if it is true for a branch, it is true for all branches below it.

    Yields:
        The wanted branches of a level; the level of their reduces; and the units, as begin and end, that each rank
        holds after it.
    """
    place = {rank: index for index, rank in enumerate(tree.ranks)}
    portion = dict.fromkeys(tree.ranks, Fraction(1))
    shards = dict.fromkeys(tree.ranks, (0, units))
    for depth, nodes in enumerate(tree.levels()):
        calls: list[Call] = []
        chosen = tuple(node for node in nodes if wanted(node))
        for node in chosen:
            if len(node.children) > 1:
                target = _targets(node, portion, shards, place, units)
                calls += _reduces(node, shards, target)
                shards.update(target)
        yield chosen, Level(tuple(calls), f"reduce, level {depth}"), shards


def denominator(root: Node) -> int:
    """The number of units in which all shares below a branch that reduces by itself are exact.

    It is the common denominator of the shares, one over the product of the degrees above a leaf.
    """
    common = 1
    open_nodes = [(root, 1)]
    while open_nodes:
        node, product = open_nodes.pop()
        if not node.children:
            common = lcm(common, product)
        open_nodes += [(child, product * len(node.children)) for child in node.children]
    return common


def _targets(
    node: Node,
    portion: dict[int, Fraction],
    shards: dict[int, tuple[int, int]],
    place: dict[int, int],
    units: int,
) -> dict[int, tuple[int, int]]:
    """Section III-A's heuristic: leaves take their portions in turn, sorted by the end and the start of their range."""
    progress = Fraction(0)
    target: dict[int, tuple[int, int]] = {}
    for rank in sorted(node.ranks, key=lambda rank: (shards[rank][1], shards[rank][0], place[rank])):
        portion[rank] /= len(node.children)
        begin = floor(progress * units)
        progress += portion[rank]
        target[rank] = (begin, floor(progress * units))
    return target


def _reduces(node: Node, shards: dict[int, tuple[int, int]], target: dict[int, tuple[int, int]]) -> list[Call]:
    """One reduce for each sub-range that has the same owner and holders throughout (find_bounds() of Fig. 3)."""
    holders_of = [_sorted_ranges({rank: shards[rank] for rank in child.ranks}) for child in node.children]
    owner_begins, owners = _sorted_ranges(target)
    cuts = np.unique(np.concatenate([owner_begins, *(begins for begins, _ in holders_of)]))
    ends = np.append(cuts[1:], max(end for _, end in target.values()))
    owner = owners[np.searchsorted(owner_begins, cuts, side="right") - 1].tolist()
    held_by = np.stack([ranks[np.searchsorted(begins, cuts, side="right") - 1] for begins, ranks in holders_of], axis=1)
    # Sub-ranges with the same holders share one tuple, because a root of 1,000 hosts has thousands of sub-ranges but
    # few groups.
    changes = np.concatenate(([True], np.any(held_by[1:] != held_by[:-1], axis=1)))
    groups = [tuple(group) for group in held_by[changes].tolist()]
    group_of = (np.cumsum(changes) - 1).tolist()
    child_of = {rank: index for index, child in enumerate(node.children) for rank in child.ranks}
    calls = []
    for begin, end, root, number in zip(cuts.tolist(), ends.tolist(), owner, group_of, strict=True):
        group, branch = groups[number], child_of[root]
        if group[branch] != root:
            # The owner does not hold this range yet: the holder in its own branch is last in the group, and sends it.
            group = group[branch + 1 :] + group[: branch + 1]
        calls.append(Call("reduce", group, (Span(begin, end - begin),), root))
    return calls


def _sorted_ranges(ranges: dict[int, tuple[int, int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The begins and the ranks of the non-empty ranges, sorted by begin; together they cover the whole buffer."""
    filled = sorted((begin, rank) for rank, (begin, end) in ranges.items() if end > begin)
    table = np.array(filled, dtype=np.int64)
    return table[:, 0], table[:, 1]
