"""The price from the calls is the price from the rows, up to the way of the first segment."""

from __future__ import annotations

import pytest

from hvd_ext.planning import registry
from hvd_ext.planning.cost import level_profile, profile, traffic
from hvd_ext.planning.cost.loads import Ports
from hvd_ext.planning.grain import segment_nbytes
from hvd_ext.planning.ir import COUNT, OPCODE, PEER, SEND
from hvd_ext.planning.lower import rows_of
from hvd_ext.planning.model import LogicalPlan
from hvd_ext.planning.planner import (
    all_gather_plan,
    all_to_all_plan,
    broadcast_plan,
    reduce_scatter_plan,
)
from hvd_ext.topology.tree import Tree
from tests.unit.planning.clusters import even_tree, large_tree, one_host, random_tree, uneven_hosts

NBYTES = 8 << 20
CLUSTERS = [one_host(7), uneven_hosts(13), even_tree(2, 2, 3), even_tree(4, 8)]
CLUSTERS += [random_tree(seed, most_leaves=24) for seed in range(8)]


def plans(tree: Tree) -> list[LogicalPlan]:
    schedules = [registry.get(name) for name in registry.names()]
    found = [schedule.build(tree) for schedule in schedules if registry.supports(schedule, tree) is None]
    others = [all_gather_plan(tree), all_to_all_plan(tree), reduce_scatter_plan(tree)]
    return [*found, *others, *(broadcast_plan(tree, root) for root in (0, tree.size - 1))]


@pytest.mark.parametrize("tree", CLUSTERS, ids=Tree.describe)
def test_the_busiest_port_is_that_of_the_rows(tree: Tree) -> None:
    tree = Tree(tree.root, gamma_s_per_byte=3e-10)
    for plan in plans(tree):
        by_round, by_level = profile(plan, tree), level_profile(plan, tree)
        assert by_level.busiest_s_per_byte == pytest.approx(by_round.busiest_s_per_byte), plan.algorithm
        assert by_level.latency_s >= by_round.latency_s * (1 - 1e-9), plan.algorithm


@pytest.mark.parametrize("tree", CLUSTERS, ids=Tree.describe)
def test_the_price_is_near_to_that_of_the_rows(tree: Tree) -> None:
    tree = Tree(tree.root, gamma_s_per_byte=3e-10)
    for plan in plans(tree):
        grain = segment_nbytes(plan, NBYTES, tree)
        exact = profile(plan, tree).price_s(NBYTES, grain)
        assert level_profile(plan, tree).price_s(NBYTES, grain) == pytest.approx(exact, rel=0.08), plan.algorithm


@pytest.mark.parametrize("tree", CLUSTERS, ids=Tree.describe)
def test_the_traffic_is_that_of_the_rows(tree: Tree) -> None:
    ports = Ports(tree)
    for plan in plans(tree):
        carried = dict.fromkeys(range(2 * len(ports.depths)), 0.0)
        for rank in range(tree.size):
            sends = (rows := rows_of(plan, rank))[rows[:, OPCODE] == SEND]
            messages, crossed = ports.crossed(sends[:, PEER] * 0 + rank, sends[:, PEER])
            for message, port in zip(messages.tolist(), crossed.tolist(), strict=True):
                carried[port] += sends[message, COUNT] / plan.units
        for found in traffic(plan, tree):
            here = [share for port, share in carried.items() if ports.depths[port // 2] == found.depth]
            assert found.total == pytest.approx(sum(here)), plan.algorithm
            assert found.busiest == pytest.approx(max(here)), plan.algorithm


def test_a_plan_without_messages_costs_nothing() -> None:
    for plan in plans(one_host(1)):
        assert level_profile(plan, one_host(1)).price_s(NBYTES, 64) == 0


def test_on_a_large_uneven_cluster_the_ring_and_trees_across_racks_lose() -> None:
    tree = large_tree(1000)
    prices = {}
    for name in registry.names():
        schedule = registry.get(name)
        if registry.supports(schedule, tree) is None:
            plan = schedule.build(tree)
            prices[name] = level_profile(plan, tree).price_s(NBYTES, segment_nbytes(plan, NBYTES, tree))
    assert min(prices, key=lambda name: prices[name]) in {"flexreduce", "two_level"}
    assert prices["ring"] > 2 * prices["flexreduce"]
    assert prices["tree"] > 2 * prices["flexreduce"]
