"""The size of segments: by the messages over the link that a plan waits for."""

from __future__ import annotations

import pytest

from hvd_ext.options import Options
from hvd_ext.planning import planner, registry
from hvd_ext.planning.cost import simulate
from hvd_ext.planning.cost.simulate import WINDOW
from hvd_ext.planning.grain import (
    FINEST,
    HOST_MESSAGE_NBYTES,
    LARGEST_SEGMENT_NBYTES,
    SMALLEST_SEGMENT_NBYTES,
    segment_nbytes,
)
from hvd_ext.topology.tree import ETHERNET, SHARED_MEMORY, Link, Node, Tree, from_hosts, leaf
from tests.unit.planning.clusters import even_tree, one_host


@pytest.mark.parametrize("nbytes", [0, 1, 4, 100, 32768, 32769, 1 << 20, (8 << 20) + 4, 1 << 33])
@pytest.mark.parametrize("size", [2, 3, 8, 64, 1000])
def test_segments_are_aligned_and_bounded(size: int, nbytes: int) -> None:
    tree = from_hosts([str(rank // 8) for rank in range(size)])
    for name in registry.names():
        if registry.supports(registry.get(name), tree) is not None:
            continue
        grain = segment_nbytes(planner.allreduce_plan(tree, name).plan, nbytes, tree)
        assert grain % 64 == 0
        assert SMALLEST_SEGMENT_NBYTES <= grain <= LARGEST_SEGMENT_NBYTES


@pytest.mark.parametrize(("mbit", "message"), [(100, 8_000), (400, 16_000), (1000, 25_298), (25_000, 60_000)])
def test_a_rings_messages_between_hosts_grow_with_the_root_of_the_rate(mbit: int, message: int) -> None:
    tree = even_tree(2, 4, between=Link(1e-4, 8e-6 / mbit))
    plan = planner.allreduce_plan(tree, "ring").plan
    assert segment_nbytes(plan, 64 << 20, tree) / 8 == pytest.approx(message, rel=0.01)


def test_a_link_without_a_price_takes_the_longest_messages_that_mpi_sends_at_once() -> None:
    tree = even_tree(2, 4, between=Link(0.0, 0.0))
    assert 59_000 < segment_nbytes(planner.allreduce_plan(tree, "ring").plan, 64 << 20, tree) / 8 <= 60_000


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
    ranks = iter(range(12))

    def node(name: str, link: Link, children: list[Node]) -> Node:
        return Node(name, link, tuple(children))

    hosts = [[node("host", SHARED_MEMORY, [leaf(next(ranks)) for _ in range(3)]) for _ in "ab"] for _ in "cd"]
    return Tree(node("cluster", rack, [node("rack", host, pair) for pair in hosts]))


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
