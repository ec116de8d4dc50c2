"""The price from the calls is the price from the rows, up to the way of the first segment."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_ext.planning.cost import Sparsity, level_profile, profile, traffic
from hvd_ext.planning.cost.loads import Ports
from hvd_ext.planning.cost.sparse import sent_shares
from hvd_ext.planning.grain import segment_nbytes
from hvd_ext.planning.ir import OPCODE, PEER, SENDS
from hvd_ext.planning.lower import rows_of
from hvd_ext.planning.model import LogicalPlan
from hvd_ext.planning.planner import all_gather_plan, all_to_all_plan, broadcast_plan, reduce_scatter_plan
from hvd_ext.topology.tree import Tree, from_hosts
from tests.unit.planning.clusters import (
    dense_plans,
    even_tree,
    large_tree,
    one_host,
    random_tree,
    sparse_plans,
    uneven_hosts,
)

NBYTES = 8 << 20
SPARSITY = Sparsity(0.02, 5.0)
CLUSTERS = [one_host(7), uneven_hosts(13), even_tree(2, 2, 3), even_tree(4, 8), from_hosts("abbccccc")]
CLUSTERS += [random_tree(seed, most_leaves=16) for seed in range(8)]


def whole_plans(tree: Tree) -> list[LogicalPlan]:
    """The plans of dense steps: of all schedules, and of the other collectives."""
    others = [all_gather_plan(tree), all_to_all_plan(tree), reduce_scatter_plan(tree)]
    return [*dense_plans(tree), *others, *(broadcast_plan(tree, root) for root in (0, tree.size - 1))]


@pytest.mark.parametrize("tree", CLUSTERS, ids=Tree.describe)
def test_the_price_is_near_to_that_of_the_rows_and_the_busiest_port_is_the_same(tree: Tree) -> None:
    tree = Tree(tree.root, gamma_s_per_byte=3e-10)
    for plan in whole_plans(tree):
        by_round, by_level = profile(plan, tree), level_profile(plan, tree)
        assert by_level.busiest_s_per_byte == pytest.approx(by_round.busiest_s_per_byte), plan.algorithm
        assert by_level.latency_s >= by_round.latency_s * (1 - 1e-9), plan.algorithm
        grain = segment_nbytes(plan, NBYTES, tree)
        exact = by_round.price_s(NBYTES, grain)
        assert by_level.price_s(NBYTES, grain) == pytest.approx(exact, rel=0.08), plan.algorithm


@pytest.mark.parametrize("tree", CLUSTERS, ids=Tree.describe)
def test_the_price_of_a_sparse_plan_is_near_to_that_of_the_rows(tree: Tree) -> None:
    for plan in sparse_plans(tree):
        by_round, by_level = profile(plan, tree, SPARSITY), level_profile(plan, tree, SPARSITY)
        assert by_level.busiest_s_per_byte == pytest.approx(by_round.busiest_s_per_byte), plan.algorithm
        # A level is taken as a whole: what its rounds send over different ports is thought to go side by side.
        assert by_level.price_s(NBYTES) <= by_round.price_s(NBYTES) * 1.15, plan.algorithm
        assert by_level.price_s(NBYTES) >= by_round.price_s(NBYTES) * 0.7, plan.algorithm


@pytest.mark.parametrize("tree", CLUSTERS, ids=Tree.describe)
def test_the_traffic_is_that_of_the_rows(tree: Tree) -> None:
    ports = Ports(tree)
    for plan in [*whole_plans(tree), *sparse_plans(tree)]:
        carried = np.zeros(2 * len(ports.depths))
        for rank in range(tree.size):
            rows = rows_of(plan, rank)
            sends = np.isin(rows[:, OPCODE], SENDS)
            shares, peers = sent_shares(rows, plan.units, SPARSITY)[sends], rows[sends, PEER]
            messages, crossed = ports.crossed(np.full_like(peers, rank), peers)
            np.add.at(carried, crossed, shares[messages])
        for found in traffic(plan, tree, SPARSITY):
            here = carried[np.repeat(ports.depths == found.depth, 2)]
            assert found.total == pytest.approx(here.sum()), plan.algorithm
            assert found.busiest == pytest.approx(here.max()), plan.algorithm


def test_a_plan_without_messages_costs_nothing() -> None:
    for plan in whole_plans(one_host(1)):
        assert level_profile(plan, one_host(1)).price_s(NBYTES, 64) == 0


def test_on_a_large_uneven_cluster_the_ring_and_trees_across_racks_lose() -> None:
    tree, prices = large_tree(1000), {}
    for plan in dense_plans(tree):
        prices[plan.algorithm] = level_profile(plan, tree).price_s(NBYTES, segment_nbytes(plan, NBYTES, tree))
    assert min(prices, key=lambda name: prices[name]) in {"flexreduce", "two_level"}
    assert prices["ring"] > 2 * prices["flexreduce"]
    assert prices["tree"] > 2 * prices["flexreduce"]
