"""Bounds of a dense allreduce from the rates of links alone."""

from __future__ import annotations

import pytest

from hvd_ext.planning.cost import allreduce_bound_s, bound_s, ring_bound_s
from hvd_ext.topology.tree import SHARED_MEMORY, Link, Node, Tree, from_hosts, leaf
from tests.unit.planning.clusters import one_host

NBYTES = 16_000_000
WIRE = Link(0.0, 8 / 100e6)


def racks(rack: Link, host: Link, ranks_of: tuple[tuple[int, ...], ...]) -> Tree:
    numbers = iter(range(1000))
    hosts = [
        [Node("host", SHARED_MEMORY, tuple(leaf(next(numbers)) for _ in range(count))) for count in counts]
        for counts in ranks_of
    ]
    return Tree(Node("cluster", rack, tuple(Node("rack", host, tuple(nodes)) for nodes in hosts)))


@pytest.mark.parametrize("hosts", [(2, 2), (4, 3), (4, 4, 4), (1, 1, 1, 1, 1)])
def test_hosts_of_equal_rate_send_twice_their_part_of_what_others_have(hosts: tuple[int, ...]) -> None:
    tree = from_hosts([str(host) for host, count in enumerate(hosts) for _ in range(count)], between=WIRE)
    m, size = len(hosts), sum(hosts)
    assert allreduce_bound_s(tree, NBYTES) == pytest.approx(2 * (m - 1) / m * NBYTES * 8 / 100e6)
    assert ring_bound_s(tree, NBYTES) == pytest.approx(2 * (size - 1) / size * NBYTES * 8 / 100e6)
    assert bound_s(tree, NBYTES, "ring") == ring_bound_s(tree, NBYTES)
    assert bound_s(tree, NBYTES, "flexreduce") == bound_s(tree, NBYTES) == allreduce_bound_s(tree, NBYTES)


def test_ranks_of_one_host_are_bound_by_its_memory() -> None:
    assert allreduce_bound_s(one_host(4), NBYTES) == pytest.approx(1.5 * NBYTES * SHARED_MEMORY.beta_s_per_byte)
    assert ring_bound_s(one_host(4), NBYTES) == pytest.approx(allreduce_bound_s(one_host(4), NBYTES))
    assert allreduce_bound_s(one_host(1), NBYTES) == ring_bound_s(one_host(1), NBYTES) == 0


def test_racks_are_bound_by_the_worse_of_both_kinds_of_links() -> None:
    even = ((3, 3), (3, 3))
    slow = Link(0.0, 2 * WIRE.beta_s_per_byte)
    # Two racks: 2 / 2 * n / w. Four hosts: 3 / 2 * n / w.
    assert allreduce_bound_s(racks(slow, WIRE, even), NBYTES) == pytest.approx(NBYTES * slow.beta_s_per_byte)
    assert allreduce_bound_s(racks(WIRE, WIRE, even), NBYTES) == pytest.approx(1.5 * NBYTES * WIRE.beta_s_per_byte)
    assert allreduce_bound_s(racks(WIRE, WIRE, ((3,), (1,))), NBYTES) == pytest.approx(NBYTES * WIRE.beta_s_per_byte)


def test_ports_of_different_rates_share_the_work_but_each_sends_its_summand() -> None:
    """A rank beside a rack of two hosts: the cut into three parties has two rates."""
    fast, slow = Link(0.0, 1e-9), Link(0.0, 1e-8)
    hosts = Node("rack", slow, (leaf(0), leaf(1)))
    tree = Tree(Node("cluster", fast, (hosts, leaf(2))))
    assert allreduce_bound_s(tree, 1.0) == pytest.approx(max(1e-9, 2 * 2 / (1e8 + 1e8 + 1e9), 1e-8))
    free = Tree(Node("cluster", Link(0.0, 0.0), (hosts, leaf(2))))
    assert allreduce_bound_s(free, 1.0) == 1e-8
