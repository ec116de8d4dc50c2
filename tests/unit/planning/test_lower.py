"""The one ring and the one recursive program, for every kind of call."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from hvd_ext.errors import PlanError
from hvd_ext.planning.ir import BEGIN, COUNT, OPCODE, PEER, RECV, ROUND, SEND
from hvd_ext.planning.lower import rounds_of, rows_of
from hvd_ext.planning.model import Call, Level, LogicalPlan, Method, Span, reversed_level
from hvd_ext.planning.planner import allreduce_plan
from hvd_ext.planning.schedules.flexreduce import MOST_UNITS
from hvd_ext.planning.verify import verify
from tests.unit.planning.clusters import large_tree, one_host

METHODS: tuple[Method, ...] = ("ring", "recursive", "direct")
LOG2_CEILING = {1: 0, 2: 1, 3: 2, 4: 2, 5: 3, 8: 3, 9: 4, 13: 4, 16: 4, 17: 5}


def scattered(size: int, method: Method) -> LogicalPlan:
    """An allreduce on a group whose ring runs backwards and whose spans have different lengths, one of them none."""
    counts = [rank % 3 for rank in range(size)]
    begins = np.concatenate(([0], np.cumsum(counts))).tolist()
    spans = tuple(Span(begin, count) for begin, count in zip(begins[:-1], counts, strict=True))
    down = Level((Call("reduce_scatter", tuple(reversed(range(size))), spans, method=method),), "down")
    return LogicalPlan("test", "allreduce", size, max(begins[-1], 1), (down, reversed_level(down, "up")))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", sorted(LOG2_CEILING))
def test_scatter_and_gather_are_proven_for_any_number_of_ranks(size: int, method: Method) -> None:
    plan = scattered(size, method)
    if plan.units > 1:
        verify(plan)
    wanted = {"ring": size - 1, "recursive": LOG2_CEILING[size], "direct": min(size - 1, 1)}[method]
    assert rounds_of(plan) == 2 * wanted


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", sorted(LOG2_CEILING))
def test_reduce_and_broadcast_are_proven_for_every_root(size: int, method: Method) -> None:
    for root in range(size):
        down = Level((Call("reduce", tuple(range(size)), (Span(0, 3),), root, method),))
        verify(LogicalPlan("test", "reduce", size, 3, (down,), root=root))
        verify(LogicalPlan("test", "allreduce", size, 3, (down, reversed_level(down))))
        verify(LogicalPlan("test", "broadcast", size, 3, (reversed_level(down),), root=root))


@pytest.mark.parametrize("method", METHODS)
def test_a_root_outside_the_group_takes_over_from_the_last_rank(method: Method) -> None:
    """Rank 3's own part must not count: ranks 0 and 3 share their sums first, as in FlexReduce."""
    first = Level((Call("reduce", (0, 3), (Span(0, 2),), 0),))
    second = Level((Call("reduce", (1, 2, 0), (Span(0, 2),), 3, method),))
    plan = LogicalPlan("test", "reduce", 4, 2, (first, second), root=3)
    verify(plan)
    last = rows_of(plan, 3)[-1]
    assert (last[OPCODE], last[PEER]) == (RECV, 0)
    verify(LogicalPlan("test", "allreduce", 4, 2, (first, second, reversed_level(second), reversed_level(first))))


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather"])
def test_a_recursive_call_sends_each_byte_as_often_as_the_ring_and_neighbouring_spans_as_one_message(
    kind: Literal["reduce_scatter", "all_gather"],
) -> None:
    call = Call(kind, tuple(range(8)), tuple(Span(rank, 1) for rank in range(8)), method="recursive")
    plan = LogicalPlan("test", kind, 8, 8, (Level((call,)),))
    verify(plan)
    for rank in range(8):
        sends = (rows := rows_of(plan, rank))[rows[:, OPCODE] == SEND]
        assert sends[:, COUNT].sum() == 7
        assert len(sends) <= 2 * 3
    assert max(rows_of(plan, 0)[:, COUNT].tolist()) == 4


def test_calls_of_one_level_start_in_the_same_round() -> None:
    hosts = ((0, 1, 2), (3, 4))
    level = Level(tuple(Call("reduce", host, (Span(0, 1),), host[0]) for host in hosts))
    after = Level((Call("reduce", (0, 3), (Span(0, 1),), 0),))
    plan = LogicalPlan("test", "reduce", 5, 1, (level, after))
    verify(plan)
    assert [rows_of(plan, rank)[0, ROUND] for rank in (1, 4)] == [0, 0]
    assert rows_of(plan, 3)[:, ROUND].tolist() == [0, 2]


def test_one_rank_of_a_large_cluster_needs_no_other_ranks_rows() -> None:
    tree = large_tree(4096)
    plan = allreduce_plan(tree, "flexreduce").plan
    assert plan.units == MOST_UNITS
    rows = rows_of(plan, 1234)
    assert 0 < len(rows) < 2000
    assert rows[:, BEGIN].min() >= 0
    assert len(rows_of(allreduce_plan(tree, "ring").plan, 77)) == 4 * 4095


def test_an_unknown_rank_is_refused() -> None:
    with pytest.raises(PlanError, match=r"rank 4: the plan of ring has ranks \[0, 4\)"):
        rows_of(allreduce_plan(one_host(4), "ring").plan, 4)
