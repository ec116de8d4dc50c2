"""The simulated time of a plan: hand-computed cases, bounds, and its short cut for long buffers."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.closed_forms.blueconnect import ring_s
from hvd_ext.planning import registry
from hvd_ext.planning.cost import MESSAGE_NBYTES, allreduce_bound_s, profile, ring_bound_s, simulate
from hvd_ext.planning.grain import segment_nbytes
from hvd_ext.planning.model import Call, Level, LogicalPlan, Span
from hvd_ext.planning.planner import all_gather_plan, all_to_all_plan, broadcast_plan, reduce_scatter_plan
from hvd_ext.topology.tree import Link, Node, Tree, from_hosts, leaf
from tests.unit.planning.clusters import dense_plans, even_tree, one_host, random_tree, uneven_hosts

SLOW = Link(100e-6, 1 / 12e6)
FREE = Link(0.0, 0.0)
NBYTES = 3_000_000
PART_S = MESSAGE_NBYTES * SLOW.beta_s_per_byte


def flat(size: int, link: Link = SLOW, gamma: float = 0.0) -> Tree:
    return Tree(Node("host", link, tuple(leaf(rank) for rank in range(size))), gamma)


def given(size: int, units: int, *levels: tuple[Call, ...]) -> LogicalPlan:
    return LogicalPlan("given", "broadcast", size, units, tuple(Level(calls) for calls in levels))


def whole(plan: LogicalPlan, tree: Tree, nbytes: int = NBYTES) -> float:
    return simulate(plan, tree, nbytes, nbytes).seconds


def test_a_message_takes_its_latency_and_its_bytes_and_a_reduction_the_receivers_time() -> None:
    plan = given(2, 1, (Call("broadcast", (0, 1), (Span(0, 1),), 0),))
    for nbytes in (1, 60_000, 60_001, NBYTES):
        assert whole(plan, flat(2), nbytes) == pytest.approx(SLOW.alpha_s + nbytes * SLOW.beta_s_per_byte)
    found = simulate(plan, flat(2), NBYTES, NBYTES)
    assert (found.bottleneck_nbytes, found.bottleneck_s) == (NBYTES, pytest.approx(NBYTES * SLOW.beta_s_per_byte))
    opposing = given(2, 1, (Call("exchange", (0, 1), (Span(0, 1),)),))
    assert whole(opposing, flat(2)) == pytest.approx(found.seconds), "opposing messages do not meet"
    reduced = given(2, 1, (Call("reduce", (0, 1), (Span(0, 1),), 0),))
    assert whole(reduced, flat(2, gamma=2e-9)) == pytest.approx(found.seconds + NBYTES * 2e-9)


def test_messages_that_share_a_port_take_the_time_of_both() -> None:
    """Of two hosts each rank sends half of the buffer over its host's port."""
    tree = from_hosts("aabb", inside=FREE, between=SLOW)
    calls = Call("broadcast", (0, 2), (Span(0, 1),), 0), Call("broadcast", (1, 3), (Span(1, 1),), 1)
    assert whole(given(4, 2, calls), tree) == pytest.approx(SLOW.alpha_s + NBYTES * SLOW.beta_s_per_byte)
    assert simulate(given(4, 2, calls), tree, NBYTES, NBYTES).bottleneck_nbytes == NBYTES


def test_a_short_message_goes_between_the_parts_of_a_long_one() -> None:
    """Rank 3 waits for one part, not for the ten of its neighbour, before it sends ten parts back."""
    tree = from_hosts("aabb", inside=Link(0.0, 1e-12), between=SLOW)
    first = Call("broadcast", (0, 2), (Span(0, 10),), 0), Call("broadcast", (1, 3), (Span(10, 1),), 1)
    plan = given(4, 21, first, (Call("broadcast", (3, 1), (Span(11, 10),), 3),))
    assert whole(plan, tree, 21 * MESSAGE_NBYTES) == pytest.approx(12 * PART_S + 2 * SLOW.alpha_s, rel=1e-4)


@pytest.mark.parametrize("inside", [SLOW, Link(0.0, SLOW.beta_s_per_byte / 7)])
def test_a_part_is_passed_on_while_it_still_comes(inside: Link) -> None:
    """Three ports of the same rate on the way take hardly longer than one; the slowest and its queue decide."""
    plan = given(2, 1, (Call("broadcast", (0, 1), (Span(0, 1),), 0),))
    seconds = whole(plan, from_hosts("ab", inside=inside, between=SLOW))
    assert seconds == pytest.approx(SLOW.alpha_s + NBYTES * SLOW.beta_s_per_byte)


@pytest.mark.parametrize("segments", [1, 5, 8, 20, 48, 1000])
def test_a_chain_is_a_pipeline_of_segments(segments: int) -> None:
    plan = given(4, 1, (Call("broadcast", (0, 1, 2, 3), (Span(0, 1),), 0),))
    found = simulate(plan, flat(4), segments * MESSAGE_NBYTES, MESSAGE_NBYTES).seconds
    assert found == pytest.approx((segments + 2) * PART_S + 3 * SLOW.alpha_s)


@pytest.mark.parametrize("size", [2, 3, 8, 13])
def test_a_ring_in_one_segment_is_its_closed_form(size: int) -> None:
    gamma = 1e-9
    for tree in (flat(size, gamma=gamma), from_hosts([str(rank) for rank in range(size)], inside=FREE, between=SLOW)):
        plan = registry.get("ring").build(tree)
        expected = ring_s(NBYTES, size, SLOW, tree.gamma_s_per_byte) + ring_s(NBYTES, size, SLOW)
        assert whole(plan, tree) == pytest.approx(expected)


def test_a_window_of_one_runs_segments_one_by_one_and_a_larger_one_hides_latencies() -> None:
    tree = flat(2, Link(1e-3, 1e-8))
    plan = registry.get("ring").build(tree)
    alone = simulate(plan, tree, 100_000, 100_000).seconds
    assert alone == pytest.approx(2 * (1e-3 + 0.5e-3))
    assert simulate(plan, tree, 4_000_000, 100_000, window=1).seconds == pytest.approx(40 * alone)
    piped = simulate(plan, tree, 4_000_000, 100_000, window=8)
    assert piped.bottleneck_s < piped.seconds < 1.1 * piped.bottleneck_s


@pytest.mark.parametrize("seed", range(8))
def test_no_plan_beats_the_bound_or_its_busiest_port(seed: int) -> None:
    tree = random_tree(seed, most_leaves=12)
    for plan in dense_plans(tree):
        for nbytes in (1000, 1 << 20, 1 << 24):
            found = simulate(plan, tree, nbytes, segment_nbytes(plan, nbytes, tree))
            assert found.seconds >= found.bottleneck_s * (1 - 1e-9), plan.algorithm
            assert found.bottleneck_s >= allreduce_bound_s(tree, nbytes) * (1 - 1e-9), plan.algorithm
            if plan.algorithm == "ring":
                assert found.seconds >= ring_bound_s(tree, nbytes) * (1 - 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("tree", [even_tree(2, 2, 3), uneven_hosts(9), flat(6)], ids=Tree.describe)
def test_more_bytes_take_longer(tree: Tree) -> None:
    for plan in dense_plans(tree):
        piped = [simulate(plan, tree, count << 16, 1 << 16).seconds for count in (1, 2, 3, 8, 40, 100, 300)]
        assert piped == sorted(set(piped)), plan.algorithm
        one_segment = [whole(plan, tree, 1 << bits) for bits in range(4, 24, 2)]
        assert one_segment == sorted(set(one_segment)), plan.algorithm


@pytest.mark.slow
@pytest.mark.parametrize("tree", [even_tree(2, 2, 3), uneven_hosts(9), one_host(8)], ids=Tree.describe)
def test_the_rest_of_a_long_buffer_goes_on_at_the_pace_of_what_is_played(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = 300 << 16
    short = {plan.algorithm: simulate(plan, tree, nbytes, 1 << 16).seconds for plan in dense_plans(tree)}
    monkeypatch.setitem(simulate.__globals__, "FULL_WINDOWS", 1000)
    for plan in dense_plans(tree):
        in_full = simulate(plan, tree, nbytes, 1 << 16).seconds
        assert short[plan.algorithm] == pytest.approx(in_full, rel=0.02), plan.algorithm


@pytest.mark.parametrize("tree", [uneven_hosts(7), one_host(5), one_host(1)], ids=Tree.describe)
def test_every_collective_can_be_simulated(tree: Tree) -> None:
    others = [all_gather_plan(tree), all_to_all_plan(tree), reduce_scatter_plan(tree), broadcast_plan(tree, 0)]
    for plan in others:
        found = simulate(plan, tree, 1 << 20, 1 << 20)
        assert (found.seconds > 0) == (tree.size > 1)
        assert simulate(plan, tree, 0, 64).seconds == 0


def test_a_child_may_have_a_slower_port_of_its_own() -> None:
    half = Link(SLOW.alpha_s, 2 * SLOW.beta_s_per_byte)
    hosts = [Node(name, FREE, (leaf(rank),), port=port) for rank, (name, port) in enumerate([("a", None), ("b", half)])]
    tree = Tree(Node("cluster", SLOW, tuple(hosts)))
    plan = given(2, 1, (Call("broadcast", (0, 1), (Span(0, 1),), 0),))
    assert whole(plan, tree) == pytest.approx(SLOW.alpha_s + NBYTES * half.beta_s_per_byte)
    assert simulate(plan, tree, NBYTES, NBYTES).bottleneck_s == pytest.approx(NBYTES * half.beta_s_per_byte)
    # each of the two sends its summand, and the slower port carries it
    assert allreduce_bound_s(tree, NBYTES) == pytest.approx(NBYTES * half.beta_s_per_byte)
    assert ring_bound_s(tree, NBYTES) == pytest.approx(NBYTES * half.beta_s_per_byte)


@pytest.mark.parametrize("tree", [even_tree(2, 2), even_tree(2, 2, 3), uneven_hosts(7)], ids=Tree.describe)
def test_messages_take_the_time_of_a_processor(tree: Tree) -> None:
    busy = dataclasses.replace(tree, message_s=1e-3)
    for plan in dense_plans(tree):
        load, free = profile(plan, busy), profile(plan, tree)
        assert load.messages_s > 0 == free.messages_s
        assert load.latency_s >= free.latency_s + 2e-3
        # 100 small segments take the messages of the busiest rank, one after the other
        least_s = 100 * load.messages_s * 0.99
        assert simulate(plan, busy, 100 << 10, 1 << 10).seconds >= least_s, plan.algorithm
        assert load.price_s(100 << 10, 1 << 10) >= least_s
