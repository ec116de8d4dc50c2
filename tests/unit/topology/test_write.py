"""What is written as YAML is read as the same cluster."""

from __future__ import annotations

import pytest

from hvd_ext.errors import TopologyError
from hvd_ext.topology import read, write
from hvd_ext.topology.tree import Link, Node, Tree, from_hosts, leaf

IN_HOST, BETWEEN, SLOW = Link(1.5e-6, 4e-10), Link(4e-5, 8.5e-8), Link(4e-5, 1.7e-7)


def host(name: str, *ranks: int, port: Link | None = None) -> Node:
    return Node(name, IN_HOST, tuple(leaf(rank) for rank in ranks), port=port)


TREES = [
    from_hosts(["a"]),
    from_hosts(["a", "b", "a"]),
    Tree(Node("c", BETWEEN, (host("a", 0, 2), host("b", 1, 3, port=SLOW)))),
    Tree(
        Node("c", BETWEEN, (host("a", 0, 2), leaf(1, SLOW), leaf(3))), 1e-10, 2e-6, 5e-10, Link(5e-6, 1e-10), 1e6, 2.5
    ),
    Tree(Node("c", SLOW, (Node("rack", BETWEEN, (host("a", 0), host("b", 1)), port=BETWEEN), host("d", 2)))),
    Tree(Node("h", IN_HOST, (leaf(0), leaf(1, SLOW)))),
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.describe())
def test_a_cluster_is_written_and_read_again(tree: Tree) -> None:
    text = write.text(tree, "two\nlines")
    assert text.startswith("# two\n# lines\n")
    assert read.parse(text, size=tree.size) == tree


def test_numbers_are_rounded_to_four_digits() -> None:
    tree = Tree(Node("h", Link(1.23456e-6, 9.87654e-10), (leaf(0), leaf(1))))
    assert read.parse(write.text(tree)).root.link == Link(1.235e-6, 9.877e-10)


@pytest.mark.parametrize("key", ["gamma_s_per_byte", "message_s", "selection_s_per_byte"])
def test_a_cost_must_not_be_negative(key: str) -> None:
    with pytest.raises(TopologyError, match=key):
        read.parse(f"link: {{alpha_s: 0, gbit_per_s: 1}}\nranks: [0, 1]\n{key}: -1.0\n")


def test_the_outermost_node_has_no_port() -> None:
    with pytest.raises(TopologyError, match="must not have a port"):
        read.parse("link: {alpha_s: 0, gbit_per_s: 1}\nport: {alpha_s: 0, gbit_per_s: 1}\nranks: [0, 1]\n")
