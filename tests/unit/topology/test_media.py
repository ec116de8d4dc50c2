"""Groups of GPUs in a host: which there are, and what a tree with them says of its hosts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hvd_ext.errors import TopologyError
from hvd_ext.planning import explain, planner, registry
from hvd_ext.topology import media, read, write
from hvd_ext.topology.scale import scaled
from hvd_ext.topology.tree import Link, Node, Tree, leaf, with_cores

LETTERS = {"n": "NVLink", "p": "PCIe", "h": "host memory"}


def between(rows: str) -> Callable[[int, int], str]:
    """Reads what joins the GPUs: a word for each, with a letter for each."""
    words = rows.split()
    return lambda one, other: LETTERS[words[one][other]]


def shape(node: Node) -> object:
    """Gives the media and ranks of a node, as nested lists."""
    return node.rank if not node.children else [node.medium, *map(shape, node.children)]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("-", ["", 0]),
        ("-n n-", ["NVLink", 0, 1]),
        ("-hhh h-hh hh-h hhh-", ["host memory", 0, 1, 2, 3]),
        ("-nhh n-hh hh-n hhn-", ["host memory", ["NVLink", 0, 1], ["NVLink", 2, 3]]),
        ("-hnh h-hn nh-h hnh-", ["host memory", ["NVLink", 0, 2], ["NVLink", 1, 3]]),
        ("-nph n-ph pp-h hhh-", ["host memory", ["PCIe", ["NVLink", 0, 1], 2], 3]),
        # a chain: the first and the third do not reach each other
        ("-nhn n-nh hn-n nhn-", ["host memory", 0, 1, 2, 3]),
        ("-np n-n pn-", ["PCIe", 0, 1, 2]),
        ("-nhhh n-nhh hn-hh hhh-n hhhn-", ["host memory", 0, 1, 2, ["NVLink", 3, 4]]),
    ],
)
def test_gpus_that_reach_each_other_better_are_a_group(rows: str, expected: object) -> None:
    node = media.host("node", range(len(rows.split())), between(rows))
    assert shape(node) == expected
    assert node.height == 1
    tree = Tree(node)
    assert tree.hosts() == (node.ranks,)
    assert read.parse(write.text(tree)).root.ranks == node.ranks
    assert shape(read.parse(write.text(tree)).root) == expected


GROUPS = "-nhh n-hh hh-n hhn-"


def test_a_cluster_of_such_hosts_plans_and_says_what_joins_them() -> None:
    def of_pairs(one: int, other: int) -> str:
        return between(GROUPS)(one % 4, other % 4)

    tree = media.assumed(("a",) * 4 + ("b",) * 4, of_pairs)
    assert [node.name for node in tree.host_nodes] == ["a", "b"]
    assert (tree.root.height, tree.depth) == (2, 3)
    assert explain.kinds(tree) == ("between hosts", "in hosts, host memory", "in hosts, NVLink")
    assert [kind.kind for kind in explain.links(tree)] == list(explain.kinds(tree))
    for name in registry.names():
        if registry.supports(registry.get(name), tree) is None:
            assert planner.price(tree, name, 1 << 20).seconds > 0
    cores = Tree(with_cores(tree.root, {"a": 2, "b": 8}))
    assert cores.sharing == (2.0,) * 4 + (1.0,) * 4
    assert [node.ranks for node in scaled(tree, 12).host_nodes][2] == (8, 9, 10, 11)
    assert shape(tree.subset([0, 1, 4, 6]).root) == [
        "",
        ["host memory", ["NVLink", 0, 1]],
        ["host memory", ["NVLink", 2], ["NVLink", 3]],
    ]
    slow = tree.slowed(2.0)
    assert slow.root.link == tree.root.link
    group, before = slow.host_nodes[0].children[0], tree.host_nodes[0].children[0]
    assert group.link.beta_s_per_byte == 2 * before.link.beta_s_per_byte


def test_a_wrong_medium_is_refused() -> None:
    pair = (leaf(0), leaf(1))
    with pytest.raises(TopologyError, match=r"medium \('Ethernet'\) must be one of NVLink, PCIe, host memory"):
        Node("node", children=pair, medium="Ethernet")
    for below in (Node("below", children=pair), Node("below", children=pair, medium="NVLink", cores=2)):
        with pytest.raises(TopologyError, match="a medium .PCIe. joins GPUs of one host; the nodes below must have"):
            Node("node", Link(0, 0), (below, leaf(2)), medium="PCIe")
