"""Lowering: the rows of one rank from a logical plan. Only this file has ring and recursive programs.

A *reduction program* reduces a span over the ranks of a group to its *target*, a member of the group. A reduce has one
span and one target. A reduce_scatter has one span per rank, each with its own target, and so consists of as many
reductions at the same time. If the reductions are chains of neighbours that end at the target, this is the ring; if
they are binomial trees rotated so that they end at the target, it is recursive halving for any number of ranks (a
circulant pattern: Bruck et al. 1997, Traeff 2023). Broadcast and all_gather are the same programs in reverse: each send
becomes a receive, and each receive a send. An exchange and an all_to_all do not reduce to one target, and have code of
their own. The calls of sparse plans are in lower_sparse.py.

`place` is a rank's position in its group; `step` counts the rounds of one call from 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hvd_ext.errors import PlanError
from hvd_ext.planning.ir import (
    BEGIN,
    COUNT,
    LOCAL_OPCODES,
    OPCODE,
    PEER,
    RECV,
    RECV_REDUCE,
    ROUND,
    SEND,
    SEND_SPARSE,
    SENDS,
    Rows,
)
from hvd_ext.planning.lower_sparse import rounds_of_sparse_call, sparse_rows
from hvd_ext.planning.model import LOCAL, SPARSE, Call, Level, LogicalPlan, Method

_Ints = NDArray[np.int64]
# Hops are arrays with one row per hop: step, opcode, place of the peer, index of the span.
_HOP_COLUMNS = 4
_OF_SPARSE_PLANS = frozenset((*LOCAL, *SPARSE))


def rows_of(plan: LogicalPlan, rank: int) -> Rows:
    """Makes the rows of one rank, without making those of the other ranks.

    Returns:
        int64 [n, 5], with the columns of ir.def, sorted by round. Within a round receives come before sends, and both
        are sorted by their first unit, so that the messages of each pair of ranks match in order. Local rows are in the
        order in which they run, and messages of entries in the order of lower_sparse.py.

    Raises:
        PlanError: the rank is not in [0, size).
    """
    if not 0 <= rank < plan.size:
        raise PlanError(f"rank {rank}: the plan of {plan.algorithm} has ranks [0, {plan.size})")
    parts: list[Rows] = []
    first_round = 0
    for level in plan.levels:
        calls = [call for call in level.calls if rank == call.root or rank in call.ranks]
        made = [_rows_of_call(call, rank) for call in calls if call.kind not in _OF_SPARSE_PLANS]
        if sparse := [call for call in calls if call.kind in _OF_SPARSE_PLANS]:
            made.append(sparse_rows(sparse, rank))
        for rows in made:
            rows[:, ROUND] += first_round
        parts += made
        first_round += rounds_of_level(level)
    rows = np.concatenate(parts) if parts else np.empty((0, 5), dtype=np.int64)
    # The sort is stable, so that local rows and messages of entries keep their order.
    ordered = np.isin(rows[:, OPCODE], (*LOCAL_OPCODES, SEND_SPARSE))
    begins = np.where(ordered, 0, rows[:, BEGIN])
    order = np.lexsort((begins, np.isin(rows[:, OPCODE], SENDS), rows[:, ROUND]))
    return np.ascontiguousarray(rows[order])


def rounds_of(plan: LogicalPlan) -> int:
    """The number of rounds of a plan, over all ranks; a single rank may have rows in fewer rounds."""
    return sum(rounds_of_level(level) for level in plan.levels)


def rounds_of_level(level: Level) -> int:
    """The number of rounds of the longest call of a level; 0 for a level without calls."""
    return max((rounds_of_call(call) for call in level.calls), default=0)


def rounds_of_call(call: Call) -> int:
    """The number of rounds of one call of d ranks.

    A ring takes d - 1 rounds, a recursive call ceil(log2 d), and a direct call one; a root outside the group takes one
    more. An exchange takes one round. Calls of sparse plans also have rounds of local rows.
    """
    if call.kind in _OF_SPARSE_PLANS:
        return rounds_of_sparse_call(call)
    if call.kind == "exchange":
        return 1
    handed_over = call.root >= 0 and call.root not in call.ranks
    return _steps(call.method, len(call.ranks)) + handed_over


def _steps(method: Method, size: int) -> int:
    if method == "ring":
        return size - 1
    if method == "recursive":
        return (size - 1).bit_length()
    return min(size - 1, 1)


def _rows_of_call(call: Call, rank: int) -> Rows:
    """The unsorted rows of one rank in one call, with rounds counted from 0."""
    if call.kind == "exchange":
        peer, span = call.ranks[call.ranks[0] == rank], call.spans[0]
        return _table([(0, RECV_REDUCE, peer, span.begin, span.count), (0, SEND, peer, span.begin, span.count)])
    if call.kind == "all_to_all":
        return _all_to_all(call, call.ranks.index(rank))
    rows = _table([])
    if rank in call.ranks:
        size = len(call.ranks)
        targets = np.arange(size) if call.root < 0 else np.array([call.target])
        hops = _reduction(call.method, size, call.ranks.index(rank), targets)
        spans = np.array([(span.begin, span.count) for span in call.spans])[hops[:, 3]]
        rows = _table(np.column_stack((hops[:, :2], np.array(call.ranks)[hops[:, 2]], spans)))
    if call.root >= 0 and call.root not in call.ranks:
        # the last round of a reduce whose root is outside the group: ranks[-1] holds the result and gives it away
        giver, span, after = call.ranks[-1], call.spans[0], _steps(call.method, len(call.ranks))
        if rank == call.root:
            rows = _table([(after, RECV, giver, span.begin, span.count)])
        elif rank == giver:
            rows = np.concatenate((rows, _table([(after, SEND, call.root, span.begin, span.count)])))
    rows = _merged(rows)
    if call.kind in ("all_gather", "broadcast"):
        rows[:, ROUND] = rounds_of_call(call) - 1 - rows[:, ROUND]
        rows[:, OPCODE] = np.where(rows[:, OPCODE] == SEND, RECV, SEND)
    return rows


def _all_to_all(call: Call, place: int) -> Rows:
    """In step s of a ring each place sends to the one s + 1 places on; direct: all at once."""
    size, rows = len(call.ranks), []
    for other, peer in enumerate(call.ranks):
        sends, receives = call.spans[place], call.spans[other]
        if other == place:
            continue
        steps = ((other - place) % size - 1, (place - other) % size - 1) if call.method == "ring" else (0, 0)
        width = sends.count // size
        rows.append((steps[0], SEND, peer, sends.begin + other * width, width))
        width = receives.count // size
        rows.append((steps[1], RECV, peer, receives.begin + place * width, width))
    return _table(rows)


def _table(rows: Sequence[tuple[int, int, int, int, int]] | _Ints) -> Rows:
    """Rows from round, opcode, peer, begin and count of each, without those that move nothing."""
    table = np.empty((len(rows), 5), dtype=np.int64)
    if len(rows):
        table[:, [ROUND, OPCODE, PEER, BEGIN, COUNT]] = rows
    return table[table[:, COUNT] > 0]


def _reduction(method: Method, size: int, place: int, targets: _Ints) -> _Ints:
    """The hops of one place in the reductions of spans to `targets` (places): int64 [n, 4]."""
    spans = np.arange(len(targets), dtype=np.int64)
    if method == "ring":
        # The chain to a target starts one place behind it and goes around once: link k of the chain sends in step k.
        link = (place - targets - 1) % size
        return np.concatenate(
            (
                _hops(link, SEND, (place + 1) % size, spans, link < size - 1),
                _hops(link - 1, RECV_REDUCE, (place - 1) % size, spans, link > 0),
            )
        )
    distance = (place - targets) % size
    if method == "direct":
        others = np.array([p for p in range(size) if p != place], dtype=np.int64)
        reduced_here = spans[distance == 0]
        received = [_hops(0, RECV_REDUCE, others, np.full_like(others, span), True) for span in reduced_here]
        return np.concatenate([_hops(0, SEND, targets, spans, distance > 0), *received])
    steps = _steps(method, size)
    parts = [_hops(0, SEND, place, spans[:0], True)]
    for step in range(steps):
        half = 1 << (steps - 1 - step)
        parts.append(_hops(step, SEND, (place - half) % size, spans, (distance >= half) & (distance < 2 * half)))
        parts.append(
            _hops(step, RECV_REDUCE, (place + half) % size, spans, (distance < half) & (distance + half < size))
        )
    return np.concatenate(parts)


def _hops(step: _Ints | int, opcode: int, peer: _Ints | int, spans: _Ints, chosen: NDArray[np.bool_] | bool) -> _Ints:
    hops: _Ints = np.empty((len(spans), _HOP_COLUMNS), dtype=np.int64)
    for column, values in enumerate((step, opcode, peer, spans)):
        hops[:, column] = values
    return hops if chosen is True else hops[chosen]


def _merged(rows: Rows) -> Rows:
    """Joins rows of one step, opcode and peer that are neighbours in the buffer, so that they become one message."""
    if len(rows) < 2:
        return rows
    # Contributions are added in the order of rows, so this sort also fixes that order: by peer within a step.
    rows = rows[np.lexsort((rows[:, BEGIN], rows[:, PEER], rows[:, OPCODE], rows[:, ROUND]))]
    same = np.all(rows[1:, [ROUND, OPCODE, PEER]] == rows[:-1, [ROUND, OPCODE, PEER]], axis=1)
    starts = np.flatnonzero(
        np.concatenate(([True], ~(same & (rows[1:, BEGIN] == rows[:-1, BEGIN] + rows[:-1, COUNT]))))
    )
    merged = rows[starts]
    merged[:, COUNT] = np.add.reduceat(rows[:, COUNT], starts)
    return merged
