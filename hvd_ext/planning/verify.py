"""The symbolic verifier: it runs the rows of all ranks on multisets of contributors instead of numbers.

A test on buffers of ones does not notice swapped contributors, and a single run may miss a deadlock. The verifier finds
both, and for every size and dtype at once, because plans are in units. It treats sends as synchronous: a send ends when
the receiver has posted its receive. A plan that runs without the transport's buffers also runs with them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from hvd_ext.errors import PlanError
from hvd_ext.planning.ir import (
    BEGIN,
    COUNT,
    LOCAL_OPCODES,
    OPCODE,
    OPCODE_NAMES,
    PEER,
    RECV,
    RECV_SPARSE,
    ROUND,
    SEND,
    SEND_SPARSE,
    SENDS,
    Rows,
)
from hvd_ext.planning.lower import rows_of
from hvd_ext.planning.model import Collective, LogicalPlan
from hvd_ext.planning.verify_sparse import Message, Vectors, check_local_row, check_order

_Counts = NDArray[np.int16]


def verify(plan: LogicalPlan) -> None:
    """Proves that a plan computes its collective on all ranks.

    Args:
        plan: a plan of any collective. The time grows with size^2 * rows, so this is for tests and for jobs of up to
            about 64 ranks.

    Raises:
        PlanError: the plan is wrong; the message names the rank, the unit and the round.
    """
    rows = [rows_of(plan, rank) for rank in range(plan.size)]
    verify_rows(rows, plan.units, plan.collective, plan.root, name=plan.algorithm)


def verify_rows(rows: Sequence[Rows], units: int, collective: Collective, root: int = 0, *, name: str = "plan") -> None:
    """Proves that the rows of all ranks compute a collective.

    Args:
        rows: the rows of each rank, int64 [n, 5].
        collective: what the rows should compute. An all_gather and a reduce_scatter have one unit per rank; an
            all_to_all has one unit per pair of ranks: unit s * P + r goes from rank s to rank r.

    Raises:
        PlanError: a row is malformed; units overlap within a round; a send has no receive of the same units; ranks
            wait for each other for ever; a contribution is missing or counted twice, or a rank sends data that it does
            not have.
    """
    size = len(rows)
    if collective in ("all_gather", "reduce_scatter") and units != size:
        raise PlanError(f"{name}: {collective} has one unit per rank, got {units} units for {size} ranks")
    if collective == "all_to_all" and units != size * size:
        raise PlanError(f"{name}: all_to_all has one unit per pair of ranks, got {units} units for {size} ranks")
    for rank, table in enumerate(rows):
        _check_rows(table, rank, size, units, name)
    cuts = _cuts(rows, units, size, collective)
    state = _initial(size, cuts, collective, root)
    vectors = Vectors(state, cuts, name)
    _run(rows, vectors, name)
    _compare(state, cuts, collective, root, name)
    if collective == "allreduce":
        vectors.finish()


def _check_rows(rows: Rows, rank: int, size: int, units: int, name: str) -> None:
    last = 0
    received: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    sent: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, row in enumerate(rows.tolist()):
        begin, end = row[BEGIN], row[BEGIN] + row[COUNT]
        where = f"{name}, rank {rank}, row {number} (round {row[ROUND]}, units [{begin}, {end}))"
        if row[OPCODE] not in OPCODE_NAMES:
            raise PlanError(f"{where}: opcode {row[OPCODE]} is not one of {OPCODE_NAMES}")
        local = row[OPCODE] in LOCAL_OPCODES
        if not 0 <= row[PEER] < size or (row[PEER] == rank and not local):
            raise PlanError(f"{where}: peer {row[PEER]} is not another rank in [0, {size})")
        if begin < 0 or row[COUNT] < 1 or end > units:
            raise PlanError(f"{where}: a row must move at least one unit of [0, {units})")
        if row[ROUND] < last:
            raise PlanError(f"{where}: rounds must not decrease, the row before has round {last}")
        last = row[ROUND]
        if local:
            check_local_row(row, rank, where)
        elif row[OPCODE] == SEND:
            sent[last].append((begin, end))
        elif row[OPCODE] not in (SEND_SPARSE, RECV_SPARSE):
            received[last].append((begin, end, row[OPCODE]))
    check_order(rows, rank, name)
    for number, spans in received.items():
        _check_overlaps(spans, sent[number], f"{name}, rank {rank}, round {number}")


def _check_overlaps(received: list[tuple[int, int, int]], sent: list[tuple[int, int]], where: str) -> None:
    """Checks that a unit that is overwritten in a round is neither received twice nor sent in it.

    A unit that is reduced into may be sent in the same round: its value from before the round is sent, see ir.def.
    """
    ordered = sorted(received)
    reach, overwrites = 0, False
    for begin, end, opcode in ordered:
        if begin < reach and (overwrites or opcode == RECV):
            raise PlanError(f"{where}: unit {begin} is received twice, and at least once overwritten")
        overwrites = opcode == RECV or (overwrites and begin < reach)
        reach = max(reach, end)
    overwritten = [(begin, end) for begin, end, opcode in ordered if opcode == RECV]
    starts = np.array([begin for begin, _ in overwritten])
    ends = np.array([end for _, end in overwritten])
    for begin, end in sent:
        before = int(np.searchsorted(starts, end))
        if before and ends[before - 1] > begin:
            raise PlanError(f"{where}: unit {max(begin, int(starts[before - 1]))} is both sent and overwritten")


def _cuts(rows: Sequence[Rows], units: int, size: int, collective: Collective) -> NDArray[np.int64]:
    """The units where some row begins or ends. All units between two cuts are treated alike, so they form one piece."""
    edges = [np.array([0, units], dtype=np.int64)]
    edges += [np.concatenate((table[:, BEGIN], table[:, BEGIN] + table[:, COUNT])) for table in rows]
    if collective in ("all_gather", "reduce_scatter"):
        edges.append(np.arange(size, dtype=np.int64))
    if collective == "all_to_all":
        edges.append(np.arange(units, dtype=np.int64))
    return np.unique(np.concatenate(edges))


def _initial(size: int, cuts: NDArray[np.int64], collective: Collective, root: int) -> _Counts:
    """Counts the contributors in state[rank, piece, contributor]; the last contributor stands for unfilled memory."""
    pieces = len(cuts) - 1
    state = np.zeros((size, pieces, size + 1), dtype=np.int16)
    for rank in range(size):
        filled = np.ones(pieces, dtype=bool)
        if collective == "all_gather":
            filled = cuts[:-1] == rank
        elif collective == "all_to_all":
            filled = cuts[:-1] // size == rank
        elif collective == "broadcast":
            filled[:] = rank == root
        state[rank, filled, rank] = 1
        state[rank, ~filled, size] = 1
    return state


def _compare(state: _Counts, cuts: NDArray[np.int64], collective: Collective, root: int, name: str) -> None:
    size = len(state)
    for rank in range(size):
        for piece in range(len(cuts) - 1):
            unit = int(cuts[piece])
            expected = np.zeros(size + 1, dtype=np.int16)
            if collective == "all_gather":
                expected[unit] = 1
            elif collective == "all_to_all":
                if unit % size != rank:
                    continue
                expected[unit // size] = 1
            elif collective == "broadcast":
                expected[root] = 1
            elif collective == "allreduce" or rank == (root if collective == "reduce" else unit):
                expected[:size] = 1
            else:
                continue
            if not np.array_equal(state[rank, piece], expected):
                faults = _faults(state[rank, piece], expected)
                raise PlanError(f"{name}: after the last round rank {rank} holds in unit {unit} {faults}")


def _faults(counted: _Counts, expected: _Counts) -> str:
    texts = []
    for other, (count, want) in enumerate(zip(counted.tolist(), expected.tolist(), strict=True)):
        if count != want:
            part = "unfilled memory" if other == len(counted) - 1 else f"rank {other}'s part"
            texts.append(f"{part} {count} times instead of {want}")
    return ", ".join(texts)


@dataclass(slots=True)
class _Progress:
    """How far one rank is: its current round, and the number of messages started to and from each peer."""

    rounds: list[list[list[int]]]
    at: int = -1
    started: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    waits: list[tuple[list[int], int]] = field(default_factory=list)


def _run(rows: Sequence[Rows], vectors: Vectors, name: str) -> None:
    """Runs all ranks to their ends; a rank starts a round when its previous round is complete."""
    rounds = [[list(group) for _, group in groupby(table.tolist(), lambda row: row[ROUND])] for table in rows]
    ranks = [_Progress(of_rank) for of_rank in rounds]
    # The messages from a sender to a receiver, in order: each with its row and its contents.
    sent: dict[tuple[int, int], list[tuple[list[int], Message]]] = defaultdict(list)

    def start(rank: int) -> None:
        me = ranks[rank]
        me.at += 1
        me.waits = []
        for row in me.rounds[me.at] if me.at < len(me.rounds) else ():
            if row[OPCODE] in LOCAL_OPCODES:
                vectors.local(rank, row)
                continue
            sends = row[OPCODE] in SENDS
            key = (row[PEER], 1 if sends else 0)
            me.waits.append((row, me.started[key]))
            me.started[key] += 1
            if sends:
                sent[rank, row[PEER]].append((row, vectors.outgoing(rank, row)))

    def partner_started(rank: int, row: list[int], number: int) -> bool:
        return ranks[row[PEER]].started[rank, 0 if row[OPCODE] in SENDS else 1] > number

    def complete(rank: int) -> bool:
        return all(partner_started(rank, row, number) for row, number in ranks[rank].waits)

    def apply(rank: int) -> None:
        for row, number in ranks[rank].waits:
            if row[OPCODE] in SENDS:
                continue
            message, contents = sent[row[PEER], rank][number]
            if (message[OPCODE] == SEND_SPARSE) != (row[OPCODE] == RECV_SPARSE):
                raise PlanError(
                    f"{name}: rank {rank} has in round {row[ROUND]} a {OPCODE_NAMES[row[OPCODE]]} from rank "
                    f"{row[PEER]}, but that rank's message {number} to it is a {OPCODE_NAMES[message[OPCODE]]}"
                )
            if (message[BEGIN], message[COUNT]) != (row[BEGIN], row[COUNT]):
                raise PlanError(
                    f"{name}: rank {rank} receives in round {row[ROUND]} from rank {row[PEER]} units [{row[BEGIN]}, "
                    f"{row[BEGIN] + row[COUNT]}), but that rank's message {number} to it, of round {message[ROUND]}, "
                    f"holds units [{message[BEGIN]}, {message[BEGIN] + message[COUNT]})"
                )
            vectors.incoming(rank, row, contents)

    for rank in range(len(ranks)):
        start(rank)
    ready = deque(range(len(ranks)))
    while ready:
        rank = ready.popleft()
        me = ranks[rank]
        while me.at < len(me.rounds) and complete(rank):
            apply(rank)
            start(rank)
            ready.extend({row[PEER] for row, _ in me.waits} - {rank})
    for rank, me in enumerate(ranks):
        for row, number in me.waits:
            if not partner_started(rank, row, number):
                raise PlanError(
                    f"{name}: rank {rank} waits for ever in round {row[ROUND]}: its {OPCODE_NAMES[row[OPCODE]]} of "
                    f"units [{row[BEGIN]}, {row[BEGIN] + row[COUNT]}) has no partner on rank {row[PEER]}"
                )
