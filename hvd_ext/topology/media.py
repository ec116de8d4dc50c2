"""What joins the GPUs of a host: groups of GPUs that reach each other better than the host's other GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from hvd_ext.topology.tree import HOST_MEMORY, MEDIA, NVLINK, PCIE, Link, Node, Tree, from_hosts, leaf, replace_hosts

Between = Callable[[int, int], str]  # the medium of `MEDIA` between two ranks of a host

# The links of a job that measures nothing, by rates that NVLink, PCIe 4.0, and copies there and back through the host's
# memory may have. For the choice of an algorithm only their ratio matters.
ASSUMED = {
    NVLINK: Link(alpha_s=10e-6, beta_s_per_byte=1 / 100e9),
    PCIE: Link(alpha_s=10e-6, beta_s_per_byte=1 / 20e9),
    HOST_MEMORY: Link(alpha_s=20e-6, beta_s_per_byte=1 / 8e9),
}


def host(name: str, ranks: Sequence[int], between: Between) -> Node:
    """Make the node of a host, with the links of `ASSUMED`.

    Args:
        between: symmetric.

    Returns:
        A node whose medium is the worst of all pairs. The ranks that a better one joins are a node below it, if it
        joins each of them with each other; that may have such nodes itself. A rank alone has no medium.
    """
    pairs = list(itertools.combinations(ranks, 2))
    if not pairs:
        return Node(name, ASSUMED[HOST_MEMORY], tuple(map(leaf, ranks)))
    worst = max(MEDIA.index(between(*pair)) for pair in pairs)
    medium = MEDIA[worst]

    def better(one: int, other: int) -> bool:
        return MEDIA.index(between(one, other)) < worst

    groups: list[list[int]] = []
    for rank in ranks:
        joined = [group for group in groups if any(better(rank, other) for other in group)]
        groups = [group for group in groups if group not in joined] + [[*itertools.chain(*joined), rank]]
    children: list[Node] = []
    for group in sorted(map(sorted, groups)):
        if len(group) > 1 and all(better(*pair) for pair in itertools.combinations(group, 2)):
            children.append(host(f"{name}, group {len(children) + 1}", group, between))
        else:
            children += map(leaf, group)
    return Node(name, ASSUMED[medium], tuple(children), medium=medium)


def assumed(host_of_rank: Sequence[str], between: Between | None) -> Tree:
    """Make the tree of a job from the names of its hosts, and what joins their GPUs; None for buckets on the host."""
    tree = from_hosts(host_of_rank)
    return tree if between is None else replace_hosts(tree, lambda node: host(node.name, node.ranks, between))
