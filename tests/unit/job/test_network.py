"""When a job measures its links, and how it says what they are."""

from __future__ import annotations

import pytest

from hvd_ext.job import network
from hvd_ext.options import Options
from hvd_ext.topology.tree import Link, Node, Tree, from_hosts, leaf


@pytest.mark.parametrize(
    ("options", "size", "expected"),
    [
        (Options(), 2, True),
        (Options(), 1, False),
        (Options(probe="off"), 2, False),
        (Options(probe="refresh"), 2, True),
        (Options(algorithm="ring"), 2, True),
        (Options(algorithm="ring", replan_every=0), 2, False),
        (Options(algorithm="ring", buckets=__file__), 2, False),
        (Options(topology="file.yaml"), 2, False),
    ],
)
def test_a_job_measures_if_something_is_left_to_choose(options: Options, size: int, expected: bool) -> None:
    assert network.wanted(options, size) is expected


def test_links_are_described_in_one_line() -> None:
    assert network.describe(from_hosts(["a", "a"])) == "in hosts 16 Gbit/s and 2 us"
    fast, slow = Link(4e-5, 8e-8), Link(4e-5, 16e-8)
    hosts = [
        Node(name, Link(1e-6, 1e-9), (leaf(rank),), port=port)
        for rank, (name, port) in enumerate([("a", None), ("b", None), ("c", slow)])
    ]
    tree = Tree(Node("cluster", fast, tuple(hosts)))
    assert network.describe(tree) == "between hosts 100 Mbit/s and 40 us (c: 50 Mbit/s)"
