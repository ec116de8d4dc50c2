"""The verifier finds every kind of fault that a plan can have, dense or sparse."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hvd_ext.errors import PlanError
from hvd_ext.planning import ir
from hvd_ext.planning.ir import BEGIN, COUNT, OPCODE, PEER, RECV, RECV_REDUCE, ROUND, SEND, Rows
from hvd_ext.planning.lower import rows_of
from hvd_ext.planning.model import Call, Collective, Level, LogicalPlan, Span
from hvd_ext.planning.planner import all_to_all_plan, allreduce_plan
from hvd_ext.planning.schedules import gtopk, hitopk, naive_allgather
from hvd_ext.planning.verify import verify, verify_rows
from hvd_ext.topology.tree import from_hosts
from tests.unit.planning.clusters import one_host

Change = Callable[[list[Rows]], None]
SIZE = 3
TREE = from_hosts("aabbb")
PLANS = {
    "ring": allreduce_plan(one_host(SIZE), "ring").plan,
    "hitopk": hitopk.build(TREE),
    "sparse gather": hitopk.build(TREE, gather="sparse"),
    "dense": hitopk.dense(TREE),
    "naive": naive_allgather.build(TREE),
    "gtopk": gtopk.build(TREE),
}


def all_rows(plan: LogicalPlan) -> list[Rows]:
    return [rows_of(plan, rank).copy() for rank in range(plan.size)]


def table(*rows: tuple[int, int, int, int, int]) -> Rows:
    """Rows as (round, opcode, peer, begin, count)."""
    made = np.empty((len(rows), 5), dtype=np.int64)
    if rows:
        made[:, (ROUND, OPCODE, PEER, BEGIN, COUNT)] = rows
    return made


def at(rows: Rows, opcode: int, number: int = 0) -> int:
    """The place of a rank's row with an opcode."""
    return int(np.flatnonzero(rows[:, OPCODE] == opcode)[number])


def put_row(rank: int, row: int, column: int, value: int) -> Change:
    def change(rows: list[Rows]) -> None:
        rows[rank][row, column] = value

    return change


def put(rank: int, opcode: int, column: int, value: int, number: int = 0) -> Change:
    def change(rows: list[Rows]) -> None:
        rows[rank][at(rows[rank], opcode, number), column] = value

    return change


def without(rank: int, opcode: int, number: int = 0) -> Change:
    def change(rows: list[Rows]) -> None:
        rows[rank] = np.delete(rows[rank], at(rows[rank], opcode, number), axis=0)

    return change


def twice(rank: int, opcode: int, number: int = 0) -> Change:
    def change(rows: list[Rows]) -> None:
        place = at(rows[rank], opcode, number)
        rows[rank] = np.insert(rows[rank], place, rows[rank][place], axis=0)

    return change


def swapped(rank: int, opcode: int, one: int, two: int) -> Change:
    """Two rows of an opcode change places."""

    def change(rows: list[Rows]) -> None:
        places = [at(rows[rank], opcode, number) for number in (one, two)]
        rows[rank][places] = rows[rank][places[::-1]]

    return change


def first_of_all(rank: int, opcode: int) -> Change:
    """A row comes before all others of its rank."""

    def change(rows: list[Rows]) -> None:
        place = at(rows[rank], opcode)
        row = rows[rank][place].copy()
        rows[rank] = np.concatenate(([row], np.delete(rows[rank], place, axis=0)))
        rows[rank][:, ROUND] += 1
        rows[rank][0, ROUND] = 0

    return change


ENDS = r"after the last round rank \d holds in unit \d .*"
ALONE = r"waits for ever in round \d: its \w+ of units \[.*\) has no partner on rank \d"


@pytest.mark.parametrize(
    ("plan", "change", "words"),
    [
        (
            "ring",
            put_row(1, 0, OPCODE, 99),
            r"plan, rank 1, row 0 \(round 0, units \[.*\)\): opcode 99 is not one of",
        ),
        ("ring", put_row(1, 0, PEER, 1), r"rank 1, row 0 .*: peer 1 is not another rank in \[0, 3\)"),
        ("ring", put_row(1, 0, PEER, 3), r"peer 3 is not another rank"),
        ("ring", put_row(2, 0, BEGIN, 3), r"rank 2, row 0 .*: a row must move at least one unit of \[0, 3\)"),
        ("ring", put_row(2, 0, COUNT, 0), r"a row must move at least one unit"),
        ("ring", put_row(0, 0, ROUND, 2), r"rank 0, row 1 .*: rounds must not decrease, the row before has round 2"),
        ("ring", put_row(0, 0, OPCODE, RECV), ENDS + r"rank \d's part 0 times instead of 1"),
        ("ring", put_row(0, 4, OPCODE, RECV_REDUCE), ENDS + r"part 2 times instead of 1"),
        ("ring", put_row(0, 0, PEER, 1), r"rank \d " + ALONE),
        ("hitopk", without(0, ir.SCATTER_ADD), ENDS + r"part 0 times instead of 1"),
        ("hitopk", twice(0, ir.SCATTER_ADD), ENDS + r"part 2 times instead of 1"),
        ("hitopk", without(3, ir.CLEAR), ENDS + r"unfilled memory 1 times instead of 0"),
        ("hitopk", put(0, ir.SELECT, COUNT, 2), r"rank 0, round 3: SEND_SPARSE reads unit 2 of rank 0's vector"),
        ("hitopk", without(0, ir.SELECT), r"rank 0, round 3: SEND_SPARSE .*: the rank has no vector of its own before"),
        ("hitopk", twice(0, ir.SELECT), r"rank 0, round 2: SELECT .*: a rank has one residual, of one range"),
        ("hitopk", put(0, ir.SCATTER_ADD, PEER, 4, 1), r"no RECV_SPARSE from rank 4 of these units comes before it"),
        ("hitopk", put(0, ir.SCATTER_ADD, COUNT, 1, 1), r"no RECV_SPARSE from rank 2 of these units comes before it"),
        ("hitopk", put(0, ir.SEND_SPARSE, COUNT, 1), r"in round 3 from rank 0 units \[0, 2\), but that rank's"),
        ("hitopk", put(0, ir.SEND_SPARSE, OPCODE, SEND), r"has in round 3 a RECV_SPARSE from rank 0, but .* a SEND"),
        ("hitopk", without(0, ir.RECV_SPARSE), r"no RECV_SPARSE from rank 2 of these units comes before it"),
        ("hitopk", without(2, ir.SEND_SPARSE), r"rank 0 waits for ever in round 3: its RECV_SPARSE of units \[0, 2\)"),
        ("hitopk", put(0, ir.SELECT, PEER, 1), r"SELECT is local, so its peer must be its own rank, got 1"),
        ("hitopk", put(0, ir.SELECT, ROUND, 3), r"a round of a rank must have either messages or local rows"),
        ("hitopk", put(0, ir.SELECT, PEER, 5), r"peer 5 is not another rank in \[0, 5\)"),
        ("hitopk", put(0, ir.SEND_SPARSE, PEER, 0), r"peer 0 is not another rank in \[0, 5\)"),
        ("hitopk", first_of_all(0, ir.SELECT), r"rank \d's part .* times instead of 1"),
        ("naive", swapped(2, ir.SCATTER_ADD, 0, 3), r"ranks 0 and 2 add unit 0 up in different orders: .* in bits"),
        ("naive", swapped(0, ir.SCATTER_ADD, 1, 2), r"add unit 0 up in different orders"),
        ("sparse gather", without(1, ir.PACK), ENDS + r"rank \d's part \d times instead of 1"),
        ("sparse gather", twice(1, ir.SCATTER_ADD, 3), ENDS + r"part 2 times instead of 1"),
        ("dense", without(4, ir.FOLD), r"rank \d's part of unit \d goes through error feedback 0 times instead of 1"),
        ("dense", first_of_all(4, ir.FOLD), r"rank \d's part of unit \d goes through error feedback \d times instead"),
        ("gtopk", without(0, ir.MERGE), ENDS + r"part 0 times instead of 1"),
        ("gtopk", twice(0, ir.MERGE), ENDS + r"part 2 times instead of 1"),
        ("gtopk", put(0, ir.MERGE, PEER, 0), r"MERGE must name another rank's vector, not its own"),
        ("gtopk", put(0, ir.MERGE, PEER, 3), r"MERGE .*: no vector of rank 3 has been received"),
        ("gtopk", without(4, ir.TAKE), ENDS + r"times instead of 1"),
        ("gtopk", put(4, ir.TAKE, PEER, 1), r"TAKE .*: no vector of rank 1 has been received"),
    ],
)
def test_a_changed_row_is_found(plan: str, change: Change, words: str) -> None:
    right = PLANS[plan]
    rows = all_rows(right)
    verify_rows(rows, right.units, "allreduce")
    change(rows)
    with pytest.raises(PlanError, match=words):
        verify_rows(rows, right.units, "allreduce")


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("row", range(4 * (SIZE - 1)))
def test_a_missing_row_is_found(rank: int, row: int) -> None:
    rows = all_rows(PLANS["ring"])
    rows[rank] = np.delete(rows[rank], row, axis=0)
    with pytest.raises(PlanError, match=r"waits for ever|units|times instead of"):
        verify_rows(rows, SIZE, "allreduce")


# SENDs in both first rounds: the transport might buffer them, and then the ranks would not wait for each other.
BOTH_SEND_FIRST = [table((0, SEND, 1, 0, 1), (1, RECV, 1, 1, 1)), table((0, SEND, 0, 1, 1), (1, RECV, 0, 0, 1))]


@pytest.mark.parametrize(
    ("rows", "units", "collective", "root", "words"),
    [
        (
            [table((0, RECV, 1, 0, 2), (0, SEND, 1, 1, 1)), table((0, RECV, 0, 1, 1), (0, SEND, 0, 0, 2))],
            *(2, "allreduce", 0, "rank 0, round 0: unit 1 is both sent and overwritten"),
        ),
        (
            [
                table((0, RECV_REDUCE, 1, 0, 2), (0, RECV, 2, 1, 1)),
                table((0, SEND, 0, 0, 2)),
                table((0, SEND, 0, 1, 1)),
            ],
            *(2, "reduce", 0, "rank 0, round 0: unit 1 is received twice, and at least once overwritten"),
        ),
        (  # the overlap is behind a shorter receive
            [
                table((0, RECV_REDUCE, 1, 0, 9), (0, RECV_REDUCE, 1, 1, 1), (0, RECV, 1, 5, 1)),
                table((0, SEND, 0, 0, 9), (0, SEND, 0, 1, 1), (0, SEND, 0, 5, 1)),
            ],
            *(9, "reduce", 0, "rank 0, round 0: unit 5 is received twice, and at least once overwritten"),
        ),
        (BOTH_SEND_FIRST, 2, "all_gather", 0, "rank 0 " + ALONE),
        (
            [table((0, SEND, 1, 0, 2)), table((0, RECV_REDUCE, 0, 1, 2))],
            *(3, "reduce", 1, r"rank 1 receives in round 0 from rank 0 units \[1, 3\), .* holds units \[0, 2\)"),
        ),
        (
            [table((0, SEND, 1, 0, 1)), table((0, RECV, 0, 0, 1)), table()],
            *(1, "broadcast", 0),
            "rank 2 holds in unit 0 rank 0's part 0 times instead of 1, unfilled memory 1 times",
        ),
        (all_rows(PLANS["ring"]), 4, "all_gather", 0, "has one unit per rank, got 4 units for 3 ranks"),
        (all_rows(PLANS["ring"]), 4, "reduce_scatter", 0, "has one unit per rank, got 4 units for 3 ranks"),
        (
            all_rows(all_to_all_plan(one_host(SIZE))),
            *(SIZE, "all_to_all", 0, "all_to_all has one unit per pair of ranks, got 3 units for 3 ranks"),
        ),
    ],
)
def test_rows_that_do_not_make_the_collective_are_found(
    rows: list[Rows], units: int, collective: Collective, root: int, words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        verify_rows(rows, units, collective, root)


def test_two_ranks_may_exchange_the_units_that_they_reduce_and_send_and_receive_at_once() -> None:
    rows = [table((0, RECV_REDUCE, 1, 0, 1), (0, SEND, 1, 0, 1)), table((0, RECV_REDUCE, 0, 0, 1), (0, SEND, 0, 0, 1))]
    verify_rows(rows, 1, "allreduce")
    at_once = [rows.copy() for rows in BOTH_SEND_FIRST]
    for own in at_once:
        own[:, ROUND] = 0
    verify_rows(at_once, 2, "all_gather")


def test_swapped_parts_of_an_all_to_all_are_found() -> None:
    rows = all_rows(all_to_all_plan(one_host(SIZE)))
    verify_rows(rows, SIZE * SIZE, "all_to_all")
    for own in rows:  # ranks 1 and 2 give rank 0 what is for the other
        own[(own[:, BEGIN] == 3) | (own[:, BEGIN] == 5), BEGIN] = 4
    with pytest.raises(PlanError, match="unit 3 .* times instead of"):
        verify_rows(rows, SIZE * SIZE, "all_to_all")


def test_a_reduce_scatter_is_proven_and_is_no_allreduce() -> None:
    half = [rows[: 2 * (SIZE - 1)] for rows in all_rows(PLANS["ring"])]
    verify_rows(half, SIZE, "reduce_scatter")
    with pytest.raises(PlanError, match="times instead of 1"):
        verify_rows(half, SIZE, "allreduce")


def test_pieces_may_have_orders_of_their_own() -> None:
    """Pieces may name their members in different orders: what counts is the order in each of them."""
    select = Level(tuple(Call("select", (rank,), (Span(0, 2),)) for rank in range(2)))
    for ranks in ((0, 1), (1, 0)):
        pieces = (Call("sparse_allreduce", (0, 1), (Span(0, 1),)), Call("sparse_allreduce", ranks, (Span(1, 1),)))
        verify(LogicalPlan("x", "allreduce", 2, 2, (select, Level(pieces))))


def test_contributions_that_miss_a_selection_are_found() -> None:
    """Rank 1 adds to rank 0 only after rank 0 has selected."""
    all_units = (Span(0, 1),)
    late = Level((Call("reduce", (1, 0), all_units, 0),))
    levels = Level((Call("select", (0,), all_units),)), Level((Call("scatter", (0,), all_units),)), late
    spread = Level((Call("broadcast", (0, 1), all_units, 0),))
    with pytest.raises(PlanError, match="rank 1's part of unit 0 goes through error feedback 0 times instead of 1"):
        verify(LogicalPlan("x", "allreduce", 2, 1, (*levels, spread)))
