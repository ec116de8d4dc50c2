"""What trees and halving send between hosts; and the two trees, in one of which each rank is a leaf."""

from __future__ import annotations

import pytest

from hvd_ext.planning.cost import traffic
from hvd_ext.planning.lower import rounds_of
from hvd_ext.planning.model import LogicalPlan
from hvd_ext.planning.schedules import binary_tree, halving_doubling, tree as two_trees
from hvd_ext.planning.verify import verify
from tests.unit.planning.clusters import even_tree, one_host


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 4), (4, 4), (8, 2), (2, 3)])
def test_halving_sends_little_between_hosts_whose_number_is_a_power_of_two(hosts: int, per_host: int) -> None:
    tree = even_tree(hosts, per_host)
    between, inside = traffic(halving_doubling.build(tree), tree)
    assert between.busiest == pytest.approx(2 * (hosts - 1) / hosts)
    assert inside.busiest == pytest.approx(2 * (tree.size - 1) / tree.size)


def test_a_binary_tree_crosses_to_each_host_once_and_back() -> None:
    tree = even_tree(4, 4)
    plan = binary_tree.build(tree)
    assert traffic(plan, tree)[0].total == pytest.approx(2 * 2 * 3), "three hosts, through two ports each"
    assert rounds_of(plan) == 2 * (2 + 2)


def roles(plan: LogicalPlan, unit: int) -> dict[int, int]:
    """For each rank, how many messages it adds up in the tree of a unit."""
    calls = [call for level in plan.levels for call in level.calls if call.kind == "reduce"]
    found = dict.fromkeys(range(plan.size), 0)
    for call in calls:
        if call.spans[0].begin == unit:
            found[call.root] += len(call.ranks) - 1
    return found


@pytest.mark.parametrize("size", [*range(2, 10), 15, 16, 17, 31, 32, 33])
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
