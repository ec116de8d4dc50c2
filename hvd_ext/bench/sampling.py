"""Time calls of several contestants in turn on all ranks, and check what they return. Runs inside the ranks."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_ext.bench.events import emit
from hvd_ext.errors import HvdExtError

# Values stay below 61 x 4,096 ranks: every partial sum is exact in float32, whatever the order of the additions.
MODULUS = 61
MOST_CALLS = 50
MEETING_SLEEP_S = 20e-6
MOST_BYTES_KEPT = 64_000_000


@dataclasses.dataclass(frozen=True)
class Task:
    """What the ranks of one job measure.

    Attributes:
        sizes: bytes of the float32 buffer, multiples of 4.
        algorithms: names of allreduce algorithms, or "auto".
        repetitions: timed samples of each contestant and size.
        warmup: calls before the first sample.
        sample_s: a sample repeats a short call until it takes about so long.
        output: file for the samples, written by rank 0.
        events: file for the progress, written by rank 0.
    """

    sizes: tuple[int, ...]
    algorithms: tuple[str, ...]
    repetitions: int
    warmup: int
    sample_s: float
    output: str
    events: str


@dataclasses.dataclass(frozen=True)
class Contestant:
    """One way to sum a buffer over the ranks.

    Attributes:
        name: the kind: "noop", "channel", "eager", "mpi", "horovod graph", "horovod eager".
        algorithm: the algorithm that was asked for; empty where there is no choice.
        chosen: the algorithm that ran; empty where that is not known.
        call: sums this rank's buffer; the result has the buffer's shape.
        sums: false for the no-op, which returns what it was given.
    """

    name: str
    call: Callable[[], Any]
    algorithm: str = ""
    chosen: str = ""
    sums: bool = True


class Ranks:
    """What the timing needs of MPI: who we are, meeting, agreeing, and the slowest of us."""

    def __init__(self) -> None:
        """Use the MPI that has been started in this process."""
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI

        self._comm, self._maximum = MPI.COMM_WORLD.Dup(), MPI.MAX
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()

    def meet(self) -> None:
        """Wait for all ranks, asleep: a rank that spun here would take the core from one that is still being timed."""
        request = self._comm.Ibarrier()
        while not request.Test():
            time.sleep(MEETING_SLEEP_S)

    def first(self, value: int) -> int:
        """Take rank 0's value."""
        return int(self._comm.bcast(value, root=0))

    def slowest(self, times: NDArray[np.float64]) -> NDArray[np.float64]:
        """The largest over the ranks, element by element."""
        largest = np.zeros_like(times)
        self._comm.Allreduce(times, largest, op=self._maximum)
        return largest

    def abort(self) -> None:
        """End the whole job."""
        self._comm.Abort(1)


def read_task(path: str) -> Task:
    """Read the task that the parent has written as JSON."""
    values = json.loads(Path(path).read_text())
    return Task(**{**values, "sizes": tuple(values["sizes"]), "algorithms": tuple(values["algorithms"])})


def values_of(rank: int, elements: int) -> NDArray[np.float32]:
    """The buffer of one rank, float32 [elements]: it depends on the rank and on the place, and sums are exact."""
    return ((np.arange(elements, dtype=np.int64) * 7 + rank * 13) % MODULUS).astype(np.float32)


def sum_of(size: int, elements: int) -> NDArray[np.float32]:
    """The right sum over all ranks, float32 [elements]."""
    total = np.zeros(elements, np.int64)
    for rank in range(size):
        total += (np.arange(elements, dtype=np.int64) * 7 + rank * 13) % MODULUS
    return total.astype(np.float32)


def check(contestant: Contestant, result: Any, right: NDArray[np.float32]) -> None:
    """Compare a result with the right one, bit by bit.

    Args:
        contestant: who computed it.
        result: what it returned.
        right: what it must be, float32 [elements].

    Raises:
        HvdExtError: names the contestant, the first wrong element and both values.
    """
    seen = np.asarray(result).reshape(-1)
    if seen.shape != right.shape:
        raise HvdExtError(f"{contestant.name} {contestant.algorithm}: shape {seen.shape}, must be {right.shape}")
    wrong = np.flatnonzero(seen != right)
    if wrong.size:
        first = int(wrong[0])
        raise HvdExtError(
            f"{contestant.name} {contestant.algorithm} of {right.nbytes} bytes: element {first} is {seen[first]}, "
            f"must be {right[first]} ({wrong.size} of {right.size} are wrong)"
        )


def sample(contestants: Sequence[Contestant], elements: int, task: Task, ranks: Ranks) -> list[dict[str, Any]]:
    """Time all contestants on one size; all ranks call it.

    In each repetition every contestant has its turn, so that a slow moment of the machine meets all of them. Before a
    turn all ranks meet in a barrier; a sample is the time of the slowest rank.

    Args:
        contestants: in the same order on all ranks.
        elements: length of the buffer.
        task: repetitions, warm-up, time of a sample.
        ranks: all ranks, used between the timed parts.

    Returns:
        One row per contestant: what it is, seconds per call of every sample, calls per sample.

    Raises:
        HvdExtError: when a result is wrong.
    """
    right = {True: sum_of(ranks.size, elements), False: values_of(ranks.rank, elements)}
    calls = [_calls_per_sample(one, elements, task, ranks) for one in contestants]
    times = np.zeros((len(contestants), task.repetitions))
    for repetition in range(task.repetitions):
        for turn in range(len(contestants)):
            index = (turn + repetition) % len(contestants)
            one = contestants[index]
            ranks.meet()
            begin = time.perf_counter()
            results = [one.call() for _ in range(calls[index])]
            times[index, repetition] = (time.perf_counter() - begin) / calls[index]
            for result in results:
                check(one, result, right[one.sums])
    slowest = ranks.slowest(times)
    return [
        {
            "what": one.name,
            "algorithm": one.algorithm,
            "chosen": one.chosen,
            "nbytes": 4 * elements,
            "calls_per_sample": calls[index],
            "samples_s": slowest[index].tolist(),
        }
        for index, one in enumerate(contestants)
    ]


def _calls_per_sample(one: Contestant, elements: int, task: Task, ranks: Ranks) -> int:
    for _ in range(task.warmup):
        one.call()
    ranks.meet()
    begin = time.perf_counter()
    one.call()
    needed = int(np.ceil(task.sample_s / (time.perf_counter() - begin)))
    allowed = max(1, min(needed, MOST_CALLS, MOST_BYTES_KEPT // (4 * elements)))
    return ranks.first(allowed)


def run(make: Callable[[int, Task], list[Contestant]], task: Task, release: Callable[[], None] = lambda: None) -> None:
    """Measure all sizes of a task and write the samples; MPI must have been started. A failure ends the whole job.

    Args:
        make: gives the contestants for a number of elements.
        task: what to measure.
        release: called after each size; gives back what `make` opened.
    """
    ranks = Ranks()
    try:
        rows: list[dict[str, Any]] = []
        for nbytes in task.sizes:
            rows += sample(make(nbytes // 4, task), nbytes // 4, task, ranks)
            release()
            if ranks.rank == 0:
                emit(task.events, "size", nbytes=nbytes)
        if ranks.rank == 0:
            Path(task.output).write_text(json.dumps(rows))
        ranks.meet()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        ranks.abort()
