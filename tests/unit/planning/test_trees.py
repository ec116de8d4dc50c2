"""The schedules that move whole vectors, and the two trees."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_ext.planning.cost import profile, traffic
from hvd_ext.planning.cost.mgwfbp import binary_tree, halving_doubling, recursive_doubling
from hvd_ext.planning.ir import COUNT, OPCODE, PEER, RECV, RECV_REDUCE, ROUND, SEND
from hvd_ext.planning.lower import rounds_of, rows_of
from hvd_ext.planning.model import LogicalPlan
from hvd_ext.planning.schedules import (
    binary_tree as binary,
    halving_doubling as halving,
    recursive_doubling as doubling,
    tree as two_trees,
)
from hvd_ext.planning.verify import verify
from hvd_ext.topology.tree import SHARED_MEMORY, Tree
from tests.unit.planning.clusters import even_tree, one_host, random_tree
from tests.unit.planning.interpreter import events_of, run

MEGABYTE = 1 << 20


def test_partners_exchange_whole_vectors_and_the_first_are_neighbours() -> None:
    plan = doubling.build(even_tree(2, 4))
    assert [level.name for level in plan.levels] == [f"exchange at distance {d}" for d in (1, 2, 4)]
    rows = rows_of(plan, 5)
    assert rows[:, PEER].tolist() == [4, 4, 7, 7, 1, 1]
    assert rows[:, OPCODE].tolist() == [RECV_REDUCE, SEND] * 3
    assert set(rows[:, COUNT].tolist()) == {1}


@pytest.mark.parametrize("size", range(2, 18))
def test_recursive_doubling_takes_log2_rounds_and_two_more_to_fold(size: int) -> None:
    plan = doubling.build(one_host(size))
    power = size & (size - 1) == 0
    assert rounds_of(plan) == size.bit_length() - 1 + (0 if power else 2)
    sitting_out = [rank for rank in range(size) if rows_of(plan, rank)[:, OPCODE].tolist() == [SEND, RECV]]
    assert len(sitting_out) == size - (1 << (size.bit_length() - 1))


@pytest.mark.parametrize("size", [2, 3, 5, 8, 13])
def test_exchanged_sums_are_the_same_bits_on_all_ranks(size: int) -> None:
    """a + b on one side is b + a on the other; sums of three floats in different orders would differ."""
    rng = np.random.default_rng(size)
    data = rng.standard_normal((size, 300)).astype("float32") * 10.0 ** rng.integers(-6, 6, (size, 300))
    data = data.astype("float32")
    run(events_of([rows_of(doubling.build(one_host(size)), rank) for rank in range(size)]), data, 1)
    assert all(np.array_equal(data[0], other) for other in data)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_on_one_host_the_costs_are_the_lines_of_table_2(size: int) -> None:
    tree = Tree(one_host(size).root, gamma_s_per_byte=1e-10)
    for schedule, line in ((doubling, recursive_doubling), (halving, halving_doubling), (binary, binary_tree)):
        wanted = line(size, SHARED_MEMORY, 1e-10).seconds(MEGABYTE)
        assert schedule.cost(tree, MEGABYTE) == pytest.approx(wanted)
        assert profile(schedule.build(tree), tree).price_s(MEGABYTE) == pytest.approx(wanted)


@pytest.mark.parametrize("seed", range(8))
def test_on_any_tree_the_costs_are_those_of_the_plans(seed: int) -> None:
    tree = random_tree(seed, most_leaves=24)
    for schedule in (doubling, halving):
        wanted = profile(schedule.build(tree), tree).price_s(MEGABYTE)
        assert schedule.cost(tree, MEGABYTE) == pytest.approx(wanted)


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 4), (4, 4), (8, 2), (2, 3)])
def test_halving_sends_little_between_hosts_whose_number_is_a_power_of_two(hosts: int, per_host: int) -> None:
    tree = even_tree(hosts, per_host)
    between, inside = traffic(halving.build(tree), tree)
    assert between.busiest == pytest.approx(2 * (hosts - 1) / hosts)
    assert inside.busiest == pytest.approx(2 * (tree.size - 1) / tree.size)


def test_a_binary_tree_crosses_to_each_host_once_and_back() -> None:
    tree = even_tree(4, 4)
    between, _ = traffic(binary.build(tree), tree)
    assert between.total == pytest.approx(2 * 2 * 3), "three hosts give and take the buffer, through two ports each"
    assert rounds_of(binary.build(tree)) == 2 * (2 + 2)


def roles(plan: LogicalPlan, unit: int) -> dict[int, int]:
    """For each rank, how many messages it adds up in the tree of a unit."""
    calls = [call for level in plan.levels for call in level.calls if call.kind == "reduce"]
    found = dict.fromkeys(range(plan.size), 0)
    for call in calls:
        if call.spans[0].begin == unit:
            found[call.root] += len(call.ranks) - 1
    return found


@pytest.mark.parametrize("size", range(2, 34))
def test_who_works_in_one_tree_is_a_leaf_of_the_other(size: int) -> None:
    plan = two_trees.build(one_host(size))
    verify(plan)
    first, second = roles(plan, 0), roles(plan, 1)
    for rank in range(size):
        assert first[rank] <= 2
        assert second[rank] <= 2
        assert not (first[rank] and second[rank])
    assert rounds_of(plan) == 2 * (size.bit_length() - 1)


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 2), (5, 1), (7, 3), (8, 4)])
def test_two_trees_send_no_host_more_than_twice_the_buffer(hosts: int, per_host: int) -> None:
    tree = even_tree(hosts, per_host)
    for found in traffic(two_trees.build(tree), tree):
        assert found.busiest <= (2 if found.depth == 0 or per_host == 1 else 2.5)


def test_two_trees_are_priced_as_the_pipelined_plan() -> None:
    tree = one_host(15)
    price = profile(two_trees.build(tree), tree).price_s(64 * MEGABYTE, 120_000)
    assert two_trees.cost(tree, 64 * MEGABYTE) == pytest.approx(price, rel=0.01)


def test_rounds_of_the_two_trees_run_side_by_side() -> None:
    plan = two_trees.build(one_host(8))
    rounds = {(row[ROUND], row[COUNT]) for rank in range(8) for row in rows_of(plan, rank).tolist()}
    assert {count for _, count in rounds} == {1}
    assert len({number for number, _ in rounds}) == 6
