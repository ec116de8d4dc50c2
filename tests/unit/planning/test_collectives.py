"""Reduce-scatter, all-gather, all-to-all and broadcast as collectives of their own, evenly and unevenly divided."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hvd_ext.planning.grain import segment_nbytes
from hvd_ext.planning.ir import COUNT, OPCODE, PEER, ROUND, SEND
from hvd_ext.planning.lower import rounds_of, rows_of
from hvd_ext.planning.model import Call, Level, LogicalPlan, Span
from hvd_ext.planning.planner import all_gather_plan, all_to_all_plan, broadcast_plan, prove, reduce_scatter_plan
from hvd_ext.planning.verify import verify
from hvd_ext.topology.tree import Tree
from tests.unit.planning.clusters import one_host, random_tree, uneven_hosts
from tests.unit.planning.interpreter import Ranks, inputs

TREES = [uneven_hosts(size) for size in range(1, 17)] + [random_tree(seed, 24) for seed in range(10)]


def uneven_begins(units: int) -> list[int]:
    """Units of 0 to 4 elements."""
    return [0, *np.cumsum([unit * unit % 5 for unit in range(units)]).tolist()]


@pytest.mark.parametrize("tree", TREES, ids=Tree.describe)
def test_they_are_proven_on_any_tree(tree: Tree) -> None:
    broadcasts = [broadcast_plan(tree, root) for root in sorted({0, tree.size // 2, tree.size - 1})]
    for plan in (reduce_scatter_plan(tree), all_gather_plan(tree), all_to_all_plan(tree), *broadcasts):
        assert prove(plan)
        assert segment_nbytes(plan, 1 << 20, tree) % 64 == 0


def played(plan: LogicalPlan) -> tuple[list[int], NDArray[Any], NDArray[Any]]:
    """The uneven units of a plan, what the ranks held, and what they hold after it."""
    begins = uneven_begins(plan.units)
    ranks = Ranks(
        [rows_of(plan, rank) for rank in range(plan.size)],
        plan.units,
        inputs(plan.size, begins[-1], "int64"),
        begins=begins,
    )
    before = ranks.data.copy()
    ranks.run()
    return begins, before, ranks.data


@pytest.mark.parametrize("size", [1, 2, 5, 8, 13])
def test_a_reduce_scatter_gives_each_rank_its_uneven_part(size: int) -> None:
    begins, before, after = played(reduce_scatter_plan(uneven_hosts(size)))
    for rank in range(size):
        part = slice(begins[rank], begins[rank + 1])
        assert np.array_equal(after[rank, part], before.sum(axis=0)[part])


@pytest.mark.parametrize("size", [1, 2, 5, 8, 13])
def test_an_all_to_all_is_a_transpose_of_uneven_parts(size: int) -> None:
    begins, before, after = played(all_to_all_plan(uneven_hosts(size)))
    for rank in range(size):
        for other in range(size):
            part = slice(begins[other * size + rank], begins[other * size + rank + 1])
            assert np.array_equal(after[rank, part], before[other, part]), f"from rank {other} to rank {rank}"


def test_in_each_round_of_an_all_to_all_a_rank_sends_one_unit_to_one_rank_and_gets_one() -> None:
    plan = all_to_all_plan(one_host(7))
    assert rounds_of(plan) == 6
    rows = [rows_of(plan, rank) for rank in range(7)]
    assert all(len(own) == 12 and set(own[:, COUNT]) == {1} for own in rows)
    for number in range(6):
        sent = [own[(own[:, ROUND] == number) & (own[:, OPCODE] == SEND)] for own in rows]
        assert [len(own) for own in sent] == [1] * 7
        assert sorted(int(own[0, PEER]) for own in sent) == list(range(7))


def test_an_all_to_all_may_go_all_at_once() -> None:
    for collective, width in (("all_gather", 8), ("all_to_all", 4)):
        spans = tuple(Span(rank * width, width) for rank in range(4))
        level = Level((Call("all_to_all", (0, 1, 2, 3), spans, method="direct"),))
        plan = LogicalPlan("test", collective, 4, 4 * width, (level,))  # type: ignore[arg-type]
        assert rounds_of(plan) == 1
        assert {tuple(row) for row in rows_of(plan, 1)[:, [ROUND, COUNT]].tolist()} == {(0, width // 4)}
    verify(plan)
