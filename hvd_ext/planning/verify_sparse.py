"""The symbolic verifier's part for sparse plans, which runs vectors as if every element were selected.

Because a selection drops nothing here, the verifier can prove that a sparse plan adds up every contribution once; the
tests of the kernels show that dropped elements stay in the residual. The verifier also proves that no vector is read
before it is received, that every contribution goes through error feedback once, and that all ranks add up in the same
order and therefore get equal bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hvd_ext.errors import PlanError
from hvd_ext.planning.ir import (
    BEGIN,
    CLEAR,
    COUNT,
    FOLD,
    LOCAL_OPCODES,
    MERGE,
    OPCODE,
    OPCODE_NAMES,
    PACK,
    PEER,
    RECV_REDUCE,
    RECV_SPARSE,
    RESELECT,
    ROUND,
    SCATTER_ADD,
    SELECT,
    SEND_SPARSE,
    TAKE,
    Rows,
)

_Counts = NDArray[np.int16]
# The contents of a message: the contributors of each piece, and the number of the sum that was formed of them.
Message = tuple[_Counts, list[int]]
_ZERO = 0  # the sum of nothing


def check_local_row(row: Sequence[int], rank: int, where: str) -> None:
    """Checks the peer of a local row, whose vector the row uses.

    Raises:
        PlanError: a MERGE or TAKE names its own rank, or another row that is not a SCATTER_ADD names another rank.
    """
    names_itself, name = row[PEER] == rank, OPCODE_NAMES[row[OPCODE]]
    if row[OPCODE] in (MERGE, TAKE) and names_itself:
        raise PlanError(f"{where}: {name} must name another rank's vector, not its own")
    if row[OPCODE] not in (MERGE, TAKE, SCATTER_ADD) and not names_itself:
        raise PlanError(f"{where}: {name} is local, so its peer must be its own rank, got {row[PEER]}")


def check_order(rows: Rows, rank: int, name: str) -> None:
    """Checks the order of rows, as the engine's decoder does.

    Raises:
        PlanError: a round has both messages and local rows, or a row uses a vector that does not exist yet.
    """
    has_own = has_feedback = False
    selected = (0, 0)
    of_sums: list[tuple[int, int]] = []  # the units of RESELECTs since the last row that made the own vector otherwise
    received: dict[int, set[tuple[int, int]]] = defaultdict(set)
    sorts: dict[int, bool] = {}
    for row in rows.tolist():
        opcode, peer, begin, count = row[OPCODE], row[PEER], row[BEGIN], row[COUNT]
        where = f"{name}, rank {rank}, round {row[ROUND]}: {OPCODE_NAMES[opcode]} of units [{begin}, {begin + count})"
        local = opcode in LOCAL_OPCODES
        if sorts.setdefault(row[ROUND], local) != local:
            raise PlanError(f"{where}: a round of a rank must have either messages or local rows")
        if opcode in (SELECT, FOLD):
            if has_feedback:
                raise PlanError(
                    f"{where}: a rank has one residual, of one range, so it may have only one SELECT or FOLD"
                )
            has_feedback = True
            selected = (begin, begin + count) if opcode == SELECT else selected
        if opcode == RESELECT:
            if not (selected[0] <= begin and begin + count <= selected[1]):
                raise PlanError(f"{where}: its residual is that of a SELECT before it, of units {selected}")
            if any(first < begin + count and begin < end for first, end in of_sums):
                raise PlanError(f"{where}: it must not overlap another RESELECT")
            of_sums.append((begin, begin + count))
        elif opcode in (SELECT, PACK, TAKE):
            of_sums = []
        reads_own = opcode in (SEND_SPARSE, MERGE) or (opcode == SCATTER_ADD and peer == rank)
        if reads_own and not has_own:
            raise PlanError(f"{where}: the rank has no vector of its own before a SELECT, PACK, TAKE or RESELECT")
        if opcode in (MERGE, TAKE) and not received[peer]:
            raise PlanError(f"{where}: no vector of rank {peer} has been received")
        if opcode == SCATTER_ADD and peer != rank and (begin, count) not in received[peer]:
            raise PlanError(f"{where}: no RECV_SPARSE from rank {peer} of these units comes before it")
        has_own |= opcode in (SELECT, PACK, TAKE, RESELECT)
        if opcode == RECV_SPARSE:
            received[peer].add((begin, count))


class Vectors:
    """The sparse vectors of all ranks while a plan is run, and the order in which units were added up."""

    def __init__(self, state: _Counts, cuts: NDArray[np.int64], name: str) -> None:
        """Start with the contributions of all ranks.

        Args:
            state: the counts of contributors of the units, [rank, piece, contributor]; the rows change it.
            cuts: the units between which the pieces lie.
        """
        self._state, self._cuts, self._name = state, cuts, name
        size, pieces = state.shape[:2]
        self._sums = [[1 + rank] * pieces for rank in range(size)]
        self._known: dict[tuple[int, int], int] = {}
        self._next = 1 + size
        # By rank and rank of origin: the contributors and the sum of each piece of the vector.
        self._vectors: dict[tuple[int, int], dict[int, tuple[_Counts, int]]] = defaultdict(dict)
        self._fed = np.zeros(state.shape[1:], dtype=np.int16)
        self._feeds = False
        self._has_sums = [False] * size  # whether RESELECT has made a rank's own vector

    def outgoing(self, rank: int, row: Sequence[int]) -> Message:
        """Returns the contents of the message of a SEND or a SEND_SPARSE, which are taken when its round starts."""
        if row[OPCODE] != SEND_SPARSE:
            first, last = self._span(row)
            return self._state[rank, first:last].copy(), self._sums[rank][first:last]
        pieces = self._read(rank, rank, row)
        return np.stack([counts for counts, _ in pieces]), [sums for _, sums in pieces]

    def incoming(self, rank: int, row: Sequence[int], message: Message) -> None:
        """Applies a RECV, RECV_REDUCE or RECV_SPARSE when its round ends."""
        first, last = self._span(row)
        counts, sums = message
        if row[OPCODE] == RECV_SPARSE:
            pieces = zip(range(first, last), counts, sums, strict=True)
            self._vectors[rank, row[PEER]].update({piece: (count, total) for piece, count, total in pieces})
        elif row[OPCODE] == RECV_REDUCE:
            self._state[rank, first:last] += counts
            sums_here = self._sums[rank]
            sums_here[first:last] = [
                self._sum(left, right) for left, right in zip(sums_here[first:last], sums, strict=True)
            ]
        else:
            self._state[rank, first:last] = counts
            self._sums[rank][first:last] = sums

    def local(self, rank: int, row: Sequence[int]) -> None:
        """Runs a local row."""
        first, last = self._span(row)
        opcode, units, sums = row[OPCODE], self._state[rank, first:last], self._sums[rank]
        if opcode in (SELECT, FOLD):
            self._feeds = True
            self._fed[first:last] += units
        if opcode in (SELECT, PACK, RESELECT):
            copied = [count.copy() for count in units]
            made = dict(zip(range(first, last), zip(copied, sums[first:last], strict=True), strict=True))
            joins = opcode == RESELECT and self._has_sums[rank]
            self._vectors[rank, rank] = (self._vectors[rank, rank] | made) if joins else made
            self._has_sums[rank] = opcode == RESELECT
            if opcode != PACK:  # a selection leaves the units undefined
                units[:] = 0
                units[:, -1] = 1
        elif opcode == CLEAR:
            units[:] = 0
            sums[first:last] = [_ZERO] * (last - first)
        elif opcode == SCATTER_ADD:
            for piece, (counts, total) in zip(range(first, last), self._read(rank, row[PEER], row), strict=True):
                self._state[rank, piece] += counts
                sums[piece] = self._sum(sums[piece], total)
        elif opcode == MERGE:
            mine, theirs = self._read(rank, rank, row), self._read(rank, row[PEER], row)
            self._vectors[rank, rank] = {
                first + at: (here + there, self._sum(left, right))
                for at, ((here, left), (there, right)) in enumerate(zip(mine, theirs, strict=True))
            }
        elif opcode == TAKE:
            taken = self._read(rank, row[PEER], row)
            self._has_sums[rank] = False
            self._vectors[rank, rank] = {first + at: piece for at, piece in enumerate(taken)}

    def finish(self) -> None:
        """Checks the contributions and the orders of sums when all ranks have ended.

        Raises:
            PlanError: some contribution of a plan with error feedback did not go through it exactly once, or ranks have
                added up a unit in different orders.
        """
        size = len(self._state)
        for piece in range(len(self._cuts) - 1):
            unit = int(self._cuts[piece])
            for other in range(size) if self._feeds else ():
                if self._fed[piece, other] != 1:
                    raise PlanError(
                        f"{self._name}: rank {other}'s part of unit {unit} goes through error feedback "
                        f"{self._fed[piece, other]} times instead of 1"
                    )
            for rank in range(1, size):
                if self._sums[rank][piece] != self._sums[0][piece]:
                    raise PlanError(
                        f"{self._name}: ranks 0 and {rank} add unit {unit} up in different orders: their results "
                        "would differ in bits"
                    )

    def _span(self, row: Sequence[int]) -> tuple[int, int]:
        first, last = np.searchsorted(self._cuts, (row[BEGIN], row[BEGIN] + row[COUNT]))
        return int(first), int(last)

    def _read(self, rank: int, origin: int, row: Sequence[int]) -> list[tuple[_Counts, int]]:
        vector = self._vectors[rank, origin]
        for piece in range(*self._span(row)):
            if piece not in vector:
                raise PlanError(
                    f"{self._name}, rank {rank}, round {row[ROUND]}: {OPCODE_NAMES[row[OPCODE]]} reads unit "
                    f"{int(self._cuts[piece])} of rank {origin}'s vector, which does not have it"
                )
        return [vector[piece] for piece in range(*self._span(row))]

    def _sum(self, first: int, second: int) -> int:
        """Numbers a sum by its bits: a + b and b + a have equal bits, but (a + b) + c and a + (b + c) may differ."""
        if first == _ZERO or second == _ZERO:
            return first + second
        key = (min(first, second), max(first, second))
        if key not in self._known:
            self._known[key] = self._next
            self._next += 1
        return self._known[key]
