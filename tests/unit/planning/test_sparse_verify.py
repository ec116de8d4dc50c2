"""The verifier finds every kind of fault that a sparse plan can have."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hvd_ext.errors import PlanError
from hvd_ext.planning import ir
from hvd_ext.planning.ir import COUNT, OPCODE, PEER, ROUND, Rows
from hvd_ext.planning.lower import rows_of
from hvd_ext.planning.model import Call, Level, LogicalPlan, Span
from hvd_ext.planning.schedules import gtopk, hitopk, naive_allgather
from hvd_ext.planning.verify import verify, verify_rows
from hvd_ext.topology.tree import from_hosts

Change = Callable[[list[Rows]], None]
TREE = from_hosts("aabbb")
PLANS = {
    "hitopk": hitopk.build(TREE),
    "sparse gather": hitopk.build(TREE, gather="sparse"),
    "dense": hitopk.dense(TREE),
    "naive": naive_allgather.build(TREE),
    "gtopk": gtopk.build(TREE),
}


def at(rows: Rows, opcode: int, number: int = 0) -> int:
    """The place of a rank's row with an opcode."""
    return int(np.flatnonzero(rows[:, OPCODE] == opcode)[number])


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


@pytest.mark.parametrize(
    ("plan", "change", "words"),
    [
        ("hitopk", without(0, ir.SCATTER_ADD), ENDS + r"part 0 times instead of 1"),
        ("hitopk", twice(0, ir.SCATTER_ADD), ENDS + r"part 2 times instead of 1"),
        ("hitopk", without(3, ir.CLEAR), ENDS + r"unfilled memory 1 times instead of 0"),
        ("hitopk", put(0, ir.SELECT, COUNT, 2), r"rank 0, round 3: SEND_SPARSE reads unit 2 of rank 0's vector"),
        ("hitopk", without(0, ir.SELECT), r"rank 0, round 3: SEND_SPARSE .*: the rank has no vector of its own before"),
        ("hitopk", twice(0, ir.SELECT), r"rank 0, round 2: SELECT .*: a rank has one residual, of one range"),
        ("hitopk", put(0, ir.SCATTER_ADD, PEER, 4, 1), r"no RECV_SPARSE from rank 4 of these units comes before it"),
        ("hitopk", put(0, ir.SCATTER_ADD, COUNT, 1, 1), r"no RECV_SPARSE from rank 2 of these units comes before it"),
        (
            "hitopk",
            put(0, ir.SEND_SPARSE, COUNT, 1),
            r"receives in round 3 from rank 0 units \[0, 2\), but that rank's",
        ),
        ("hitopk", put(0, ir.SEND_SPARSE, OPCODE, ir.SEND), r"has in round 3 a RECV_SPARSE from rank 0, but .* a SEND"),
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
def test_a_fault_is_found(plan: str, change: Change, words: str) -> None:
    right = PLANS[plan]
    rows = [rows_of(right, rank).copy() for rank in range(right.size)]
    verify_rows(rows, right.units, "allreduce")
    change(rows)
    with pytest.raises(PlanError, match=words):
        verify_rows(rows, right.units, "allreduce")


def test_pieces_may_have_orders_of_their_own() -> None:
    """Pieces may name their members in different orders: what counts is the order in each of them."""
    select = Level(tuple(Call("select", (rank,), (Span(0, 2),)) for rank in range(2)))
    for ranks in ((0, 1), (1, 0)):
        pieces = (Call("sparse_allreduce", (0, 1), (Span(0, 1),)), Call("sparse_allreduce", ranks, (Span(1, 1),)))
        verify(LogicalPlan("x", "allreduce", 2, 2, (select, Level(pieces))))


def test_contributions_that_miss_a_selection_are_found() -> None:
    """Rank 1 adds to rank 0 only after rank 0 has selected."""
    whole = (Span(0, 1),)
    late = Level((Call("reduce", (1, 0), whole, 0),))
    levels = Level((Call("select", (0,), whole),)), Level((Call("scatter", (0,), whole),)), late
    spread = Level((Call("broadcast", (0, 1), whole, 0),))
    with pytest.raises(PlanError, match="rank 1's part of unit 0 goes through error feedback 0 times instead of 1"):
        verify(LogicalPlan("x", "allreduce", 2, 1, (*levels, spread)))
