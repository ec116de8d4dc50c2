"""What a rank does in a benchmark: it takes turns, times calls of several contestants, and checks what they return.

The parent (`jobs.py`) writes turns into a file that rank 0 follows, and rank 0 writes its answers into another file.
Both hold one JSON object a line.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hvd_ext.errors import HvdExtError

MOST_CALLS = 50
MOST_BYTES_KEPT = 64_000_000
WARMUP_CALLS = 5
# A call that takes less is made once before each sample, because the caches may be cold, and has several warm-up calls.
SHORT_S = 0.2
FIRST_IS_LONG_S = 1.0
# A sample repeats a short call until it takes about this time.
SAMPLE_S = 0.005
FIRST_SLEEP_S, LONGEST_SLEEP_S = 20e-6, 1e-3
TURNS, EVENTS = "turns", "events"
# The kind of an event that is no answer, but shows that the job still works.
ALIVE = "alive"
# Values stay below 61 x 4,096 ranks: every partial sum is exact in float32, whatever the order of the additions.
PERIOD = 61


def emit(path: Path | str | None, kind: str, **values: Any) -> None:
    """Append an event to a file, as one line of JSON; without a path nothing happens."""
    if path is not None:
        line = json.dumps({"kind": kind, **values}) + "\n"
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(line)


class Follower:
    """Reads the events of a file that is still being written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        """Give the events since the last call; a line that is not finished yet is left for the next call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [json.loads(line) for line in complete.splitlines()]


def _pattern(rank: int) -> NDArray[np.int64]:
    return (np.arange(PERIOD) * 7 + rank * 13) % PERIOD


def _repeated(pattern: NDArray[np.int64], elements: int) -> NDArray[np.float32]:
    return np.tile(pattern.astype(np.float32), -(-elements // PERIOD))[:elements]


def values_of(rank: int, elements: int) -> NDArray[np.float32]:
    """Give the buffer of one rank, float32 [elements]; its values depend on the rank and on the place."""
    return _repeated(_pattern(rank), elements)


def sum_of(size: int, elements: int) -> NDArray[np.float32]:
    """Give the right sum over all ranks, float32 [elements]."""
    return _repeated(np.sum([_pattern(rank) for rank in range(size)], axis=0), elements)


def fault_of(result: Any, elements: int, right: Callable[[int], NDArray[np.float32]]) -> str:
    """Compare a result with the right one, bit by bit.

    Args:
        right: gives the first elements of the right result, which repeats itself every `PERIOD` elements.

    Returns:
        The first wrong element with both values, in words; empty if all is right.
    """
    seen = np.asarray(result).reshape(-1)
    if seen.shape != (elements,):
        return f"shape {seen.shape}, must be ({elements},)"
    # compared in blocks, because a second buffer of the whole size might not fit into memory
    block = right(min(elements, PERIOD << 14))
    for begin in range(0, elements, max(len(block), 1)):
        part = seen[begin : begin + len(block)]
        wrong = np.flatnonzero(part != block[: len(part)])
        if wrong.size:
            first = int(wrong[0])
            return f"element {begin + first} is {part[first]}, must be {block[first]}"
    return ""


AnyTask = TypeVar("AnyTask", bound="Argument")


@dataclasses.dataclass(frozen=True)
class Argument:
    """A task that is one argument of a command: ranks on other hosts may not see the files of this one."""

    @classmethod
    def read(cls: type[AnyTask], text: str) -> AnyTask:
        """Read a task that `write` has written."""
        return cls(**{name: _tuples(value) for name, value in json.loads(text).items()})

    def write(self) -> str:
        """Write the task as JSON."""
        return json.dumps(dataclasses.asdict(self))


def _tuples(value: Any) -> Any:
    """Make the lists of a JSON text tuples again."""
    if isinstance(value, dict):
        return {name: _tuples(inner) for name, inner in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@dataclasses.dataclass(frozen=True)
class Task(Argument):
    """What the ranks of a job receive when they start; the rest follows turn by turn.

    Attributes:
        hows: how to call, of "graph", "engine", "eager".
    """

    hows: tuple[str, ...]
    check: bool = True


@dataclasses.dataclass(frozen=True)
class Contestant:
    """One way to sum a buffer over the ranks, or what it is compared with.

    Attributes:
        algorithm: "noop", "tcp", "memory", "mpi", "horovod", "auto", or the name of a schedule.
        how: "graph", "engine" or "eager".
        call: sums this rank's buffer or moves it; the result has the buffer's shape.
        chosen: the schedule that runs; empty where it is not known.
        segment_bytes: the size of a segment in the pipeline; 0 where it is not known.
        copy_of: the rank whose buffer the result must be a copy of; None where it must be the sum over all ranks.
        reset: overwrites the last result where the next one goes to the same memory.
    """

    algorithm: str
    how: str
    call: Callable[[], Any]
    chosen: str = ""
    segment_bytes: int = 0
    copy_of: int | None = None
    reset: Callable[[], Any] = lambda: None


Make = Callable[[int, Sequence[str]], list[Contestant]]


class Ranks:
    """What the timing needs of MPI: the rank, a barrier, and messages to all."""

    def __init__(self) -> None:
        """Use the MPI that has been started in this process."""
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI

        self._comm = MPI.COMM_WORLD.Dup()
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()

    def meet(self, longest_s: float = LONGEST_SLEEP_S) -> None:
        """Wait for all ranks, asleep: a rank that spun here would take the core from one that is still being timed.

        The ranks leave within about `longest_s`, the longest sleep between two looks, of each other.
        """
        request, sleep_s = self._comm.Ibarrier(), FIRST_SLEEP_S
        while not request.Test():
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, longest_s)

    def gather(self, value: Any) -> list[Any]:
        """Give all ranks the values of all, by rank; the wait for slow ranks is asleep."""
        self.meet()
        return list(self._comm.allgather(value))

    def average(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Give all ranks the average of their arrays, which have one shape; the wait for slow ranks is asleep."""
        total = np.empty_like(values)
        self.meet()
        self._comm.Allreduce(values, total)  # the sum
        return total / np.float32(self.size)

    def broadcast(self, value: Any) -> Any:
        """Give all ranks the value of rank 0; the wait for it is asleep."""
        self.meet()
        return self._comm.bcast(value, root=0)

    def abort(self) -> None:
        """End the whole job."""
        self._comm.Abort(1)


class Sampler:
    """Times the contestants of one size; all ranks use it alike.

    A sample is the time of the slowest rank, and the processor time of all ranks until all of them have their results.
    All ranks meet before it begins.
    """

    def __init__(
        self,
        contestants: Sequence[Contestant],
        elements: int,
        ranks: Ranks,
        check: bool,
        tell: Callable[[], None] = lambda: None,
    ) -> None:
        """Warm the contestants up, in the same order on all ranks, and find how often each is called for a sample."""
        self._contestants, self._elements, self._ranks, self._check = contestants, elements, ranks, check
        self._calls = [1] * len(contestants)
        self.first_s: list[float] = []
        self._facts: list[dict[str, Any]] = []
        for index, contestant in enumerate(contestants):
            warmup = [self.sample(index, warm=False)]
            # the very first call may be slow for reasons of its own; later ones show whether calls are short
            limit_s = FIRST_IS_LONG_S
            while len(warmup) < WARMUP_CALLS and warmup[-1]["seconds"] < limit_s:
                warmup.append(self.sample(index, warm=False))
                limit_s = SHORT_S
            call_s = min(sample["seconds"] for sample in warmup)
            if call_s < SHORT_S:
                needed = math.ceil(SAMPLE_S / max(call_s, 1e-9))
                self._calls[index] = max(1, min(needed, MOST_CALLS, MOST_BYTES_KEPT // max(4 * elements, 1)))
            self.first_s.append(call_s)
            fact = {name: getattr(contestant, name) for name in ("algorithm", "how", "chosen", "segment_bytes")}
            fact |= {"calls_per_sample": self._calls[index], "sample_seconds": self._calls[index] * call_s}
            self._facts.append({**fact, "wrong": [words for sample in warmup for words in sample["wrong"]]})
            tell()

    def facts(self) -> list[dict[str, Any]]:
        """Give what the parent must know of each contestant: how long a sample will take, what was wrong so far."""
        return self._facts

    def sample(self, index: int, warm: bool = True) -> dict[str, Any]:
        """Take one sample.

        Args:
            warm: call a short one once before.

        Returns:
            The contestant's index, seconds per call of the slowest rank, processor seconds per call of all ranks and
            all their threads together, and what was wrong on which rank.
        """
        contestant, calls = self._contestants[index], self._calls[index]
        if warm and self.first_s[index] < SHORT_S:
            contestant.call()
        contestant.reset()
        # a rank that has waited for long looks seldom, so a second barrier lets all ranks begin together
        self._ranks.meet()
        self._ranks.meet(FIRST_SLEEP_S)
        processor, begin = time.process_time(), time.perf_counter()
        results = [contestant.call() for _ in range(calls)]
        seconds = (time.perf_counter() - begin) / calls
        # a rank that checked its result now would take the core from one that is still being timed
        self._ranks.meet()
        # only now, because the threads of a rank that has its result may still work for other ranks
        processor_s = (time.process_time() - processor) / calls
        faults = [self._fault(contestant, result) for result in results] if self._check else []
        fault = next(filter(None, faults), "")
        times, processor_times, faults = zip(*self._ranks.gather((seconds, processor_s, fault)), strict=True)
        wrong = [f"rank {rank}: {words}" for rank, words in enumerate(faults) if words]
        return {"index": index, "seconds": max(times), "processor_seconds": sum(processor_times), "wrong": wrong}

    def _fault(self, contestant: Contestant, result: Any) -> str:
        source = contestant.copy_of
        if source is None:
            return fault_of(result, self._elements, lambda n: sum_of(self._ranks.size, n))
        return fault_of(result, self._elements, lambda n: values_of(source, n))


Answer = Callable[[dict[str, Any]], tuple[str, dict[str, Any]]]


def topology_text() -> str:
    """Give the YAML text of the topology that the environment names; empty if it names none that can be read."""
    path = os.environ.get("HVD_EXT_TOPOLOGY", "")
    try:
        return Path(path).read_text(encoding="utf-8") if path else ""
    except OSError:
        return ""


def answer_turns(folder: str, ranks: Ranks, answer: Answer, links: str = "") -> None:
    """Answer the parent's turns until it says "end"; MPI must have been started. A failure ends the whole job.

    Args:
        folder: where rank 0 follows the turns and writes the events.
        links: the YAML text of a topology, for a job whose environment names none.
        answer: takes a turn and gives the kind and the values of the event that answers it; it is called for "end" too,
            which is not answered.
    """
    try:
        hosts = ranks.gather(platform.node())
        if ranks.rank == 0 and not Path(folder).is_dir():
            raise HvdExtError(
                f"folder ({folder}): rank 0 on {hosts[0]} does not see it; start the benchmark on that host, or set "
                "TMPDIR to a folder that all hosts share"
            )
        events = Path(folder) / EVENTS if ranks.rank == 0 else None
        emit(events, "hello", hosts=hosts, topology=topology_text() or links)
        follower = Follower(Path(folder) / TURNS)
        while (turn := ranks.broadcast(_next_turn(follower) if ranks.rank == 0 else None))["kind"] != "end":
            kind, values = answer(turn)
            emit(events, kind, **values)
        answer({"kind": "end"})
        ranks.meet()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        ranks.abort()


def _next_turn(follower: Follower) -> dict[str, Any]:
    while not (turns := follower.new()):
        time.sleep(LONGEST_SLEEP_S)
    return turns[0]


def serve(
    make: Make,
    folder: str,
    check: bool = True,
    release: Callable[[], None] = lambda: None,
    links: str = "",
    kind: type[Sampler] = Sampler,
) -> None:
    """Measure sums of buffers as the parent says; see `answer_turns`."""
    ranks = Ranks()
    samplers: list[Sampler] = []

    def alive() -> None:
        emit(Path(folder) / EVENTS if ranks.rank == 0 else None, ALIVE)

    def answer(turn: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        if turn["kind"] == "measure":
            samples = []
            for index in turn["which"]:
                samples.append(samplers[0].sample(index))
                alive()
            return "measured", {"samples": samples}
        # the buffers of the last size are given back before those of the next one are made
        samplers.clear()
        release()
        if turn["kind"] == "end":
            return "ended", {}
        elements = turn["bytes"] // 4
        samplers.append(kind(make(elements, turn["algorithms"]), elements, ranks, check, alive))
        return "opened", {"contestants": samplers[0].facts()}

    answer_turns(folder, ranks, answer, links)
