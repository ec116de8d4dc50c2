"""The price of a bucket in a lane: hold and tail, tables, and the recursion beside the play of events."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from hvd_ext.planning import lane_prices, planner, registry
from hvd_ext.planning.cost import lane, load_of, simulate
from hvd_ext.planning.cost.lane import InLane, Parts, line, parts_of, recursion, table, times_in_lane
from hvd_ext.planning.cost.sparse import Sparsity
from hvd_ext.planning.grain import segment_nbytes
from hvd_ext.planning.model import LogicalPlan
from hvd_ext.topology.tree import NO_LINK, Link, Tree, from_hosts
from tests.unit.planning.clusters import dense_plans, even_tree, random_tree, uneven_hosts

SLOW = Link(100e-6, 8 / 100e6)


def slow(hosts: str, message_s: float = 0.0) -> Tree:
    return replace(from_hosts(list(hosts), between=SLOW), message_s=message_s)


def price(plan: LogicalPlan, tree: Tree, nbytes: int, segment: int | None = None) -> Parts:
    return parts_of(plan, tree, nbytes, segment_nbytes(plan, nbytes, tree) if segment is None else segment)


def test_hold_and_tail_come_from_two_equal_buckets() -> None:
    tree = slow("aabb", 20e-6)
    for name in ("ring", "blueconnect", "two_level"):
        plan = registry.get(name).build(tree)
        segment = segment_nbytes(plan, 1 << 18, tree)
        assert (1 << 18) // segment >= 4
        one, two = (simulate(plan, tree, count << 18, segment).seconds for count in (1, 2))
        found = price(plan, tree, 1 << 18)
        assert found.hold_s == pytest.approx(two - one)
        assert found.seconds == pytest.approx(one)


def test_a_bucket_of_one_segment_holds_the_lane_for_its_part_of_the_window() -> None:
    """With nothing but latency four segments are in flight, so that a bucket costs a quarter of its time."""
    tree = from_hosts("ab", between=Link(0.1, 1e-12))
    plan = registry.get("ring").build(tree)
    found = price(plan, tree, 1000)
    assert found.seconds == pytest.approx(0.2, rel=1e-4)
    assert found.hold_s == pytest.approx(0.05, rel=1e-4)


@pytest.mark.parametrize("seed", range(6))
def test_a_bucket_alone_takes_its_simulated_time(seed: int) -> None:
    rng = random.Random(seed)
    tree = replace(random_tree(seed, most_leaves=10), message_s=rng.choice([0.0, 5e-6]))
    for plan in dense_plans(tree):
        for nbytes in (5_000, 300_000, 20_000_000):
            found, alone = price(plan, tree, nbytes), planner.price(tree, plan.algorithm, nbytes)
            assert found.seconds == pytest.approx(alone.seconds, rel=0.12), (plan.algorithm, nbytes)
            assert found.hold_s >= alone.bottleneck_s * (1 - 1e-9) or found.hold_s == found.seconds
            assert found.tail_s >= 0


def test_large_clusters_have_the_prices_of_their_profiles() -> None:
    tree = replace(even_tree(3, 8, between=SLOW), message_s=1e-6)
    plan = registry.get("blueconnect").build(tree)
    for nbytes in (1000, 1 << 20):
        segment = segment_nbytes(plan, nbytes, tree)
        found = price(plan, tree, nbytes)
        assert found.seconds == pytest.approx(load_of(plan, tree).price_s(nbytes, segment))
        assert 0 < found.hold_s <= found.seconds
    assert price(plan, tree, 0) == Parts(0.0, 0.0)


def test_the_price_of_a_ring_does_not_jump_where_plans_are_played_no_more() -> None:
    """The handover, which is before the lane, is in neither price."""
    plain, handing = (
        [replace(from_hosts(list(range(size)), between=SLOW), handover=handover) for size in (16, 17)]
        for handover in (NO_LINK, Link(0.1, 1e-7))
    )
    plans = [registry.get("ring").build(tree) for tree in plain]
    for nbytes in (10_000, 1 << 20, 1 << 24):
        played, priced = (price(plan, tree, nbytes) for plan, tree in zip(plans, handing, strict=True))
        assert priced.seconds == pytest.approx(played.seconds, rel=0.15)
        for found, plan, tree in zip((played, priced), plans, plain, strict=True):
            without = price(plan, tree, nbytes)
            assert (found.hold_s, found.seconds) == (pytest.approx(without.hold_s), pytest.approx(without.seconds))


def test_a_table_is_straight_between_its_points_and_goes_on_beyond_them() -> None:
    found = table([(10.0, Parts(1.0, 1.0)), (20.0, Parts(2.0, 1.0)), (30.0, Parts(4.0, 0.5))])
    hold_s, tail_s = found.parts_s([0, 5, 10, 15, 25, 40])
    assert hold_s.tolist() == [0, 1, 1, 1.5, 3, 6]
    assert tail_s.tolist() == [0, 1, 1, 1, 0.75, 0]
    falling = table([(10.0, Parts(3.0, 1.0)), (20.0, Parts(2.0, 1.0)), (30.0, Parts(3.5, 1.0))])
    assert falling.parts_s([20, 30])[0].tolist() == [3.0, 3.5]
    hold_s, tail_s = line(2.0, 0.5).parts_s([0, 1, 100])
    assert (hold_s.tolist(), tail_s.tolist()) == ([0, 2.5, 52], [0, 0, 0])


@pytest.mark.parametrize("tree", [slow("aabb"), uneven_hosts(5), slow("ab")], ids=Tree.describe)
def test_prices_never_fall_with_the_size(tree: Tree) -> None:
    sizes = np.geomspace(1, 1e9, 200)
    sparsity = Sparsity(0.01)
    tables = [lane_prices.dense_table(tree, name) for name in ("ring", "two_level")]
    tables += [lane_prices.sparse_table(tree, "hitopk", sparsity, 1, selects=selects) for selects in (True, False)]
    best = lane_prices.dense_table(tree, "auto")
    for one in [*tables, best]:
        hold_s, tail_s = one.parts_s(sizes)
        assert (np.diff(hold_s) >= 0).all()
        assert (np.diff(hold_s + tail_s) >= -1e-15).all()
    for one in tables[:2]:
        points = 2.0 ** np.arange(10, 28)
        assert (sum(best.parts_s(points)) <= sum(one.parts_s(points)) * (1 + 1e-9)).all()


def test_the_candidates_of_a_bucket_begin_with_the_cheapest() -> None:
    tree = slow("aabb", 10e-6)
    for nbytes in (1, 3000, 777_777, 50_000_000):
        found = lane_prices.candidates(tree, nbytes)
        assert found[0].parts.seconds <= min(one.parts.seconds for one in found) * (1 + planner.TIE)
        choice = lane_prices.chosen(tree, found[0].name, nbytes, found)
        assert choice.algorithm == choice.plan.algorithm == found[0].name
        assert f"cheapest in its lane for {nbytes} bytes on 4 ranks on 2 hosts" in choice.why
    assert lane_prices.candidates(from_hosts(["a"]), 1000)[0].parts == Parts(0.0, 0.0)


def test_a_load_goes_before_the_first_bucket_that_is_ready_later_or_to_the_end() -> None:
    buckets, loads = [(1.0, "a"), (2.0, "b"), (4.0, "c")], [(9.0, "z"), (2.0, "x"), (0.5, "w"), (9.0, "y")]
    assert "".join(name for _, name in lane.in_turn(buckets, loads)) == "wabxczy"
    assert lane.in_turn([], loads[:1]) == loads[:1]


def test_the_recursion_is_that_of_the_docstring() -> None:
    begins, ends = recursion([1.0, 1.5, 9.0], [Parts(2.0, 0.5), Parts(3.0, 4.0), Parts(1.0, 0.0)])
    assert begins == [1.0, 3.0, 9.0]
    assert ends == [3.5, 10.0, 10.0]


@pytest.mark.parametrize("seed", range(8))
def test_the_recursion_is_near_the_play_of_events(seed: int) -> None:
    rng = random.Random(seed)
    tree = slow(rng.choice(["ab", "aabb", "aabbc", "aaabbb"]), rng.choice([0.0, 20e-6]))
    buckets, ready_s = [], 0.0
    for _ in range(rng.randint(2, 12)):
        name, nbytes = rng.choice(["ring", "two_level", "blueconnect"]), int(10 ** rng.uniform(3, 6))
        plan = planner.allreduce_plan(tree, name).plan if name != "blueconnect" else planner.allreduce_plan(tree).plan
        segment = segment_nbytes(plan, nbytes, tree)
        parts = price(plan, tree, nbytes, segment)
        ready_s += rng.random() * 0.05
        buckets.append(InLane(plan, nbytes, segment, ready_s, lambda parts=parts: parts))
    begins, ends = times_in_lane(buckets, tree)
    guessed_begins, guessed_ends = times_in_lane(buckets, tree, most_messages=0)
    assert max(guessed_ends) == pytest.approx(max(ends), rel=0.05)
    assert begins[0] == guessed_begins[0] == buckets[0].ready_s
    assert all(begin >= one.ready_s for begin, one in zip(begins, buckets, strict=True))


def test_an_empty_bucket_ends_when_it_may_begin() -> None:
    tree = slow("ab")
    plan = registry.get("ring").build(tree)
    sizes = ((0, 64, 1.0), (1000, 1000, 2.0), (0, 64, 1.5))
    buckets = [InLane(plan, *size, lambda: Parts(0.0, 0.0)) for size in sizes]
    begins, ends = times_in_lane(buckets, tree)
    assert (begins[0], ends[0], begins[1], begins[2], ends[2]) == (1.0, 1.0, 2.0, 2.0, 2.0)
    assert times_in_lane([], tree) == ((), ())
    assert times_in_lane(buckets[:1], tree) == ((1.0,), (1.0,))


def test_large_clusters_are_not_played() -> None:
    tree = even_tree(3, 8)
    plan = registry.get("ring").build(tree)
    buckets = [InLane(plan, 1000, 1000, 1.0, lambda: Parts(5.0, 1.0))]
    assert lane.messages_of(buckets, tree) == float("inf")
    assert times_in_lane(buckets, tree) == ((1.0,), (7.0,))


def test_segments_are_larger_where_messages_take_the_processor() -> None:
    fast = from_hosts(list("aaaabbbb"), between=Link(60e-6, 8 / 10e9))
    plan = registry.get("two_level").build(fast)
    for nbytes in (1 << 16, 1 << 20, 1 << 24):
        grain = segment_nbytes(plan, nbytes, fast)
        assert lane_prices.segment_of(fast, "two_level", nbytes) == grain
        busy = replace(fast, message_s=20e-6)
        assert grain <= lane_prices.segment_of(busy, "two_level", nbytes) <= 4.1 * grain
        assert lane_prices.segment_of(slow("aabb", 20e-6), "ring", nbytes) == segment_nbytes(
            registry.get("ring").build(slow("aabb")), nbytes, slow("aabb")
        )
    assert lane_prices.segment_of(busy, "two_level", 1 << 24) > grain
