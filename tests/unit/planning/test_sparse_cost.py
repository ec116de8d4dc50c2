"""What sparse plans cost: the bytes of their rows, the closed forms, and the price of the plan as it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.closed_forms import commlib
from benchmarks.closed_forms.schedules import sparse_cost
from hvd_ext.errors import PlanError
from hvd_ext.planning import ir, registry
from hvd_ext.planning.cost import Sparsity, simulate, traffic
from hvd_ext.planning.cost.sparse import local_s_per_byte, vectors_of
from hvd_ext.planning.explain_sparse import inter_host_nbytes, steps
from hvd_ext.planning.grain import segment_nbytes
from hvd_ext.planning.lower import rows_of
from hvd_ext.planning.model import LogicalPlan
from hvd_ext.planning.schedules import gtopk, hitopk
from hvd_ext.planning.sparse_planner import sparse_price
from hvd_ext.topology.tree import Link, Tree, from_hosts, with_cores
from tests.unit.planning.clusters import even_tree, one_host, sparse_plans, topk_plans

NBYTES = 4_000_000
SLOW = Link(1e-4, 8e-8)  # 100 Mbit/s


@pytest.mark.parametrize("hosts", ["aabb", "aabbb", "aaaabbbbcccc", "aaaabbbccc"])
def test_on_a_slow_network_a_host_sends_what_the_formula_says_and_waits_for_little_else(hosts: str) -> None:
    tree, density, elements = from_hosts(hosts, between=SLOW), 0.01, 25_000_000
    sparsity = Sparsity(density, 4.0)
    nbytes = inter_host_nbytes(len(tree.hosts()), elements, density, 4.0)
    for plan in topk_plans("hitopk", tree):
        found = sparse_price(plan, tree, 4 * elements, sparsity)
        told = steps(plan, tree, 4 * elements, sparsity)
        assert sum(step.seconds for step in told) == pytest.approx(found.seconds)
        assert sum(step.sent_nbytes[0] for step in told) == pytest.approx(nbytes * len(tree.hosts()), rel=1e-6)
        between = next(step for step in told if step.name == "all-gather of the selected")
        assert between.sent_nbytes[0] == sum(step.sent_nbytes[0] for step in told)
        assert between.seconds == pytest.approx(nbytes * SLOW.beta_s_per_byte, rel=0.1)
    assert simulate(plan, tree, 4 * elements, 4 * elements, sparsity=sparsity).bottleneck_nbytes == pytest.approx(
        nbytes
    )


def test_entries_are_charged_with_values_and_indices() -> None:
    tree = from_hosts("aabb", between=SLOW)
    prices = [traffic(hitopk.build(tree), tree, Sparsity(0.01, entry))[0].total for entry in (4.0, 8.0)]
    assert prices[1] == pytest.approx(2 * prices[0])
    # Two hosts send K entries each, and a message goes over two ports.
    assert prices[1] == pytest.approx(2 * 2 * 0.01 * 8 / 4)


def test_the_last_step_is_priced_as_it_is_planned() -> None:
    """Whole shards at any density, or entries of all hosts' selections: on three hosts, 3 K of them."""
    tree = from_hosts("aaaabbbccc")
    dense, sparse = topk_plans("hitopk", tree)

    def last(plan: LogicalPlan, density: float) -> float:
        return steps(plan, tree, NBYTES, Sparsity(density, 6.0))[-1].sent_nbytes[1]

    assert last(dense, 0.01) == pytest.approx((3 + 2 + 2) * NBYTES, rel=1e-3)
    assert last(dense, 0.2) == last(dense, 0.01)
    assert last(sparse, 0.01) == pytest.approx((3 + 2 + 2) * 3 * 0.01 * NBYTES / 4 * 6, rel=1e-3)
    # Where selections would fill the shard, all of it is sent, in entries: then the dense one is cheaper.
    assert last(sparse, 0.9) == pytest.approx((3 + 2 + 2) * NBYTES / 4 * 6, rel=1e-3)
    prices = [sparse_price(plan, tree, NBYTES, Sparsity(0.9, 6.0)).seconds for plan in (dense, sparse)]
    assert prices[0] < prices[1]


def test_a_packed_vector_holds_the_selections_of_all_hosts() -> None:
    plan = hitopk.build(from_hosts("aaaabbbccc"), gather="sparse")
    for rank in range(10):
        rows = rows_of(plan, rank)
        after = np.flatnonzero(rows[:, ir.OPCODE] == ir.PACK)[0]
        held = vectors_of(rows)
        assert np.all(held[:after] == 1)
        assert held[after:] == pytest.approx(3)


@pytest.mark.parametrize("tree", [from_hosts("aabbb"), even_tree(4, 5), even_tree(9, 8)], ids=Tree.describe)
def test_prices_grow_with_the_density_the_entry_and_the_time_of_a_selection(tree: Tree) -> None:
    base = Sparsity(0.01, 4.0, 1e-10)
    dearer = [replace(base, density=0.02), replace(base, entry_nbytes=8.0), replace(base, select_s_per_element=2e-9)]
    for name in registry.sparse_names():
        plan = registry.sparse(name).build(tree)
        for sparsity in dearer:
            assert sparse_price(plan, tree, NBYTES, base).seconds < sparse_price(plan, tree, NBYTES, sparsity).seconds


def test_local_rows_take_passes_and_entries() -> None:
    rows = rows_of(gtopk.build(from_hosts("ab")), 0)
    names = [ir.OPCODE_NAMES[opcode] for opcode in rows[:, ir.OPCODE].tolist()]
    assert names == ["SELECT", "RECV_SPARSE", "MERGE", "SEND_SPARSE", "CLEAR", "SCATTER_ADD"]
    found = local_s_per_byte(rows, 1, Sparsity(0.5, 4.0, select_s_per_element=4.0, add_s_per_entry=8.0))
    assert found.tolist() == [1.0, 0.0, 1.0, 0.0, 1.0, 1.0]


def test_a_rank_alone_works_and_sends_nothing() -> None:
    tree = one_host(1)
    for name in registry.sparse_names():
        found = sparse_price(registry.sparse(name).build(tree), tree, 400, Sparsity(0.1, select_s_per_element=0.01))
        assert (found.seconds, found.bottleneck_nbytes) == (pytest.approx(1.0), 0.0)


def test_sparse_plans_are_one_segment() -> None:
    for plan in sparse_plans(from_hosts("aabbb")):
        assert segment_nbytes(plan, 100 << 20, from_hosts("aabbb")) == 100 << 20
        assert segment_nbytes(plan, 0, from_hosts("aabbb")) == 64


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0.0,), r"density \(0.0\): must be above 0 and at most 1"),
        ((1.5,), r"density \(1.5\)"),
        ((float("nan"),), r"density \(nan\)"),
        ((0.1, 0.0), r"entry_nbytes 0.0, .*an entry must have bytes"),
        ((0.1, 4.0, -1.0), r"select_s_per_element -1.0.* times must not be negative"),
        ((0.1, 4.0, 0.0, -1.0), r"add_s_per_entry -1.0"),
    ],
)
def test_nonsense_is_refused(arguments: tuple[float, ...], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Sparsity(*arguments)


def test_commlib_on_a_cluster_is_the_papers_equations_with_whole_entries() -> None:
    inside, between, d = Link(1e-6, 1e-9), Link(1e-4, 1e-8), 1_000_000
    tree = from_hosts("aaaabbbb", inside=inside, between=between)
    port = Link(1e-4, 4e-8)  # four ranks share it
    expected = (
        commlib.reduce_scatter_s(d, 4, inside),
        d / 4 * 0.3e-9,
        commlib.inter_all_gather_s(d, 4, 2, 0.01, port, 6.0),
        commlib.intra_all_gather_s(d, 4, 2, 0.01, inside, 6.0),
    )
    assert commlib.hitopk_s(tree, d, 0.01, 6.0) == pytest.approx(expected)
    assert expected[2] == pytest.approx(1e-4 + 6 * 0.01 * d * 1e-8)
    assert commlib.hitopk_s(tree, d, 0.01, 6.0, dense_gather=True)[3] == expected[0]
    # Hosts that differ: the reduce-scatter of the larger, the selection of the smaller.
    uneven = commlib.hitopk_s(from_hosts("aaaab", inside=inside, between=between), d, 0.01)
    assert uneven[:2] == pytest.approx((expected[0], d * 0.3e-9))
    assert commlib.flat_all_gather_s(d, 8, 0.01, between) == pytest.approx(3e-4 + 4 * 7 * 0.01 * d * 1e-8)
    assert commlib.naive_s(tree, d, 0.01, 6.0) == pytest.approx(d * 0.3e-9 + 3e-4 + 6 * 7 * 0.01 * d * 4e-8)
    assert commlib.naive_s(one_host(2), d, 0.01) < commlib.naive_s(from_hosts("ab", between=SLOW), d, 0.01)
    assert sparse_cost("hitopk", tree, 4 * d, 0.01) == pytest.approx(sum(commlib.hitopk_s(tree, d, 0.01)))
    assert sparse_cost("gtopk", from_hosts("ab", between=between), 4 * d, 0.01) == pytest.approx(
        d * 0.3e-9 + 2 * (1e-4 + 0.01 * d * 4 * 1e-8)
    )


def test_closed_forms_are_near_to_the_simulation_on_a_slow_network() -> None:
    tree, nbytes = from_hosts("aaaabbbb", between=SLOW), 100_000_000
    for name in ("hitopk", "naive_allgather"):
        schedule = registry.sparse(name)
        seconds = min(sparse_price(plan, tree, nbytes, Sparsity(0.01)).seconds for plan in schedule.variants(tree))
        closed_s = sparse_cost(name, tree, nbytes, 0.01)
        # Eq. 3 lets all of a rank's entries pass its host's port; those for its own host do not.
        assert closed_s == pytest.approx(seconds, rel=0.25 if name == "hitopk" else 0.85)


def test_ranks_that_share_a_core_select_one_after_the_other() -> None:
    """The passes of a rank take as many times as long as ranks share its core; messages take what they did."""
    sparsity = Sparsity(0.01, 4.0, 1e-7, 0.0)  # passes are dearer than messages
    for hosts in ("aabb", "aaaabbb", "a" * 10 + "b" * 10, "a" * 40 + "b" * 40):
        tree = from_hosts(hosts)
        plan = hitopk.build(tree)
        free = sparse_price(plan, tree, NBYTES, replace(sparsity, select_s_per_element=0.0)).seconds
        work = sparse_price(plan, tree, NBYTES, sparsity).seconds - free
        for times in (1, 2):
            cores = {host: hosts.count(host) / times for host in "ab"}
            shared = replace(tree, root=with_cores(tree.root, cores))
            assert max(shared.sharing) == times
            price = sparse_price(plan, shared, NBYTES, sparsity).seconds
            assert price - free == pytest.approx(times * work, rel=0.05)
