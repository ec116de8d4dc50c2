"""The yardstick `memory`: the passes over memory that an allreduce on one host must make, and nothing else.

All ranks can read all inputs and all results, which is what shared memory can give at best. With R ranks and a buffer
of n bytes each rank

- reads its share of all R inputs, R * n / R bytes, adds them up, and writes the sum into its result, n / R bytes;
- reads the other shares from the results of the ranks that have added them up, (R - 1) / R * n bytes, and writes them
  into its own result, (R - 1) / R * n bytes.

So a rank reads (2 R - 1) / R * n bytes and writes n. NumPy adds and copies, and all ranks do so at once. Partial sums
of more than two inputs stay in the cache. No rank waits for another between the two steps, because waiting is no pass
over memory: the results hold the right sums from the start, since the inputs never change.
"""

from __future__ import annotations

import mmap
import os
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_ext.errors import HvdExtError

# Shares begin at a cache line, so that no two ranks write into the same one.
LINE_ELEMENTS = 16
# The elements of a partial sum: 256 KiB, which stay in a core's cache.
BLOCK_ELEMENTS = 1 << 16


class Passes:
    """The input and the result of every rank of a host in shared memory, and this rank's passes over them."""

    def __init__(self, comm: Any, buffer: NDArray[np.float32]) -> None:
        """Share the buffers; all ranks call this.

        Raises:
            HvdExtError: this rank may not open the memory of another one.
        """
        elements, rank = buffer.size, comm.rank
        inputs, results = _shared(comm, elements)
        inputs[rank][:] = buffer
        comm.Barrier()
        shares = shares_of(elements, comm.size)
        self.result = results[rank]
        self._kept = np.empty(min(BLOCK_ELEMENTS, elements), np.float32)
        mine = shares[rank]
        step = BLOCK_ELEMENTS if comm.size > 2 else max(elements, 1)
        blocks = [slice(at, min(at + step, mine.stop)) for at in range(mine.start, mine.stop, step)]
        self._sums = [
            ([source[block] for source in inputs], self._kept[: block.stop - block.start], self.result[block])
            for block in blocks
        ]
        self._copies = [
            (results[other][share], self.result[share])
            for other, share in enumerate(shares)
            if other != rank and share.stop > share.start
        ]
        self._add()
        comm.Barrier()

    def call(self) -> NDArray[np.float32]:
        """Make this rank's passes once, and give its result."""
        self._add()
        for source, target in self._copies:
            np.copyto(target, source)
        return self.result

    def spoil(self) -> None:
        """Overwrite what this rank copies; no other rank reads that."""
        for _, target in self._copies:
            target.fill(np.nan)

    def _add(self) -> None:
        for (first, *others), kept, target in self._sums:
            if not others:
                np.copyto(target, first)
                continue
            total = first
            for other in others[:-1]:
                total = np.add(total, other, out=kept)
            # A result never holds a partial sum, because other ranks may be reading it.
            np.add(total, others[-1], out=target)


def shares_of(elements: int, ranks: int) -> list[slice]:
    """Divide the elements of a buffer among ranks, in shares that begin at a cache line and differ by one line."""
    lines = -(-elements // LINE_ELEMENTS)
    ends = [min(lines * number // ranks * LINE_ELEMENTS, elements) for number in range(ranks + 1)]
    return [slice(begin, end) for begin, end in pairwise(ends)]


def _shared(comm: Any, elements: int) -> tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]]:
    """Give the inputs and the results of all ranks, in memory files that are gone when the last rank lets them go."""
    room = -(-4 * max(elements, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    mine = os.memfd_create("hvd_ext-bench", os.MFD_CLOEXEC)
    try:
        os.ftruncate(mine, 2 * room)
        inputs, results = [], []
        for pid, number in comm.allgather((os.getpid(), mine)):
            memory = np.frombuffer(_mapped(pid, number, 2 * room), np.float32)
            inputs.append(memory[:elements])
            results.append(memory[room // 4 : room // 4 + elements])
        comm.Barrier()
    finally:
        os.close(mine)
    return inputs, results


def _mapped(pid: int, number: int, nbytes: int) -> mmap.mmap:
    path = f"/proc/{pid}/fd/{number}"
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise HvdExtError(f"memory: the memory of process {pid} cannot be opened: {error.strerror}") from error
    try:
        return mmap.mmap(file, nbytes)
    finally:
        os.close(file)
