"""Every sparse schedule on random clusters: proven, run, and in step with its dense companion."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_ext.planning import ir, registry
from hvd_ext.planning.explain_sparse import inter_host_nbytes
from hvd_ext.planning.lower import rows_of
from hvd_ext.planning.model import LogicalPlan
from hvd_ext.planning.schedules import hitopk
from hvd_ext.planning.schedules.flexreduce import MOST_UNITS, denominator
from hvd_ext.planning.sparse_planner import shards_of
from hvd_ext.planning.sparse_stages import parties
from hvd_ext.planning.verify import verify
from hvd_ext.topology.tree import Tree, from_hosts
from tests.unit.planning.clusters import even_tree, one_host, random_tree, topk_plans
from tests.unit.planning.interpreter import Floats, Ranks, k_of, largest, unit_begin

NAMES = registry.sparse_names()
DENSITY = 0.11
TREES = [one_host(1), one_host(4), from_hosts("abc"), from_hosts("aabbb"), from_hosts("aaaabbbccc"), even_tree(2, 2, 2)]
TREES += [random_tree(seed, most_leaves=12, most_depth=4) for seed in range(8)]


def data_of(size: int, elements: int) -> Floats:
    """data[rank, element]: whole numbers, all absolute values of a rank different, so that sums are exact and no two
    elements tie."""
    rng = np.random.default_rng(size * 1000 + elements)
    return np.stack(
        [rng.permutation(np.arange(1, elements + 1)) * rng.choice([-1, 1], elements) for _ in range(size)]
    ).astype(np.float64)


def run(plan: LogicalPlan, data: Floats, density: float = DENSITY, seed: int = 0) -> Ranks:
    ranks = Ranks([rows_of(plan, rank) for rank in range(plan.size)], plan.units, data, density)
    ranks.run(seed)
    return ranks


def shard(plan: LogicalPlan, rank: int, elements: int) -> slice:
    """The elements that a rank selects from."""
    rows = rows_of(plan, rank)
    (row,) = rows[rows[:, ir.OPCODE] == ir.SELECT].tolist()
    ends = row[ir.BEGIN], row[ir.BEGIN] + row[ir.COUNT]
    return slice(*(unit_begin(unit, plan.units, elements) for unit in ends))


def selections(plan: LogicalPlan, tree: Tree, data: Floats, height: int) -> Floats:
    """What the parties select, added up: without a look at any row but those of SELECT."""
    total = np.zeros(data.shape[1])
    for party in parties(tree, height):
        summed = data[list(party.ranks)].sum(axis=0)
        for rank in party.ranks:
            part = shard(plan, rank, data.shape[1])
            total[part] += largest(summed[part], k_of(DENSITY, part.start, part.stop))
    return total


@pytest.mark.parametrize("name", NAMES)
def test_every_sparse_schedule_is_proven_on_random_trees(name: str) -> None:
    schedule = registry.sparse(name)
    for tree in [*TREES, random_tree(1003, most_leaves=64)]:
        assert registry.supports(schedule, tree) is None
        for plan in (*schedule.variants(tree), schedule.dense(tree)):
            verify(plan)
        assert schedule.variants(tree)[0] == schedule.build(tree)


@pytest.mark.parametrize("name", NAMES)
def test_no_contribution_is_lost_and_all_ranks_end_alike(name: str) -> None:
    schedule = registry.sparse(name)
    for number, tree in enumerate(TREES):
        for plan in (*topk_plans(name, tree), schedule.dense(tree)):
            for elements in (0, 1, tree.size + 1, 53):
                data = data_of(tree.size, elements)
                ranks = run(plan, data, seed=number)
                assert np.array_equal(ranks.data, np.broadcast_to(ranks.data[0], data.shape))
                assert np.array_equal(ranks.data[0] + ranks.residuals.sum(axis=0), data.sum(axis=0))


def assert_sum_of_selections(plan: LogicalPlan, tree: Tree, height: int) -> None:
    for elements in (1, 10, 97):
        data = data_of(tree.size, elements)
        assert np.array_equal(run(plan, data).data[0], selections(plan, tree, data, height))


@pytest.mark.parametrize(("name", "height"), [("hitopk", 1), ("naive_allgather", 0)])
def test_the_result_is_the_sum_of_the_selections(name: str, height: int) -> None:
    for tree in (tree for tree in TREES if len(parties(tree, height)) > 1):
        for plan in topk_plans(name, tree):
            assert_sum_of_selections(plan, tree, height)


@pytest.mark.parametrize("height", [0, 2, 3])
def test_hitopk_selects_below_any_level(height: int) -> None:
    for tree in (even_tree(2, 2, 3), even_tree(2, 2, 2, 2), random_tree(5, most_leaves=12), random_tree(6, 12)):
        plan = hitopk.build(tree, height=height)
        verify(plan)
        if len(parties(tree, height)) > 1:
            assert_sum_of_selections(plan, tree, height)


def test_gtopk_keeps_the_k_largest_and_the_rest_stays_with_who_dropped_it() -> None:
    tree, data = from_hosts("aabb"), np.zeros((4, 10))
    data[0, [0, 1]], data[1, [1, 2]], data[2, [2, 3]], data[3, [3, 4]] = [9, 5], [4, 3], [8, 2], [5, 1]
    ranks = run(registry.sparse("gtopk").build(tree), data, density=0.2)
    # 0 merges 1: 9 at 0, 9 at 1, and drops 3 at 2; 2 merges 3: 8 at 2, 7 at 3, and drops 1 at 4; then 9 and 9 win.
    assert ranks.data[0].tolist() == [9, 9, 0, 0, 0, 0, 0, 0, 0, 0]
    assert ranks.residuals[0].tolist() == [0, 0, 11, 7, 0, 0, 0, 0, 0, 0]
    assert ranks.residuals[2].tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("name", NAMES)
def test_both_plans_keep_the_residual_of_the_same_ranges(name: str) -> None:
    schedule = registry.sparse(name)
    for tree in [*TREES, from_hosts([f"{rank % 11}" for rank in range(40)])]:
        dense = schedule.dense(tree)
        for plan in schedule.variants(tree):
            for rank in range(tree.size):
                assert shards_of(plan, rank) == shards_of(dense, rank)
                assert len(shards_of(plan, rank)) <= 1


@pytest.mark.parametrize("sizes", [(13, 11, 7, 9, 16), (13, 11, 7, 9, 16, 17)])
def test_shards_are_the_same_where_shares_must_be_rounded(sizes: tuple[int, ...]) -> None:
    """On 17 hosts the shares of ranks need too many units; of six sizes those of hosts alone do."""
    tree = from_hosts([f"h{host}" for host in range(17) for _ in range(sizes[host % len(sizes)])])
    plan, dense = hitopk.build(tree), hitopk.dense(tree)
    assert denominator(tree.root) > MOST_UNITS >= dense.units >= plan.units
    assert all(shards_of(plan, rank) == shards_of(dense, rank) for rank in range(0, tree.size, 13))


@pytest.mark.parametrize("elements", [1, 10, 97, 1000])
def test_the_shards_of_a_host_select_k_elements_in_all(elements: int) -> None:
    for tree in (tree for tree in TREES if len(tree.hosts()) > 1):
        plan = hitopk.build(tree)
        for host in tree.hosts():
            parts = [shard(plan, rank, elements) for rank in host]
            assert sum(part.stop - part.start for part in parts) == elements
            assert sum(k_of(DENSITY, part.start, part.stop) for part in parts) == k_of(DENSITY, 0, elements)


@pytest.mark.parametrize("hosts", ["aabb", "aabbb", "aaaabbbccc", "abbcccc"])
def test_each_host_sends_what_the_formula_says(hosts: str) -> None:
    """(m - 1) K entries leave each host, whatever the number of its ranks; counted on the rows of all ranks."""
    tree, elements = from_hosts(hosts), 1009
    host = {rank: number for number, ranks in enumerate(tree.hosts()) for rank in ranks}
    for plan in topk_plans("hitopk", tree):
        sent = [0] * len(tree.hosts())
        for (sender, receiver), count in run(plan, data_of(tree.size, elements)).entries.items():
            if host[sender] != host[receiver]:
                sent[host[sender]] += count
        assert sent == [inter_host_nbytes(len(sent), elements, DENSITY, 1)] * len(sent)


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_exchange_one_message_a_round_whatever_a_third_host_cuts(name: str) -> None:
    for tree in TREES:
        for plan in topk_plans(name, tree):
            for rank in range(tree.size):
                rows = rows_of(plan, rank)
                sent = rows[np.isin(rows[:, ir.OPCODE], (ir.SEND_SPARSE, ir.RECV_SPARSE))]
                keys = sent[:, [ir.ROUND, ir.OPCODE, ir.PEER]]
                assert len(np.unique(keys, axis=0)) == len(keys)


def test_on_one_host_hitopk_drops_nothing() -> None:
    assert hitopk.build(one_host(4)) == hitopk.dense(one_host(4))
