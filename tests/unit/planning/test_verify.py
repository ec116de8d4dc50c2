"""The verifier finds every kind of fault that a plan can have."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hvd_ext.errors import PlanError
from hvd_ext.planning.ir import BEGIN, COUNT, OPCODE, PEER, RECV, RECV_REDUCE, ROUND, SEND, Rows
from hvd_ext.planning.lower import rows_of
from hvd_ext.planning.model import Collective
from hvd_ext.planning.planner import all_gather_plan, all_to_all_plan, allreduce_plan, broadcast_plan
from hvd_ext.planning.verify import verify, verify_rows
from tests.unit.planning.clusters import one_host, random_tree, uneven_hosts

SIZE = 3


def ring_rows() -> list[Rows]:
    plan = allreduce_plan(one_host(SIZE), "ring").plan
    return [rows_of(plan, rank) for rank in range(SIZE)]


def table(*rows: tuple[int, int, int, int, int]) -> Rows:
    """Rows as (round, opcode, peer, begin, count)."""
    made = np.empty((len(rows), 5), dtype=np.int64)
    for column, values in zip((ROUND, OPCODE, PEER, BEGIN, COUNT), zip(*rows, strict=True), strict=True):
        made[:, column] = values
    return made


def put(rank: int, row: int, column: int, value: int) -> Callable[[list[Rows]], None]:
    def change(rows: list[Rows]) -> None:
        rows[rank][row, column] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put(1, 0, OPCODE, 99), r"plan, rank 1, row 0 \(round 0, units \[.*\)\): opcode 99 is not one of"),
        (put(1, 0, PEER, 1), r"rank 1, row 0 .*: peer 1 is not another rank in \[0, 3\)"),
        (put(1, 0, PEER, 3), r"peer 3 is not another rank"),
        (put(2, 0, BEGIN, 3), r"rank 2, row 0 .*: a row must move at least one unit of \[0, 3\)"),
        (put(2, 0, COUNT, 0), r"a row must move at least one unit"),
        (put(0, 0, ROUND, 2), r"rank 0, row 1 .*: rounds must not decrease, the row before has round 2"),
        (put(0, 0, OPCODE, RECV), r"after the last round rank \d holds in unit \d rank \d's part 0 times instead of 1"),
        (put(0, 4, OPCODE, RECV_REDUCE), r"rank \d holds in unit \d .*part 2 times instead of 1"),
        (put(0, 0, PEER, 1), r"rank \d waits for ever in round \d: its \w+ of units \[.*\) has no partner on rank \d"),
    ],
)
def test_a_changed_row_is_found(change: Callable[[list[Rows]], None], words: str) -> None:
    rows = ring_rows()
    change(rows)
    with pytest.raises(PlanError, match=words):
        verify_rows(rows, SIZE, "allreduce")


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("row", range(4 * (SIZE - 1)))
def test_a_missing_row_is_found(rank: int, row: int) -> None:
    rows = ring_rows()
    rows[rank] = np.delete(rows[rank], row, axis=0)
    with pytest.raises(PlanError, match=r"waits for ever|units|times instead of"):
        verify_rows(rows, SIZE, "allreduce")


def test_a_unit_that_is_sent_and_received_in_one_round_is_found() -> None:
    rows = [table((0, RECV, 1, 0, 2), (0, SEND, 1, 1, 1)), table((0, RECV, 0, 1, 1), (0, SEND, 0, 0, 2))]
    with pytest.raises(PlanError, match="rank 0, round 0: unit 1 is both sent and overwritten"):
        verify_rows(rows, 2, "allreduce")


def test_two_ranks_may_exchange_the_units_that_they_reduce() -> None:
    rows = [table((0, RECV_REDUCE, 1, 0, 1), (0, SEND, 1, 0, 1)), table((0, RECV_REDUCE, 0, 0, 1), (0, SEND, 0, 0, 1))]
    verify_rows(rows, 1, "allreduce")


def test_a_unit_that_is_overwritten_and_received_in_one_round_is_found() -> None:
    rows = [
        table((0, RECV_REDUCE, 1, 0, 2), (0, RECV, 2, 1, 1)),
        table((0, SEND, 0, 0, 2)),
        table((0, SEND, 0, 1, 1)),
    ]
    with pytest.raises(PlanError, match="rank 0, round 0: unit 1 is received twice, and at least once overwritten"):
        verify_rows(rows, 2, "reduce")


def test_an_overlap_is_found_behind_a_shorter_receive() -> None:
    received = table((0, RECV_REDUCE, 1, 0, 9), (0, RECV_REDUCE, 1, 1, 1), (0, RECV, 1, 5, 1))
    rows = [received, table((0, SEND, 0, 0, 9), (0, SEND, 0, 1, 1), (0, SEND, 0, 5, 1))]
    with pytest.raises(PlanError, match="rank 0, round 0: unit 5 is received twice, and at least once overwritten"):
        verify_rows(rows, 9, "reduce")


def test_ranks_that_wait_for_each_other_are_found_even_if_the_transport_would_buffer() -> None:
    first_sends = table((0, SEND, 1, 0, 1), (1, RECV, 1, 1, 1))
    both_send_first = [first_sends, table((0, SEND, 0, 1, 1), (1, RECV, 0, 0, 1))]
    with pytest.raises(
        PlanError, match=r"rank 0 waits for ever in round 0: its SEND of units .* has no partner on rank 1"
    ):
        verify_rows(both_send_first, 2, "all_gather")
    at_once = [table((0, SEND, 1, 0, 1), (0, RECV, 1, 1, 1)), table((0, SEND, 0, 1, 1), (0, RECV, 0, 0, 1))]
    verify_rows(at_once, 2, "all_gather")


def test_messages_of_different_units_are_found() -> None:
    rows = [table((0, SEND, 1, 0, 2)), table((0, RECV_REDUCE, 0, 1, 2))]
    with pytest.raises(
        PlanError, match=r"rank 1 receives in round 0 from rank 0 units \[1, 3\), .* holds units \[0, 2\)"
    ):
        verify_rows(rows, 3, "reduce", root=1)


def test_memory_that_nobody_filled_is_found() -> None:
    rows = [table((0, SEND, 1, 0, 1)), table((0, RECV, 0, 0, 1)), np.empty((0, 5), dtype=np.int64)]
    with pytest.raises(
        PlanError, match="rank 2 holds in unit 0 rank 0's part 0 times instead of 1, unfilled memory 1 times"
    ):
        verify_rows(rows, 1, "broadcast", root=0)


def test_swapped_parts_of_an_all_to_all_are_found() -> None:
    plan = all_to_all_plan(one_host(SIZE))
    rows = [rows_of(plan, rank) for rank in range(SIZE)]
    verify_rows(rows, SIZE * SIZE, "all_to_all")
    for own in rows:  # ranks 1 and 2 give rank 0 what is for the other
        own[(own[:, BEGIN] == 3) | (own[:, BEGIN] == 5), BEGIN] = 4
    with pytest.raises(PlanError, match="unit 3 .* times instead of"):
        verify_rows(rows, SIZE * SIZE, "all_to_all")
    with pytest.raises(PlanError, match="all_to_all has one unit per pair of ranks, got 3 units for 3 ranks"):
        verify_rows(rows, SIZE, "all_to_all")


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_a_unit_for_each_rank_is_asked_for(collective: Collective) -> None:
    with pytest.raises(PlanError, match="has one unit per rank, got 4 units for 3 ranks"):
        verify_rows(ring_rows(), 4, collective)


def test_a_reduce_scatter_is_proven_and_is_no_allreduce() -> None:
    half = [rows[: 2 * (SIZE - 1)] for rows in ring_rows()]
    verify_rows(half, SIZE, "reduce_scatter")
    with pytest.raises(PlanError, match="times instead of 1"):
        verify_rows(half, SIZE, "allreduce")


def test_all_gathers_and_broadcasts_are_proven_on_any_tree() -> None:
    trees = [uneven_hosts(size) for size in range(1, 17)] + [random_tree(seed, most_leaves=24) for seed in range(10)]
    for tree in trees:
        verify(all_gather_plan(tree))
        for root in {0, tree.size // 2, tree.size - 1}:
            verify(broadcast_plan(tree, root))
