"""A cluster with more or fewer ranks of the same kind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import cycle

from hvd_ext.errors import TopologyError
from hvd_ext.topology.tree import Node, Tree, trunk

MOST_RANKS = 65_536  # more than any job, so that a slip of the finger does not fill the memory


def scaled(tree: Tree, ranks: int) -> Tree:
    """Makes a cluster of the same kind with another number of ranks.

    Hosts are taken whole and in the order of the tree, and again from the first one when they are used up. With racks,
    a rack is filled before the next one begins, and racks repeat. Fewer ranks than the first host has are ranks of this
    host.

    Returns:
        The cluster, whose ranks are numbered in tree order; `tree` itself if it has as many ranks.

    Raises:
        TopologyError: no number of whole hosts has as many ranks, or the tree is one host, which says nothing of the
            links to others, and has fewer ranks.
    """
    if ranks == tree.size:
        return tree
    if not 1 <= ranks <= MOST_RANKS:
        raise TopologyError(f"ranks ({ranks}): must be 1 to {MOST_RANKS}")
    hosts = tree.hosts()
    if ranks < len(hosts[0]):
        return tree.subset(hosts[0][:ranks])
    if len(hosts) == 1:
        raise TopologyError(
            f"ranks ({ranks}): the cluster is one host of {tree.size} ranks and says nothing of a link to others; "
            "name a cluster of two hosts or more"
        )
    least, most = _nearest([len(host) for host in hosts], ranks)
    if least != ranks:
        raise TopologyError(
            f"ranks ({ranks}): whole hosts of {tree.describe()} have {least} or {most} ranks; name one of them"
        )
    copies = ((f"{child.name or 'rank'}-{number}", child) for number, child in enumerate(cycle(tree.root.children)))
    root, left, _ = _filled(tree.root, copies, ranks, 0)
    assert not left
    return replace(tree, root=trunk(root))


def _nearest(sizes: list[int], ranks: int) -> tuple[int, int]:
    """The largest sum of whole hosts that is not above a number of ranks, and the next sum."""
    total = ranks // sum(sizes) * sum(sizes)
    for size in cycle(sizes):
        if total + size > ranks:
            return total, total + size
        total += size
    raise AssertionError("a cycle has no end")


def _filled(node: Node, children: Iterable[tuple[str, Node]], ranks: int, first: int) -> tuple[Node, int, int]:
    """Gives a branch copies of children, with names and new numbers, as far as there are ranks."""
    copies = []
    for name, child in children:
        if not ranks:
            break
        if child.children:
            below = ((f"{name}-{number}", grandchild) for number, grandchild in enumerate(child.children))
            copy, ranks, first = _filled(replace(child, name=name), below, ranks, first)
        else:
            copy, ranks, first = replace(child, name=f"rank {first}", rank=first), ranks - 1, first + 1
        copies.append(copy)
    return replace(node, children=tuple(copies)), ranks, first
