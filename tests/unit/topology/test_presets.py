"""The clusters of the papers, and clusters with other numbers of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hvd_ext.errors import TopologyError
from hvd_ext.topology.presets import PRESETS, cluster, preset
from hvd_ext.topology.scale import MOST_RANKS, scaled
from hvd_ext.topology.tree import ETHERNET, SHARED_MEMORY, Tree, from_hosts

SIZES = {"mgwfbp-8": 16, "mgwfbp-64": 64, "blueconnect-192": 192, "commlib": 128, "eagersgd": 64}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_a_source_and_the_ranks_of_its_paper(name: str) -> None:
    tree = preset(name)
    assert PRESETS[name].name == name and "Section" in PRESETS[name].source
    wanted = int(name.rpartition("-")[2]) if name.startswith("flexreduce") else SIZES.get(name, 8)
    assert tree.size == wanted and tree.ranks == tuple(range(wanted))


def test_the_hosts_of_flexreduce_differ_by_one_rank_at_most_and_unknown_presets_are_refused() -> None:
    assert [len(host) for host in preset("flexreduce-7").hosts()] == [4, 3]
    assert [len(host) for host in preset("flexreduce-11").hosts()] == [4, 4, 3]
    with pytest.raises(TopologyError, match="preset 'commlibs': must be one of mgwfbp-8, "):
        preset("commlibs")


def test_an_allreduce_starts_in_the_times_that_mgwfbp_printed() -> None:
    """Section V-A: 90.52, 271.56 and 633.64 us on 2, 4 and 8 nodes, which is 2 (N - 1) alpha."""
    alpha_s = preset("mgwfbp-8").root.link.alpha_s
    assert [round(2 * (n - 1) * alpha_s * 1e6, 2) for n in (2, 4, 8)] == [90.52, 271.56, 633.64]


def hosts(tree: Tree) -> list[int]:
    return [len(host) for host in tree.hosts()]


def test_more_hosts_are_copies_of_those_that_are_there() -> None:
    tree = cluster([3, 2], SHARED_MEMORY, ETHERNET, 1e-10)
    assert hosts(scaled(tree, 10)) == [3, 2, 3, 2]
    assert hosts(scaled(tree, 8)) == [3, 2, 3]
    assert hosts(scaled(tree, 3)) == [3]
    grown = scaled(tree, 13)
    assert grown.gamma_s_per_byte == 1e-10 and grown.root.link == ETHERNET
    assert grown.root.children[2].link == SHARED_MEMORY and grown.ranks == tuple(range(13))
    assert scaled(tree, 5) is tree


def test_fewer_ranks_than_a_host_are_a_part_of_this_host() -> None:
    assert hosts(scaled(preset("commlib"), 4)) == [4]
    assert scaled(preset("commlib"), 4).root.link == preset("commlib").root.children[0].link


def test_a_host_that_becomes_the_root_has_no_port() -> None:
    root = cluster([2, 2], SHARED_MEMORY, ETHERNET).root
    hosts_with_ports = tuple(replace(host, port=ETHERNET) for host in root.children)
    assert scaled(Tree(replace(root, children=hosts_with_ports)), 2).root.port is None


def test_racks_are_filled_one_after_the_other() -> None:
    tree = preset("blueconnect-192")
    grown = scaled(tree, 64 * 5 + 8)
    assert [len(rack.children) for rack in grown.root.children] == [16] * 5 + [2]
    assert scaled(tree, 32).depth == 2, "one rack needs no link between racks"
    assert scaled(tree, 4).depth == 1


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (6, r"ranks \(6\): whole hosts of 5 ranks on 2 hosts \(3 \+ 2\) have 5 or 8 ranks; name one of them"),
        (4, "have 3 or 5 ranks"),
        (0, f"ranks \\(0\\): must be 1 to {MOST_RANKS}"),
        (10**9, f"must be 1 to {MOST_RANKS}"),
    ],
)
def test_ranks_that_no_whole_hosts_have_are_refused(ranks: int, words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        scaled(cluster([3, 2], SHARED_MEMORY, ETHERNET), ranks)


def test_one_host_says_nothing_of_a_link_to_others() -> None:
    one = from_hosts(["a"] * 4)
    assert hosts(scaled(one, 2)) == [2]
    with pytest.raises(TopologyError, match="is one host of 4 ranks and says nothing of a link to others"):
        scaled(one, 8)
