"""A cluster with more or fewer ranks of the same kind."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

from hvd_ext.errors import TopologyError
from hvd_ext.topology.tree import Node, Tree

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
    root, left, _ = _taken(tree.root, ranks, 0)
    assert not left
    while root.children and len(root.children) == 1 and root.children[0].children:
        root = root.children[0]
    return replace(tree, root=root)


def _nearest(sizes: list[int], ranks: int) -> tuple[int, int]:
    """The largest sum of whole hosts that is not above a number of ranks, and the next sum."""
    total = ranks // sum(sizes) * sum(sizes)
    for size in cycle(sizes):
        if total + size > ranks:
            return total, total + size
        total += size
    raise AssertionError("a cycle has no end")


def _taken(node: Node, ranks: int, first: int) -> tuple[Node, int, int]:
    """Repeats the children of the root until they have the ranks."""
    children = []
    for number, child in enumerate(cycle(node.children)):
        if not ranks:
            break
        copy, ranks, first = _copied(child, ranks, first, f"{child.name or 'rank'}-{number}")
        children.append(copy)
    return replace(node, children=tuple(children)), ranks, first


def _copied(node: Node, ranks: int, first: int, name: str) -> tuple[Node, int, int]:
    """Copies a branch as far as there are ranks, with new numbers."""
    if not node.children:
        return replace(node, name=f"rank {first}", rank=first), ranks - 1, first + 1
    children = []
    for number, child in enumerate(node.children):
        if not ranks:
            break
        copy, ranks, first = _copied(child, ranks, first, f"{name}-{number}")
        children.append(copy)
    return replace(node, name=name, children=tuple(children)), ranks, first
