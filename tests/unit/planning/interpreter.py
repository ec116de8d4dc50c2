"""Runs the rows of all ranks on NumPy arrays, each rank as far as it can go, in an order drawn from a seed."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np

from hvd_ext.planning.ir import BEGIN, COUNT, OPCODE, PEER, RECV_REDUCE, ROUND, SEND, Rows, unit_begin

# (rank, row): a send puts a copy of its units into a queue, a receive takes the oldest message of its peer.
Events = list[tuple[int, list[int]]]


def events_of(rows: Sequence[Rows], seed: int = 0) -> Events:
    """One possible order of all sends and receives. Raises if ranks wait for each other for ever."""
    rng = random.Random(seed)
    rounds: list[deque[list[list[int]]]] = []
    for own in rows:
        grouped: dict[int, list[list[int]]] = defaultdict(list)
        for row in own.tolist():
            grouped[row[ROUND]].append(row)
        rounds.append(deque(grouped[number] for number in sorted(grouped)))
    mail: dict[tuple[int, int], int] = defaultdict(int)
    events: Events = []
    sent = [False] * len(rows)
    open_ranks = [rank for rank in range(len(rows)) if rounds[rank]]
    while open_ranks:
        rng.shuffle(open_ranks)
        before = len(events)
        for rank in open_ranks:
            now = rounds[rank][0]
            if not sent[rank]:
                for row in now:
                    if row[OPCODE] == SEND:
                        mail[rank, row[PEER]] += 1
                        events.append((rank, row))
                sent[rank] = True
            receives = [row for row in now if row[OPCODE] != SEND]
            wanted: dict[int, int] = defaultdict(int)
            for row in receives:
                wanted[row[PEER]] += 1
            if all(mail[peer, rank] >= count for peer, count in wanted.items()):
                for row in receives:
                    mail[row[PEER], rank] -= 1
                    events.append((rank, row))
                rounds[rank].popleft()
                sent[rank] = False
                if not receives:
                    before -= 1
        open_ranks = [rank for rank in open_ranks if rounds[rank]]
        assert len(events) > before or not open_ranks, f"ranks {sorted(open_ranks)} wait for ever"
    assert not any(mail.values()), "messages are left over"
    return events


def run(events: Events, data: np.ndarray, units: int, begins: Sequence[int] | None = None) -> None:
    """Applies the events to data[rank, element], in place; begins: of uneven units, units + 1 elements."""
    elements = data.shape[1]
    mail: dict[tuple[int, int], deque[np.ndarray]] = defaultdict(deque)
    for rank, row in events:
        end = row[BEGIN] + row[COUNT]
        first = unit_begin(row[BEGIN], units, elements) if begins is None else begins[row[BEGIN]]
        last = unit_begin(end, units, elements) if begins is None else begins[end]
        if row[OPCODE] == SEND:
            mail[rank, row[PEER]].append(data[rank, first:last].copy())
            continue
        message = mail[row[PEER], rank].popleft()
        assert len(message) == last - first
        if row[OPCODE] == RECV_REDUCE:
            data[rank, first:last] += message
        else:
            data[rank, first:last] = message


def inputs(size: int, elements: int, dtype: str) -> np.ndarray:
    """data[rank, element]: small integers that depend on both and whose sums over 16 ranks are exact in float16."""
    rank, index = np.meshgrid(np.arange(size), np.arange(elements), indexing="ij")
    return ((rank * rank * 5 + rank * index * 3 + index) % 61 - 30).astype(dtype)
