"""The common parts of sparse schedules: the selection, the plan of a dense step, and the exchange of the selections.

A *party* is a branch of the tree, by default a host, whose ranks reduce all elements among themselves before the
selection. Each rank of a party then holds a *shard*, and the shards of a party together are the whole buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Literal

import numpy as np

from hvd_ext.planning.model import Call, Level, LogicalPlan, Method, Span, reversed_level
from hvd_ext.planning.schedules.flexreduce import MOST_UNITS, climb, denominator
from hvd_ext.topology.tree import Node, Tree

HOSTS = 1
Held = dict[int, tuple[int, int]]


def parties(tree: Tree, height: int = HOSTS) -> tuple[Node, ...]:
    """The parties of a cluster, in tree order; each rank is in one of them.

    Their largest height is 0 for single ranks, 1 for hosts, 2 for racks of hosts.
    """
    members: list[Node] = []
    open_nodes = [tree.root]
    while open_nodes:
        node = open_nodes.pop()
        if node.height <= height:
            members.append(node)
        else:
            open_nodes += reversed(node.children)
    return tuple(members)


def units_of(members: Sequence[Node], parts: int = 1) -> int:
    """The number of units in which the shards of all parties are exact, or MOST_UNITS if this number is too large.

    Args:
        parts: if possible, each of these units is divided into so many.
    """
    exact = min(lcm(*(denominator(node) for node in members)), MOST_UNITS)
    return exact * parts if exact * parts <= MOST_UNITS else exact


def up(tree: Tree, height: int, units: int) -> tuple[list[Level], Held]:
    """Makes the levels that reduce within the parties, and each rank's shard after them, as begin and end in units."""
    levels: list[Level] = []
    shards: Held = dict.fromkeys(tree.ranks, (0, units))
    for nodes, level, now in climb(tree, units, lambda node: node.height <= height):
        shards = now
        if level.calls:
            where = "hosts" if max(node.height for node in nodes) == HOSTS else "racks"
            levels.append(Level(level.calls, f"{'reduce' if levels else 'reduce-scatter'} in {where}"))
    return levels, shards


def dense_plan(algorithm: str, tree: Tree, height: int = HOSTS) -> LogicalPlan:
    """Makes FlexReduce's plan for a step in which nothing is selected: each rank folds its residual into its shard.

    A party's ranks fold when the party has been reduced.
    """
    members = parties(tree, height)
    shards = units_of(members)
    exact = denominator(tree.root)
    # If the shares at the root must be rounded, the shards of the parties still stay exact.
    units = exact if exact <= MOST_UNITS else MOST_UNITS // shards * shards
    waiting = {id(node) for node in members}

    def folds(nodes: Sequence[Node], held: Held) -> Level:
        return local("fold", [rank for node in nodes if id(node) in waiting for rank in node.ranks], held)

    alone = [node for node in members if not node.children]
    levels = [folds(alone, dict.fromkeys(tree.ranks, (0, units)))]
    climbed: list[Level] = []
    for nodes, level, held_shards in climb(tree, units):
        climbed.append(level)
        levels += [level, folds(nodes, held_shards)]
    down = [reversed_level(level, level.name.replace("reduce", "broadcast")) for level in reversed(climbed)]
    levels = [level for level in (*levels, *down) if level.calls]
    return LogicalPlan(algorithm, "allreduce", tree.size, units, tuple(levels))


def local(kind: Literal["select", "fold"], ranks: Sequence[int], shards: Held) -> Level:
    """Makes the level in which each rank selects from its shard, or folds it."""
    spans = {rank: Span(begin, end - begin) for rank, (begin, end) in shards.items() if end > begin}
    return Level(tuple(Call(kind, (rank,), (spans[rank],)) for rank in ranks if rank in spans), kind)


def exchange(members: Sequence[Node], shards: Held, method: Method = "direct") -> Level:
    """Makes the level in which each rank exchanges its selection with the ranks that hold the same units elsewhere.

    It has a call for each piece between two borders of any shards, of the piece's holders in the order of the parties.
    """
    columns = []
    for party in members:
        begins = sorted((shards[rank][0], rank) for rank in party.ranks if shards[rank][1] > shards[rank][0])
        columns.append((np.array([begin for begin, _ in begins]), np.array([rank for _, rank in begins])))
    cuts = np.unique(np.concatenate([begins for begins, _ in columns]))
    end = max(end for _, end in shards.values())
    holders = np.stack([ranks[np.searchsorted(begins, cuts, side="right") - 1] for begins, ranks in columns], axis=1)
    calls = [
        Call("sparse_allreduce", tuple(group), (Span(first, last - first),), method=method)
        for group, first, last in zip(holders.tolist(), cuts.tolist(), [*cuts[1:].tolist(), end], strict=True)
    ]
    return Level(tuple(calls), "all-gather of the selected")
