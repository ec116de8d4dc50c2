"""Trees: built from host names, and their helpers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from hvd_ext.errors import TopologyError
from hvd_ext.planning import planner, registry
from hvd_ext.topology import read, write
from hvd_ext.topology.tree import ETHERNET, SHARED_MEMORY, Link, Node, Tree, from_hosts, leaf, with_cores
from tests.unit.planning.clusters import even_tree, random_tree


def test_hosts_are_found_when_ranks_are_dealt_around() -> None:
    tree = from_hosts(["x", "y", "x", "y", "z"], inside=Link(1, 2), between=Link(3, 4))
    assert tree.hosts() == ((0, 2), (1, 3), (4,))
    assert tree.ranks == (0, 2, 1, 3, 4)
    assert tree.root.link == Link(3, 4)
    assert {host.name: host.link for host in tree.root.children} == dict.fromkeys("xyz", Link(1, 2))
    assert (tree.size, tree.depth) == (5, 2)


def test_a_single_host_is_the_root() -> None:
    tree = from_hosts(["x"] * 3)
    assert (tree.root.name, tree.depth, tree.hosts()) == ("x", 1, ((0, 1, 2),))


def test_equal_clusters_are_equal_values() -> None:
    assert from_hosts("abab") == from_hosts("abab") != from_hosts("aabb")
    assert hash(from_hosts("abab")) == hash(from_hosts("abab"))


def test_levels_come_deepest_first() -> None:
    tree = even_tree(2, 2, 3)
    assert [len(level) for level in tree.levels()] == [4, 2, 1]
    assert tree.levels()[-1] == (tree.root,)
    assert [node.ranks for node in tree.levels()[0]] == [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)]


def test_a_leaf_beside_branches_is_a_host_of_its_own() -> None:
    host = Node("host", SHARED_MEMORY, (leaf(1), leaf(2)))
    tree = Tree(Node("cluster", ETHERNET, (leaf(0), host)))
    assert tree.hosts() == ((0,), (1, 2))
    assert Tree(leaf(0)).hosts() == ((0,),)
    assert Tree(leaf(0)).levels() == ()


@pytest.mark.parametrize("seed", range(20))
def test_hosts_and_levels_cover_random_trees(seed: int) -> None:
    tree = random_tree(seed)
    assert sorted(tree.ranks) == list(range(tree.size))
    assert tuple(rank for host in tree.hosts() for rank in host) == tree.ranks
    assert len(tree.levels()) == tree.depth


def test_a_cluster_is_described_in_one_line() -> None:
    assert from_hosts(["a"]).describe() == "1 rank on 1 host"
    assert from_hosts(list("aabbb")).describe() == "5 ranks on 2 hosts (2 + 3)"
    assert from_hosts([str(rank) for rank in range(12)]).describe().endswith("1 + 1 + ...)")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Tree(Node("c", ETHERNET, (leaf(0), leaf(2)))),
            r"must have the ranks 0 .. 1, each once; rank 1 occurs 0 times",
        ),
        (lambda: Tree(Node("c", ETHERNET, (leaf(0), leaf(0)))), "rank 0 occurs 2 times"),
        (lambda: Node("c"), "node 'c': it must be a leaf with a rank or a branch with children"),
        (lambda: Node("c", ETHERNET, (leaf(0),), rank=1), "node 'c': it must be a leaf"),
        (lambda: from_hosts([]), "a job must have at least one rank, got an empty list"),
        (lambda: Tree(Node("c", ETHERNET, (leaf(0),), port=ETHERNET)), "the root has no parent"),
        (lambda: Tree(leaf(0), gamma_s_per_byte=-1), "gamma_s_per_byte must be finite and not negative, got -1"),
        (lambda: Tree(leaf(0), sizes=((2.0, 1.0), (1.0, 1.0))), "sizes must be pairs of ascending bytes"),
        (lambda: Tree(leaf(0), sizes=((2.0, 0.0),)), "factors above 0"),
        (lambda: Tree(leaf(0), message_s=-1), "message_s must be finite and not negative, got -1"),
        (lambda: Node("c", ETHERNET, (leaf(0),), cores=-1), r"cores \(-1\) must be finite and not negative"),
        (lambda: Node("r", ETHERNET, (Node("c", ETHERNET, (leaf(0),)),), cores=1), "only a host"),
        (lambda: Node("", rank=0, cores=1), "only a host"),
        *(
            (lambda values=values: Link(*values), "both must be finite and not negative")
            for values in [(-1.0, 0.0), (0.0, -1.0), (float("nan"), 0.0), (0.0, float("inf"))]
        ),
        *(
            (lambda ranks=ranks: from_hosts("ab").subset(ranks), "takes ranks of the tree")
            for ranks in ([], [0, 0], [2], [-1])
        ),
    ],
)
def test_wrong_trees_links_and_subsets_are_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        make()


def test_a_subset_keeps_links_and_drops_what_is_empty() -> None:
    cluster = from_hosts(["a", "b", "a", "b", "c"])
    hosts = Node("b", SHARED_MEMORY, (leaf(0),)), Node("c", SHARED_MEMORY, (leaf(1),))
    assert cluster.subset([1, 4]) == Tree(Node("cluster", ETHERNET, hosts))
    assert cluster.subset([0, 2]) == from_hosts("aa")
    assert cluster.subset([3]) == from_hosts("b")
    assert cluster.subset(range(5)) == cluster
    assert Tree(cluster.root, 1e-9).subset([0]).gamma_s_per_byte == 1e-9


@pytest.mark.parametrize("seed", range(8))
def test_algorithms_work_on_random_subsets(seed: int) -> None:
    dice = random.Random(seed)
    cluster = random_tree(seed, most_leaves=14)
    ranks = sorted(dice.sample(range(cluster.size), dice.randint(1, cluster.size)))
    part = cluster.subset(ranks)
    assert sorted(part.ranks) == list(range(len(ranks)))
    neighbours = [ranks[place] for place in part.ranks]
    assert neighbours == [rank for rank in cluster.ranks if rank in ranks]
    for name in {"auto", *registry.names()} - {"torus2d"}:  # which needs two dimensions
        planner.prove(planner.allreduce_plan(part, name, nbytes=1 << 20).plan)
    planner.prove(planner.all_to_all_plan(part))


def test_bytes_in_hosts_take_longer_or_less_long_by_the_size_of_the_buffer() -> None:
    tree = from_hosts("aab", inside=Link(1e-6, 1e-9))
    assert tree.at(1) is tree
    tree = replace(
        tree, gamma_s_per_byte=1e-10, handover=Link(5e-6, 2e-10), sizes=((1000.0, 0.5), (1e6, 1.0), (4e6, 3.0))
    )
    for nbytes, factor in ((1, 0.5), (1000, 0.5), (1001, 1.0), (1e6, 1.0), (2e6, 3.0), (1e9, 3.0)):
        sized = tree.at(nbytes)
        assert sized is tree.at(nbytes) and not sized.sizes
        assert sized.root.children[0].link == Link(1e-6, factor * 1e-9)
        assert sized.root.link == tree.root.link
        assert (sized.gamma_s_per_byte, sized.handover) == (factor * 1e-10, Link(5e-6, factor * 2e-10))


def test_ranks_share_the_cores_of_their_host() -> None:
    tree = from_hosts("aaabbc")
    assert tree.sharing == (1,) * 6
    tree = Tree(with_cores(tree.root, {"a": 2, "b": 8}))
    assert tree.sharing == (1.5, 1.5, 1.5, 1, 1, 1)
    assert read.parse(write.text(tree)) == tree
    assert tree.subset([0, 3, 5]).sharing == (1, 1, 1)
    assert tree.subset([0, 1, 2]).sharing == (1.5,) * 3


def test_a_node_may_have_a_port_of_its_own_and_keeps_it_in_a_subset() -> None:
    fast, slow = Link(1e-6, 1e-9), Link(1e-4, 1e-7)
    hosts = (Node("a", fast, (leaf(0), leaf(1))), Node("b", fast, (leaf(2), leaf(3, slow)), port=slow))
    tree = Tree(Node("cluster", ETHERNET, hosts), 1e-9, 2e-6, 3e-10)
    assert tree.root.ports == (ETHERNET, slow)
    assert tree.root.slowest == Link(1e-4, 1e-7)
    some = tree.subset([3, 0])
    assert (some.gamma_s_per_byte, some.message_s, some.selection_s_per_byte) == (1e-9, 2e-6, 3e-10)
    assert some.root.ports == (ETHERNET, slow)
    assert some.root.children[1].ports == (slow,)
    assert tree.subset([2, 3]).root.port is None
