"""Prices of plans agree with the papers' closed forms where both apply; and no plan can be cheaper than the bounds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.closed_forms import mgwfbp
from benchmarks.closed_forms.blueconnect import ring_s
from benchmarks.closed_forms.schedules import chain_s, cost
from hvd_ext.planning import registry
from hvd_ext.planning.cost import allreduce_bound_s, bound_s, profile, ring_bound_s
from hvd_ext.planning.planner import allreduce_plan
from hvd_ext.planning.schedules import tree as two_trees
from hvd_ext.topology.tree import ETHERNET, SHARED_MEMORY, Link, Node, Tree, from_hosts, leaf
from tests.unit.planning.clusters import even_tree, one_host, random_tree

MEGABYTE = 1 << 20
GAMMA = 1e-10
NBYTES = 16_000_000
WIRE, SLOW = Link(0.0, 8 / 100e6), Link(0.0, 8 / 50e6)


def test_a_ring_is_equation_2_and_a_chain_carries_the_buffer_once() -> None:
    assert ring_s(800.0, 4, Link(2.0, 0.5)) == 3 * (2.0 + 200 * 0.5)
    assert chain_s(800.0, 4, Link(2.0, 0.5)) == 3 * 2.0 + 400.0
    assert ring_s(800.0, 1, Link(2.0, 0.5)) == chain_s(800.0, 1, Link(2.0, 0.5)) == 0


def closed_forms() -> Iterator[tuple[str, Tree]]:
    """The schedules, each with trees on which its closed form is exact."""
    for name in ("ring", "recursive_doubling", "halving_doubling", "binary_tree", "blueconnect"):
        yield from ((name, Tree(one_host(size).root, GAMMA)) for size in (1, 2, 4, 8, 16))
    yield from (("ring", tree) for tree in (one_host(3), one_host(13), even_tree(3, 4)))
    for name in ("recursive_doubling", "halving_doubling"):
        yield from ((name, random_tree(seed, most_leaves=24)) for seed in range(8))
    for name in ("flexreduce", "blueconnect", "torus2d"):  # FlexReduce Eq. 10, BlueConnect Eq. 9
        yield from ((name, even_tree(*degrees)) for degrees in [(2, 2), (3, 4), (4, 8), (2, 2, 3), (2, 3, 2, 2)])


@pytest.mark.parametrize("case", list(closed_forms()), ids=lambda case: f"{case[0]} {case[1].describe()}")
def test_a_plan_is_priced_as_its_closed_form(case: tuple[str, Tree]) -> None:
    name, tree = case
    wanted = cost(name, tree, 48 * MEGABYTE)
    assert profile(registry.get(name).build(tree), tree).price_s(48 * MEGABYTE) == pytest.approx(wanted)
    assert (wanted > 0) == (tree.size > 1)


def test_two_trees_are_priced_as_the_pipelined_plan() -> None:
    tree = one_host(15)
    price = profile(two_trees.build(tree), tree).price_s(64 * MEGABYTE, 120_000)
    assert cost("tree", tree, 64 * MEGABYTE) == pytest.approx(price, rel=0.01)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("name", ["recursive_doubling", "halving_doubling", "binary_tree"])
def test_on_one_host_the_costs_are_the_lines_of_table_2_of_mgwfbp(name: str, size: int) -> None:
    line = getattr(mgwfbp, name)(size, SHARED_MEMORY, GAMMA)
    assert cost(name, Tree(one_host(size).root, GAMMA), MEGABYTE) == pytest.approx(line.seconds(MEGABYTE))


def test_a_ring_over_hosts_waits_for_the_network_and_two_levels_for_the_master_of_the_largest_host() -> None:
    assert cost("ring", even_tree(3, 4), MEGABYTE) == pytest.approx(2 * ring_s(MEGABYTE, 12, ETHERNET))
    expected = 2 * chain_s(MEGABYTE, 5, SHARED_MEMORY) + 2 * ring_s(MEGABYTE, 2, ETHERNET)
    assert cost("two_level", from_hosts("aaaaabb"), MEGABYTE) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "reduced"),
    [
        *(("ring", 3 / 4), ("halving_doubling", 3 / 4), ("blueconnect", 3 / 4)),
        *(("recursive_doubling", 2), ("binary_tree", 2)),
    ],
)
def test_reductions_count_in_closed_forms(name: str, reduced: float) -> None:
    free = one_host(4)
    more = cost(name, Tree(free.root, 1e-9), MEGABYTE) - cost(name, free, MEGABYTE)
    assert more == pytest.approx(reduced * MEGABYTE * 1e-9)


@pytest.mark.parametrize("name", registry.names())
def test_pipelining_never_costs_more_and_never_beats_the_busiest_port(name: str) -> None:
    tree = even_tree(3, 4)
    load = profile(allreduce_plan(tree, name).plan, tree)
    piped = load.price_s(8 * MEGABYTE, 64 << 10)
    assert piped <= load.price_s(8 * MEGABYTE) * (1 + 1e-9)
    assert load.price_s(1000, 64 << 10) == load.price_s(1000)
    # Each of three hosts must send 2 / 3 of the buffer up and 2 / 3 of the result.
    assert piped > 2 * 2 / 3 * 8 * MEGABYTE * ETHERNET.beta_s_per_byte


@pytest.mark.parametrize("hosts", [(2, 2), (4, 3), (4, 4, 4), (1, 1, 1, 1, 1)])
def test_hosts_of_equal_rate_send_twice_their_part_of_what_others_have(hosts: tuple[int, ...]) -> None:
    tree = from_hosts([str(host) for host, count in enumerate(hosts) for _ in range(count)], between=WIRE)
    m, size = len(hosts), sum(hosts)
    assert allreduce_bound_s(tree, NBYTES) == pytest.approx(2 * (m - 1) / m * NBYTES * WIRE.beta_s_per_byte)
    assert ring_bound_s(tree, NBYTES) == pytest.approx(2 * (size - 1) / size * NBYTES * WIRE.beta_s_per_byte)
    assert bound_s(tree, NBYTES, "ring") == ring_bound_s(tree, NBYTES)
    assert bound_s(tree, NBYTES, "flexreduce") == bound_s(tree, NBYTES) == allreduce_bound_s(tree, NBYTES)


def test_ranks_of_one_host_are_bound_by_its_memory() -> None:
    assert allreduce_bound_s(one_host(4), NBYTES) == pytest.approx(1.5 * NBYTES * SHARED_MEMORY.beta_s_per_byte)
    assert ring_bound_s(one_host(4), NBYTES) == pytest.approx(allreduce_bound_s(one_host(4), NBYTES))
    assert allreduce_bound_s(one_host(1), NBYTES) == ring_bound_s(one_host(1), NBYTES) == 0


@pytest.mark.parametrize(
    ("racks", "hosts", "rack", "seconds"),
    [(2, 2, SLOW, 2 * NBYTES), (2, 2, WIRE, 1.5 * NBYTES), (2, 1, WIRE, NBYTES)],
)
def test_racks_are_bound_by_the_worse_of_both_kinds_of_links(
    racks: int, hosts: int, rack: Link, seconds: float
) -> None:
    """Two racks: 2 / 2 * n / w. Four hosts: 3 / 2 * n / w."""
    tree = even_tree(racks, hosts, 3, links=(rack, WIRE, SHARED_MEMORY))
    assert allreduce_bound_s(tree, NBYTES) == pytest.approx(seconds * WIRE.beta_s_per_byte)


def test_ports_of_different_rates_share_the_work_but_each_sends_its_summand() -> None:
    """A rank beside a rack of two hosts: the cut into three parties has two rates."""
    fast, slow = Link(0.0, 1e-9), Link(0.0, 1e-8)
    hosts = Node("rack", slow, (leaf(0), leaf(1)))
    tree = Tree(Node("cluster", fast, (hosts, leaf(2))))
    assert allreduce_bound_s(tree, 1.0) == pytest.approx(max(1e-9, 2 * 2 / (1e8 + 1e8 + 1e9), 1e-8))
    free = Tree(Node("cluster", Link(0.0, 0.0), (hosts, leaf(2))))
    assert allreduce_bound_s(free, 1.0) == 1e-8
