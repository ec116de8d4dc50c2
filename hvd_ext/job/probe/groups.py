"""The links between groups of GPUs in hosts, which exchange messages by pairs of groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from hvd_ext.job.probe.exchanges import exchange, ranks_of, share
from hvd_ext.job.probe.stand import ROUNDS, SMALL, TINY_NBYTES, Stand, Times, of, steps_of
from hvd_ext.planning import patterns
from hvd_ext.planning.grain import HOST_MESSAGE_NBYTES
from hvd_ext.topology.fit import Curve, line
from hvd_ext.topology.racks import Pair
from hvd_ext.topology.tree import Link, Node

JOIN_SIZES = (1 << 20, 8 << 20)  # each way


def parts(hosts: Sequence[Node]) -> tuple[list[Node], dict[str, list[Node]]]:
    """The nodes of hosts without further nodes below, and by medium those that join such nodes.

    A rank beside nodes is a node for itself.
    """
    rings: list[Node] = []
    joins: dict[str, list[Node]] = {}
    for node in hosts:
        if all(not child.children for child in node.children):
            rings.append(node)
            continue
        joins.setdefault(node.medium, []).append(node)
        below, deeper = parts(
            [child if child.children else replace(node, children=(child,)) for child in node.children]
        )
        rings += below
        for medium, nodes in deeper.items():
            joins.setdefault(medium, []).extend(nodes)
    return rings, joins


def with_links(node: Node, links: Mapping[tuple[int, ...], Link]) -> Node:
    """A host with the links that were measured, by the ranks of its nodes."""
    children = tuple(with_links(child, links) if child.children else child for child in node.children)
    return replace(node, link=links.get(node.ranks, node.link), children=children)


def _pairs_of(nodes: Sequence[Node]) -> tuple[list[tuple[int, ...]], list[list[Pair]]]:
    """The ranks of all parts of nodes that join them, and for each node pairs of its parts, each in one at most."""
    parts: list[tuple[int, ...]] = []
    pairs = []
    for node in nodes:
        first = len(parts)
        parts += [child.ranks for child in node.children]
        pairs.append([(first + low, first + high) for low, high in patterns.pairs_of(len(node.children), 1)[0]])
    return parts, pairs


def time_joins(stand: Stand, joins: Mapping[str, Sequence[Node]]) -> None:
    """Time exchanges between groups, those of one medium at the same time."""
    for medium, nodes in joins.items():
        parts, of_nodes = _pairs_of(nodes)
        pairs = [pair for of_node in of_nodes for pair in of_node]
        plan = patterns.exchanges(parts, pairs, stand.engine.size, rounds=ROUNDS)
        stand.time(f"{medium}, 1 {SMALL}", plan, TINY_NBYTES * plan.units, steps=steps_of(TINY_NBYTES))
        for nbytes in JOIN_SIZES:
            what = exchange(parts, pairs, stand.engine.size, nbytes, HOST_MESSAGE_NBYTES)
            stand.time(f"{medium} {nbytes}", *what, steps=steps_of(nbytes))


def join_links(
    seen: Sequence[Times], joins: Mapping[str, Sequence[Node]], handover: Link, message_s: float
) -> tuple[dict[tuple[int, ...], Link], list[Curve]]:
    """The links of nodes that join groups of GPUs, by their ranks, and a curve for each medium."""
    found_links, curves = {}, []
    for medium, nodes in joins.items():
        parts, of_nodes = _pairs_of(nodes)
        everyone = [pair for of_node in of_nodes for pair in of_node]
        small = [of(ranks_of(seen, parts, pair), f"{medium}, 1 {SMALL}") for pair in everyone]
        alpha_s = max((float(np.median(small)) - handover.alpha_s) / ROUNDS - 2 * message_s, 0.0)
        shown = Curve(f"in hosts, {medium}", (), Link(alpha_s, 0.0))
        for node, pairs in zip(nodes, of_nodes, strict=True):
            slowest = Link(alpha_s, 0.0)
            for pair in pairs:
                points = []
                for nbytes in JOIN_SIZES:
                    whole_s = of(ranks_of(seen, parts, pair), f"{medium} {nbytes}")
                    own_s = handover.alpha_s + 2 * nbytes * handover.beta_s_per_byte
                    points.append((share(parts, everyone, pair) * nbytes, max(whole_s - own_s, whole_s / 4)))
                found = Link(alpha_s, line(points).beta_s_per_byte)
                slowest = max(slowest, found, key=lambda one: one.beta_s_per_byte)
                if found.beta_s_per_byte >= shown.link.beta_s_per_byte:
                    shown = replace(shown, points=tuple(points), link=found)
            found_links[node.ranks] = slowest
        curves.append(shown)
    return found_links, curves
