"""Allreduce in stages: the dimensions of a cluster, and the reduce-scatters and all-gathers along them.

A *block* is a set of ranks that earlier stages have joined: at first each rank is a block, then each host, and so on.
A stage joins neighbouring blocks; the ranks that have the same place in these blocks form a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from hvd_ext.planning.model import Call, Level, LogicalPlan, Method, Span, reversed_level
from hvd_ext.topology.tree import Link, Node, Tree


@dataclass(frozen=True, slots=True)
class Stage:
    """One factor of |P| = p_0 p_1 ... (BlueConnect Eq. 8).

    Args:
        degree: the number of blocks that are joined, p_i.
        link: the slowest link between them, w_i.
        follows: False if the lowest level of the tree is uneven, so that no factorisation follows the tree.
    """

    degree: int
    link: Link
    follows: bool = True


def stages_of(tree: Tree) -> tuple[Stage, ...]:
    """Factorises a cluster along its levels, from the inside.

    If the branches of a level have different numbers of children, this level and all levels above it become the last
    stage: a rack of two hosts and a rack of three, with four ranks per host, give 4 x 5. A branch with one child is not
    a level.

    Returns:
        The stages. There is none for one rank; if the hosts have different numbers of ranks, there is a single stage,
        which does not follow the tree.
    """
    root = _without_single_children(tree.root)
    blocks: set[int] = set()  # the id() of each node that is a block; empty while the leaves are the blocks
    stages: list[Stage] = []
    while root.children and id(root) not in blocks:
        above = _above(root, blocks)
        parents = [node for node in above if any(_is_block(child, blocks) for child in node.children)]
        degrees = {len(node.children) for node in parents}
        if len(degrees) > 1 or not all(_is_block(child, blocks) for node in parents for child in node.children):
            count = tree.size // prod(stage.degree for stage in stages)
            stages.append(Stage(count, _slowest(above), follows=bool(stages)))
            break
        stages.append(Stage(degrees.pop(), _slowest(parents)))
        blocks = {id(node) for node in parents}
    return tuple(stages)


def _without_single_children(node: Node) -> Node:
    port = node.port
    while len(node.children) == 1:
        node = node.children[0]
    node = node if node.port == port else replace(node, port=port)
    if not node.children:
        return node
    return replace(node, children=tuple(_without_single_children(child) for child in node.children))


def _is_block(node: Node, blocks: set[int]) -> bool:
    return id(node) in blocks if blocks else not node.children


def _above(node: Node, blocks: set[int]) -> list[Node]:
    """The branches above the blocks."""
    if _is_block(node, blocks):
        return []
    return [node, *(branch for child in node.children for branch in _above(child, blocks))]


def _slowest(nodes: Sequence[Node]) -> Link:
    return Link(max(node.slowest.alpha_s for node in nodes), max(node.slowest.beta_s_per_byte for node in nodes))


def staged_plan(
    algorithm: str, tree: Tree, stages: Sequence[Stage], methods: Sequence[Method], note: str
) -> LogicalPlan:
    """BlueConnect's Algorithm 1 as a plan of one unit per rank, with a method for each stage.

    Reduce-scatters run along the stages from the inside, whose degrees multiply to the number of ranks; then
    all-gathers run in reverse order.
    """
    size = tree.size
    blocks = [[rank] for rank in tree.ranks]
    begins, width = [0], size  # the units that the rank at each place of a block holds
    down: list[Level] = []
    for number, (stage, method) in enumerate(zip(stages, methods, strict=True)):
        part = width // stage.degree
        spans = [tuple(Span(begin + i * part, part) for i in range(stage.degree)) for begin in begins]
        groups = [blocks[first : first + stage.degree] for first in range(0, len(blocks), stage.degree)]
        calls = [
            Call("reduce_scatter", tuple(block[place] for block in group), spans[place], method=method)
            for group in groups
            for place in range(len(begins))
        ]
        down.append(Level(tuple(calls), f"reduce-scatter, stage {number}"))
        blocks = [[rank for block in group for rank in block] for group in groups]
        begins, width = [begin + i * part for i in range(stage.degree) for begin in begins], part
    up = [reversed_level(level, level.name.replace("reduce-scatter", "all-gather")) for level in reversed(down)]
    return LogicalPlan(algorithm, "allreduce", size, size, (*down, *up), note)


def method_of(stage: Stage) -> Method:
    """Chooses a method by BlueConnect's Eq. 3: "recursive" if the degree is a power of two, else "ring"."""
    return "recursive" if stage.degree & (stage.degree - 1) == 0 else "ring"
