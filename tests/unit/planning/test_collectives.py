"""Reduce-scatter, all-gather and all-to-all as collectives of their own, evenly and unevenly divided."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_ext.planning.grain import segment_nbytes
from hvd_ext.planning.ir import COUNT, OPCODE, PEER, ROUND, SEND
from hvd_ext.planning.lower import rounds_of, rows_of
from hvd_ext.planning.model import Call, Level, LogicalPlan, Span
from hvd_ext.planning.planner import all_gather_plan, all_to_all_plan, prove, reduce_scatter_plan
from hvd_ext.planning.verify import verify
from hvd_ext.topology.tree import Tree
from tests.unit.planning.clusters import one_host, random_tree, uneven_hosts
from tests.unit.planning.interpreter import events_of, inputs, run

TREES = [uneven_hosts(size) for size in (1, 2, 3, 5, 8, 13)] + [random_tree(seed, 20) for seed in range(6)]


def uneven_begins(units: int) -> list[int]:
    """Units of 0 to 4 elements."""
    return [0, *np.cumsum([unit * unit % 5 for unit in range(units)]).tolist()]


@pytest.mark.parametrize("tree", TREES, ids=Tree.describe)
def test_they_are_proven_on_any_tree(tree: Tree) -> None:
    for plan in (reduce_scatter_plan(tree), all_gather_plan(tree), all_to_all_plan(tree)):
        assert prove(plan)
        assert segment_nbytes(plan, 1 << 20, tree) % 64 == 0


@pytest.mark.parametrize("size", [1, 2, 5, 8, 13])
def test_a_reduce_scatter_gives_each_rank_its_uneven_part(size: int) -> None:
    plan = reduce_scatter_plan(uneven_hosts(size))
    begins = uneven_begins(size)
    data = inputs(size, begins[-1], "int64")
    wanted = data.sum(axis=0)
    run(events_of([rows_of(plan, rank) for rank in range(size)]), data, size, begins)
    for rank in range(size):
        own = slice(begins[rank], begins[rank + 1])
        assert np.array_equal(data[rank, own], wanted[own])


@pytest.mark.parametrize("size", [1, 2, 5, 8, 13])
def test_an_all_to_all_is_a_transpose_of_uneven_parts(size: int) -> None:
    plan = all_to_all_plan(uneven_hosts(size))
    begins = uneven_begins(size * size)
    data = inputs(size, begins[-1], "int64")
    before = data.copy()
    run(events_of([rows_of(plan, rank) for rank in range(size)]), data, size * size, begins)
    for rank in range(size):
        for other in range(size):
            unit = other * size + rank
            part = slice(begins[unit], begins[unit + 1])
            assert np.array_equal(data[rank, part], before[other, part]), f"from rank {other} to rank {rank}"


def test_in_each_round_of_an_all_to_all_a_rank_sends_one_message_and_gets_one() -> None:
    plan = all_to_all_plan(one_host(7))
    assert rounds_of(plan) == 6
    for number in range(6):
        rows = [rows_of(plan, rank) for rank in range(7)]
        sent = [own[(own[:, ROUND] == number) & (own[:, OPCODE] == SEND)] for own in rows]
        assert [len(own) for own in sent] == [1] * 7
        assert sorted(int(own[0, PEER]) for own in sent) == list(range(7))


def test_an_all_to_all_sends_nothing_twice() -> None:
    plan = all_to_all_plan(one_host(9))
    assert all(len(own) == 16 and set(own[:, COUNT]) == {1} for own in (rows_of(plan, rank) for rank in range(9)))


def test_an_all_to_all_may_go_all_at_once() -> None:
    spans = tuple(Span(rank * 8, 8) for rank in range(4))
    level = Level((Call("all_to_all", (0, 1, 2, 3), spans, method="direct"),))
    wide = LogicalPlan("test", "all_gather", 4, 32, (level,))
    assert rounds_of(wide) == 1
    assert {tuple(row) for row in rows_of(wide, 1)[:, [ROUND, COUNT]].tolist()} == {(0, 2)}
    parts = tuple(Span(rank * 4, 4) for rank in range(4))
    verify(
        LogicalPlan("test", "all_to_all", 4, 16, (Level((Call("all_to_all", (0, 1, 2, 3), parts, method="direct"),)),))
    )
