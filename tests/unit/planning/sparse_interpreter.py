"""Runs the rows of sparse plans of all ranks on NumPy arrays, each rank as far as it can go, in an order drawn from a
seed; selection is by absolute value, of equals the first."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from hvd_ext.planning import ir
from hvd_ext.planning.ir import BEGIN, COUNT, OPCODE, PEER, ROUND, Rows, unit_begin

Floats = NDArray[np.float64]


def k_of(density: float, begin: int, end: int) -> int:
    return int(np.floor(density * end + 0.5) - np.floor(density * begin + 0.5))


def largest(x: Floats, k: int) -> Floats:
    """x with all but its k largest elements set to 0."""
    kept = np.zeros_like(x)
    chosen = np.argsort(-np.abs(x), kind="stable")[:k]
    kept[chosen] = x[chosen]
    return kept


class Ranks:
    """All ranks of a plan: their buffers, residuals and vectors, which are kept as whole arrays with zeros."""

    def __init__(self, rows: Sequence[Rows], units: int, data: Floats, density: float) -> None:
        self.rounds = [deque([list(r) for _, r in groupby(own.tolist(), lambda row: row[ROUND])]) for own in rows]
        self.units, self.data, self.density = units, data.copy(), density
        self.residuals = np.zeros_like(self.data)
        self.vectors: dict[tuple[int, int], Floats] = defaultdict(lambda: np.zeros(data.shape[1]))
        self.k = [0] * len(rows)
        self.entries: dict[tuple[int, int], int] = defaultdict(int)  # by sender and receiver
        self.mail: dict[tuple[int, int], deque[Floats]] = defaultdict(deque)

    def run(self, seed: int = 0) -> None:
        rng, handed = random.Random(seed), set()
        open_ranks = [rank for rank, rounds in enumerate(self.rounds) if rounds]
        while open_ranks:
            moved = False
            rng.shuffle(open_ranks)
            for rank in open_ranks:
                now = self.rounds[rank][0]
                if rank not in handed:
                    moved = True
                    handed.add(rank)
                    for row in now:
                        self.start(rank, row)
                incoming = [row for row in now if row[OPCODE] in (ir.RECV, ir.RECV_REDUCE, ir.RECV_SPARSE)]
                needed = defaultdict(int)
                for row in incoming:
                    needed[row[PEER]] += 1
                if all(len(self.mail[peer, rank]) >= count for peer, count in needed.items()):
                    for row in incoming:
                        self.take(rank, row)
                    self.rounds[rank].popleft()
                    handed.discard(rank)
                    moved = True
            open_ranks = [rank for rank in open_ranks if self.rounds[rank]]
            assert moved or not open_ranks, f"ranks {sorted(open_ranks)} wait for ever"
        assert not any(self.mail.values()), "messages are left over"

    def part(self, row: Sequence[int]) -> slice:
        elements = self.data.shape[1]
        return slice(*(unit_begin(unit, self.units, elements) for unit in (row[BEGIN], row[BEGIN] + row[COUNT])))

    def start(self, rank: int, row: Sequence[int]) -> None:
        part, opcode, peer, x = self.part(row), row[OPCODE], row[PEER], self.data[rank]
        if opcode == ir.SEND:
            self.mail[rank, peer].append(x[part].copy())
        elif opcode == ir.SEND_SPARSE:
            self.mail[rank, peer].append(self.vectors[rank, rank][part].copy())
            self.entries[rank, peer] += np.count_nonzero(self.vectors[rank, rank][part])
        elif opcode == ir.SELECT:
            whole = x[part] + self.residuals[rank, part]
            self.k[rank] = k_of(self.density, part.start, part.stop)
            self.vectors[rank, rank] = np.zeros_like(x)
            self.vectors[rank, rank][part] = largest(whole, self.k[rank])
            self.residuals[rank, part] = whole - self.vectors[rank, rank][part]
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

    def take(self, rank: int, row: Sequence[int]) -> None:
        message, part = self.mail[row[PEER], rank].popleft(), self.part(row)
        assert len(message) == part.stop - part.start
        if row[OPCODE] == ir.RECV_SPARSE:
            self.vectors[rank, row[PEER]][part] = message
        elif row[OPCODE] == ir.RECV_REDUCE:
            self.data[rank, part] += message
        else:
            self.data[rank, part] = message
