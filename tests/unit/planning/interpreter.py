"""Runs the rows of all ranks on NumPy arrays, each rank as far as it can go, in an order drawn from a seed.

Selection is by absolute value, of equals the first.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_ext.planning import ir
from hvd_ext.planning.ir import BEGIN, COUNT, OPCODE, PEER, ROUND, Rows

Floats = NDArray[np.float64]
# (rank, row): a send puts a copy of its units into a queue, a receive takes the oldest message of its peer.
Events = list[tuple[int, list[int]]]
RECEIVES = (ir.RECV, ir.RECV_REDUCE, ir.RECV_SPARSE)


def unit_begin(unit: int, units: int, elements: int) -> int:
    """The first element of a unit: floor(unit * elements / units), as the engine computes it (tf_ops/plan/plan.h).

    Unit u holds the elements [unit_begin(u), unit_begin(u + 1)).

    Args:
        unit: the unit, in [0, units]; the result for `units` is `elements`.
    """
    return unit * elements // units


def events_of(rows: Sequence[Rows], seed: int = 0) -> Events:
    """One possible order of the rows of all ranks. Raises if ranks wait for each other for ever."""
    rng = random.Random(seed)
    rounds = [deque([list(group) for _, group in groupby(own.tolist(), lambda row: row[ROUND])]) for own in rows]
    mail: dict[tuple[int, int], int] = defaultdict(int)
    events: Events = []
    started: set[int] = set()
    open_ranks = [rank for rank in range(len(rows)) if rounds[rank]]
    while open_ranks:
        rng.shuffle(open_ranks)
        moved = False
        for rank in open_ranks:
            receives = [row for row in rounds[rank][0] if row[OPCODE] in RECEIVES]
            if rank not in started:
                started.add(rank)
                moved = True
                for row in rounds[rank][0]:
                    mail[rank, row[PEER]] += row[OPCODE] in ir.SENDS
                    if row[OPCODE] not in RECEIVES:
                        events.append((rank, row))
            needed = Counter(row[PEER] for row in receives)
            if all(mail[peer, rank] >= count for peer, count in needed.items()):
                for row in receives:
                    mail[row[PEER], rank] -= 1
                    events.append((rank, row))
                rounds[rank].popleft()
                started.discard(rank)
                moved = True
        open_ranks = [rank for rank in open_ranks if rounds[rank]]
        assert moved or not open_ranks, f"ranks {sorted(open_ranks)} wait for ever"
    assert not any(mail.values()), "messages are left over"
    return events


def k_of(density: float, begin: int, end: int) -> int:
    return int(np.floor(density * end + 0.5) - np.floor(density * begin + 0.5))


def largest(x: Floats, k: int) -> Floats:
    """x with all but its k largest elements set to 0."""
    kept = np.zeros_like(x)
    chosen = np.argsort(-np.abs(x), kind="stable")[:k]
    kept[chosen] = x[chosen]
    return kept


class Ranks:
    """All ranks of a plan: their buffers, residuals and vectors, which are kept as whole arrays with zeros.

    `data` is [rank, element]; `begins` are the first elements of uneven units, units + 1 of them.
    """

    def __init__(
        self,
        rows: Sequence[Rows],
        units: int,
        data: NDArray[Any],
        density: float = 1.0,
        begins: Sequence[int] | None = None,
    ) -> None:
        self.rows, self.data, self.density = rows, data.copy(), density
        self.begins = begins or [unit_begin(unit, units, data.shape[1]) for unit in range(units + 1)]
        self.residuals = np.zeros_like(self.data)
        self.vectors: dict[tuple[int, int], Floats] = defaultdict(lambda: np.zeros(data.shape[1]))
        self.k = [0] * len(rows)
        self.entries: dict[tuple[int, int], int] = defaultdict(int)  # by sender and receiver
        self.mail: dict[tuple[int, int], deque[NDArray[Any]]] = defaultdict(deque)

    def run(self, seed: int = 0) -> None:
        self.play(events_of(self.rows, seed))

    def play(self, events: Events) -> None:
        for rank, row in events:
            part = slice(self.begins[row[BEGIN]], self.begins[row[BEGIN] + row[COUNT]])
            if row[OPCODE] in RECEIVES:
                self.take(rank, row[OPCODE], row[PEER], part)
            else:
                self.start(rank, row[OPCODE], row[PEER], part)

    def start(self, rank: int, opcode: int, peer: int, part: slice) -> None:
        x = self.data[rank]
        if opcode == ir.SEND:
            self.mail[rank, peer].append(x[part].copy())
        elif opcode == ir.SEND_SPARSE:
            self.mail[rank, peer].append(self.vectors[rank, rank][part].copy())
            self.entries[rank, peer] += np.count_nonzero(self.vectors[rank, rank][part])
        elif opcode == ir.SELECT:
            total = x[part] + self.residuals[rank, part]
            self.k[rank] = k_of(self.density, part.start, part.stop)
            self.vectors[rank, rank] = np.zeros_like(x)
            self.vectors[rank, rank][part] = largest(total, self.k[rank])
            self.residuals[rank, part] = total - self.vectors[rank, rank][part]
            x[part] = np.nan  # undefined
        elif opcode == ir.FOLD:
            x[part] += self.residuals[rank, part]
            self.residuals[rank, part] = 0
        elif opcode == ir.CLEAR:
            x[part] = 0
        elif opcode == ir.SCATTER_ADD:
            x[part] += self.vectors[rank, peer][part]
        elif opcode == ir.PACK:
            self.vectors[rank, rank] = np.zeros_like(x)
            self.vectors[rank, rank][part] = x[part]
        elif opcode == ir.MERGE:
            both = self.vectors[rank, rank] + self.vectors[rank, peer]
            self.vectors[rank, rank] = largest(both, self.k[rank])
            self.residuals[rank] += both - self.vectors[rank, rank]
        elif opcode == ir.TAKE:
            self.vectors[rank, rank] = self.vectors[rank, peer].copy()

    def take(self, rank: int, opcode: int, peer: int, part: slice) -> None:
        message = self.mail[peer, rank].popleft()
        assert len(message) == part.stop - part.start
        if opcode == ir.RECV_SPARSE:
            self.vectors[rank, peer][part] = message
        elif opcode == ir.RECV_REDUCE:
            self.data[rank, part] += message
        else:
            self.data[rank, part] = message


def inputs(size: int, elements: int, dtype: str) -> NDArray[Any]:
    """data[rank, element]: small integers that depend on both and whose sums over 16 ranks are exact in float16."""
    rank, index = np.meshgrid(np.arange(size), np.arange(elements), indexing="ij")
    return ((rank * rank * 5 + rank * index * 3 + index) % 61 - 30).astype(dtype)
