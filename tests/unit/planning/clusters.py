"""Clusters for tests: small ones of every kind, random trees from a seed; and the plans of all schedules on them."""

from __future__ import annotations

import random

from hvd_ext.compression.topk import TopK
from hvd_ext.planning import registry
from hvd_ext.planning.model import LogicalPlan
from hvd_ext.planning.sparse_planner import needs
from hvd_ext.topology.tree import ETHERNET, SHARED_MEMORY, Link, Node, Tree, from_hosts, leaf


def uneven_hosts(size: int) -> Tree:
    """Ranks dealt to three hosts of different sizes, not in host order."""
    return from_hosts(["abc"[rank * rank % 3 if rank % 4 else rank % 3] for rank in range(size)])


def one_host(size: int) -> Tree:
    return from_hosts(["a"] * size)


def even_tree(
    *degrees: int, inside: Link = SHARED_MEMORY, between: Link = ETHERNET, links: tuple[Link, ...] = ()
) -> Tree:
    """A symmetric tree; degrees and links from the root down: even_tree(2, 2, 3) has 12 leaves."""
    ranks = iter(range(1 << 30))
    links = links or (*[between] * (len(degrees) - 1), inside)

    def grow(depth: int) -> Node:
        if depth == len(degrees):
            return leaf(next(ranks))
        name = f"level {len(degrees) - depth}"
        return Node(name, links[depth], tuple(grow(depth + 1) for _ in range(degrees[depth])))

    return Tree(grow(0))


def random_tree(seed: int, most_leaves: int = 64, most_depth: int = 4) -> Tree:
    """A tree with leaves at different depths, branches with one child, and ranks in random order."""
    rng = random.Random(seed)
    leaves = rng.randint(1, most_leaves)
    ranks = list(range(leaves))
    rng.shuffle(ranks)

    def grow(own: list[int], depth: int) -> Node:
        if depth == most_depth or (len(own) == 1 and rng.random() < 0.7):
            if len(own) == 1 and depth and rng.random() < 0.8:
                return leaf(own[0])
            return Node(f"host {own[0]}", SHARED_MEMORY, tuple(leaf(rank) for rank in own))
        cuts = sorted(rng.sample(range(1, len(own)), min(len(own) - 1, rng.randint(0, 4))))
        parts = [own[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(own)], strict=True)]
        return Node(f"branch {own[0]}", ETHERNET, tuple(grow(part, depth + 1) for part in parts))

    return Tree(grow(ranks, 0))


def large_tree(size: int = 4096, seed: int = 1) -> Tree:
    """Hosts of 4 to 8 ranks in racks of 20 to 60 hosts."""
    rng = random.Random(seed)
    hosts: list[Node] = []
    first = 0
    while first < size:
        last = min(first + rng.randint(4, 8), size)
        hosts.append(Node(f"host {first}", SHARED_MEMORY, tuple(leaf(rank) for rank in range(first, last))))
        first = last
    racks: list[Node] = []
    while hosts:
        count = rng.randint(20, 60)
        racks.append(Node(f"rack {len(racks)}", ETHERNET, tuple(hosts[:count])))
        hosts = hosts[count:]
    return Tree(Node("cluster", ETHERNET, tuple(racks)))


def supported(name: str, tree: Tree) -> bool:
    return registry.supports(registry.get(name), tree) is None


def dense_plans(tree: Tree) -> list[LogicalPlan]:
    """The plan of each schedule that applies to a tree."""
    return [registry.get(name).build(tree) for name in registry.names() if supported(name, tree)]


def sparse_plans(tree: Tree) -> list[LogicalPlan]:
    """The variants of each sparse schedule, and its plan of a step in which nothing is selected."""
    schedules = [registry.sparse(name) for name in registry.sparse_names()]
    return [plan for schedule in schedules for plan in (*schedule.variants(tree), schedule.dense(tree))]


def topk_plans(name: str, tree: Tree) -> list[LogicalPlan]:
    """The variants of a sparse schedule that top-k takes; the others select again from sums (`hvd_ext.Quantized`)."""
    return [plan for plan in registry.sparse(name).variants(tree) if needs(plan) <= TopK.rows]
