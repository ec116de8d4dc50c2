"""The size of segments: by the messages over the link that a plan waits for."""

from __future__ import annotations

import pytest

from hvd_ext.options import Options
from hvd_ext.planning import planner
from hvd_ext.planning.cost import simulate
from hvd_ext.planning.cost.simulate import WINDOW
from hvd_ext.planning.grain import (
    FINEST,
    HOST_MESSAGE_NBYTES,
    LARGEST_SEGMENT_NBYTES,
    SMALLEST_SEGMENT_NBYTES,
    segment_nbytes,
)
from hvd_ext.topology.tree import ETHERNET, SHARED_MEMORY, Link, Tree, from_hosts
from tests.unit.planning.clusters import dense_plans, even_tree, one_host


@pytest.mark.parametrize("size", [2, 3, 8, 64, 1000])
def test_segments_are_aligned_and_bounded(size: int) -> None:
    tree = from_hosts([str(rank // 8) for rank in range(size)])
    for plan in dense_plans(tree):
        for nbytes in (0, 1, 4, 100, 32768, 32769, 1 << 20, (8 << 20) + 4, 1 << 33):
            grain = segment_nbytes(plan, nbytes, tree)
            assert grain % 64 == 0
            assert SMALLEST_SEGMENT_NBYTES <= grain <= LARGEST_SEGMENT_NBYTES


@pytest.mark.parametrize(
    ("between", "message"),
    [
        *((Link(1e-4, 8e-6 / mbit), nbytes) for mbit, nbytes in ((100, 8_000), (400, 16_000), (1000, 25_298))),
        *((Link(1e-4, 8e-6 / 25_000), 60_000), (Link(0.0, 0.0), 60_000)),  # the longest that MPI sends at once
    ],
)
def test_a_rings_messages_between_hosts_grow_with_the_root_of_the_rate(between: Link, message: int) -> None:
    tree = even_tree(2, 4, between=between)
    plan = planner.allreduce_plan(tree, "ring").plan
    assert segment_nbytes(plan, 64 << 20, tree) / 8 == pytest.approx(message, rel=0.015)


def test_messages_inside_one_host_are_large() -> None:
    plan = planner.allreduce_plan(one_host(4), "ring").plan
    assert segment_nbytes(plan, 64 << 20, one_host(4)) / 4 == pytest.approx(HOST_MESSAGE_NBYTES, rel=0.05)
    assert segment_nbytes(planner.allreduce_plan(one_host(16), "ring").plan, 64 << 20, one_host(16)) == 4 << 20


def test_only_messages_between_hosts_count_where_there_are_several() -> None:
    tree = even_tree(2, 4)
    plan = planner.allreduce_plan(tree, "flexreduce").plan  # messages of n / 4 inside hosts, of n / 8 between them
    assert segment_nbytes(plan, 64 << 20, tree) == pytest.approx(8 * 60_000, rel=0.01)
    slow_inside = even_tree(2, 4, inside=Link(1e-6, 100 * ETHERNET.beta_s_per_byte))
    assert segment_nbytes(plan, 64 << 20, slow_inside) == segment_nbytes(plan, 64 << 20, tree)


def racks(rack: Link, host: Link) -> Tree:
    """Two racks of two hosts of three ranks."""
    return even_tree(2, 2, 3, links=(rack, host, SHARED_MEMORY))


def test_of_the_links_between_hosts_the_busiest_counts() -> None:
    """Between racks messages are n / 12, between hosts n / 6; messages between racks cross the links of hosts too."""
    fast, slow = Link(1e-6, 1e-10), Link(1e-6, 1e-8)
    message = 8_000 * (8 / 100e6 / 1e-8) ** 0.5
    for tree, parts in ((racks(slow, fast), 12.0), (racks(fast, slow), (6 * 12) ** 0.5)):
        plan = planner.allreduce_plan(tree, "flexreduce").plan
        assert segment_nbytes(plan, 1 << 30, tree) == pytest.approx(message * parts, rel=0.01)


def test_segments_are_smaller_where_hosts_would_keep_racks_waiting() -> None:
    tree = racks(Link(1e-4, 16e-8), Link(1e-4, 8e-8))
    plan = planner.allreduce_plan(tree, "flexreduce").plan
    coarse = segment_nbytes(plan, 1 << 30, tree)
    for nbytes, most in ((1_000_000, 1.3), (16_000_000, 1.04), (200_000_000, 1.04)):
        grain = segment_nbytes(plan, nbytes, tree)
        assert coarse * FINEST * 0.8 < grain <= coarse
        fine = simulate(plan, tree, nbytes, grain)
        assert fine.bottleneck_s < fine.seconds < most * fine.bottleneck_s
        assert fine.seconds <= simulate(plan, tree, nbytes, coarse).seconds
    ring = planner.allreduce_plan(tree, "ring").plan
    assert segment_nbytes(ring, 16_000_000, tree) == pytest.approx(12 * 8_000 * 0.5**0.5, rel=0.05)


def test_the_buffer_of_a_single_rank_is_one_segment() -> None:
    plan = planner.allreduce_plan(one_host(1)).plan
    assert segment_nbytes(plan, 100_000_000, one_host(1)) >= 100_000_000
    assert segment_nbytes(plan, 0, one_host(1)) == 64


def test_the_planner_and_the_engine_have_the_same_window_in_mind() -> None:
    assert Options().window == WINDOW
