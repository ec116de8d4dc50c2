"""What a rank does in a benchmark: it takes turns, times calls of several contestants, and checks what they return."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvd_ext.bench.events import Follower, emit
from hvd_ext.bench.values import fault_of, sum_of, values_of
from hvd_ext.errors import HvdExtError

MOST_CALLS = 50
MOST_BYTES_KEPT = 64_000_000
WARMUP_CALLS = 5
# Below this a call is called once before each sample, because the caches may be cold, and is warmed up more than once.
SHORT_S = 0.2
FIRST_IS_LONG_S = 1.0
# A sample repeats a short call until it takes about so long.
SAMPLE_S = 0.005
FIRST_SLEEP_S, LONGEST_SLEEP_S = 20e-6, 1e-3
TURNS, EVENTS = "turns", "events"
# The kind of event that is no answer, but says that work goes on.
ALIVE = "alive"


@dataclasses.dataclass(frozen=True)
class Task:
    """What the ranks of a job are told when they start; the rest they are told turn by turn.

    Attributes:
        folder: rank 0 follows the turns and writes the events there.
        hows: how to call, of "graph", "engine", "eager".
        check: compare every result with the right one.
    """

    folder: str
    hows: tuple[str, ...]
    check: bool = True

    @classmethod
    def read(cls, text: str) -> Task:
        """Read a task that `write` has written."""
        values = json.loads(text)
        return cls(**{**values, "hows": tuple(values["hows"])})

    def write(self) -> str:
        """Write the task as one argument of a command: ranks on other hosts may not see our files."""
        return json.dumps(dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class Contestant:
    """One way to sum a buffer over the ranks.

    Attributes:
        algorithm: "noop", "mpi", "horovod", "auto", or the name of a schedule.
        how: "graph", "engine" or "eager".
        call: sums this rank's buffer; the result has the buffer's shape.
        chosen: the schedule that runs; empty where that is not known.
        segment_bytes: the grain of pipelining; 0 where that is not known.
        sums: false for the no-op, which returns what it was given.
        reset: spoils the last result where the next one comes to the same place.
    """

    algorithm: str
    how: str
    call: Callable[[], Any]
    chosen: str = ""
    segment_bytes: int = 0
    sums: bool = True
    reset: Callable[[], Any] = lambda: None


Make = Callable[[int, Sequence[str]], list[Contestant]]


class Ranks:
    """What the timing needs of MPI: who we are, meeting, and telling each other."""

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

        Args:
            longest_s: the longest sleep between two looks; the ranks leave within about that time of each other.
        """
        request, sleep_s = self._comm.Ibarrier(), FIRST_SLEEP_S
        while not request.Test():
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, longest_s)

    def gather(self, value: Any) -> list[Any]:
        """Give all ranks the values of all, by rank; the slow ones are waited for asleep."""
        self.meet()
        return list(self._comm.allgather(value))

    def told(self, value: Any) -> Any:
        """Give all ranks the value of rank 0; it is waited for asleep."""
        self.meet()
        return self._comm.bcast(value, root=0)

    def abort(self) -> None:
        """End the whole job."""
        self._comm.Abort(1)


class Sampler:
    """Times the contestants of one size; all ranks use it alike.

    A sample is the time of the slowest rank. All ranks meet before it begins.
    """

    def __init__(
        self,
        contestants: Sequence[Contestant],
        elements: int,
        ranks: Ranks,
        check: bool,
        tell: Callable[[], None] = lambda: None,
    ) -> None:
        """Warm the contestants up and find how often each is called for a sample.

        Args:
            contestants: in the same order on all ranks.
            elements: length of the buffer.
            ranks: all ranks.
            check: compare every result with the right one.
            tell: called after each contestant.
        """
        self._contestants, self._elements, self._ranks, self._check = contestants, elements, ranks, check
        self._calls = [1] * len(contestants)
        self.first_s: list[float] = []
        self._wrong: list[list[str]] = []
        for index in range(len(contestants)):
            warmup = [self.sample(index, warm=False)]
            # the very first call may take long for reasons of its own, so a short one is known by the next
            limit_s = FIRST_IS_LONG_S
            while len(warmup) < WARMUP_CALLS and warmup[-1]["seconds"] < limit_s:
                warmup.append(self.sample(index, warm=False))
                limit_s = SHORT_S
            call_s = min(sample["seconds"] for sample in warmup)
            self._wrong.append([words for sample in warmup for words in sample["wrong"]])
            if call_s < SHORT_S:
                needed = math.ceil(SAMPLE_S / max(call_s, 1e-9))
                self._calls[index] = max(1, min(needed, MOST_CALLS, MOST_BYTES_KEPT // max(4 * elements, 1)))
            self.first_s.append(call_s)
            tell()

    def facts(self) -> list[dict[str, Any]]:
        """What the parent must know of each contestant: the expected seconds of a sample, what was wrong so far."""
        return [
            {
                "algorithm": one.algorithm,
                "how": one.how,
                "chosen": one.chosen,
                "segment_bytes": one.segment_bytes,
                "calls_per_sample": calls,
                "sample_seconds": calls * call_s,
                "wrong": wrong,
            }
            for one, calls, call_s, wrong in zip(self._contestants, self._calls, self.first_s, self._wrong, strict=True)
        ]

    def sample(self, index: int, warm: bool = True) -> dict[str, Any]:
        """Take one sample.

        Args:
            index: of the contestant.
            warm: call a short one once before.

        Returns:
            The contestant's index, seconds per call of the slowest rank, and what was wrong on which rank.
        """
        one, calls = self._contestants[index], self._calls[index]
        if warm and self.first_s[index] < SHORT_S:
            one.call()
        one.reset()
        # who has waited long looks seldom, so that a second meeting is needed to begin together
        self._ranks.meet()
        self._ranks.meet(FIRST_SLEEP_S)
        begin = time.perf_counter()
        results = [one.call() for _ in range(calls)]
        seconds = (time.perf_counter() - begin) / calls
        # a rank that checked its result now would take the core from one that is still being timed
        self._ranks.meet()
        faults = [self._fault(one, result) for result in results] if self._check else []
        fault = next(filter(None, faults), "")
        answers = self._ranks.gather((seconds, fault))
        wrong = [f"rank {rank}: {words}" for rank, (_, words) in enumerate(answers) if words]
        return {"index": index, "seconds": max(time_s for time_s, _ in answers), "wrong": wrong}

    def _fault(self, one: Contestant, result: Any) -> str:
        if one.sums:
            return fault_of(result, self._elements, lambda n: sum_of(self._ranks.size, n))
        return fault_of(result, self._elements, lambda n: values_of(self._ranks.rank, n))


def serve(
    make: Make,
    task: Task,
    release: Callable[[], None] = lambda: None,
    topology: str = "",
    kind: type[Sampler] = Sampler,
) -> None:
    """Do what the parent says until it says "end"; MPI must have been started. A failure ends the whole job.

    Args:
        make: gives the contestants for a number of elements and the names of algorithms.
        task: what is known at the start.
        release: gives back what `make` opened.
        topology: YAML text of the topology; empty where none was given.
        kind: of the sampler.
    """
    ranks = Ranks()
    folder, sampler = Path(task.folder), None
    try:
        hosts = ranks.gather(platform.node())
        if ranks.rank == 0 and not folder.is_dir():
            raise HvdExtError(
                f"folder ({folder}): rank 0 on {hosts[0]} does not see it; start the benchmark on that host, or set "
                "TMPDIR to a folder that all hosts share"
            )
        events = folder / EVENTS if ranks.rank == 0 else None
        emit(events, "hello", hosts=hosts, topology=topology)

        def alive() -> None:
            emit(events, ALIVE)

        follower = Follower(folder / TURNS)
        while (turn := ranks.told(next_turn(follower) if ranks.rank == 0 else None))["kind"] != "end":
            if turn["kind"] == "open":
                # the buffers of the last size go before those of the next one come
                sampler = None
                release()
                elements = turn["bytes"] // 4
                sampler = kind(make(elements, turn["algorithms"]), elements, ranks, task.check, alive)
                emit(events, "opened", contestants=sampler.facts())
            elif sampler is not None:
                samples = []
                for index in turn["which"]:
                    samples.append(sampler.sample(index))
                    alive()
                emit(events, "measured", samples=samples)
        release()
        ranks.meet()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        ranks.abort()


def next_turn(follower: Follower) -> dict[str, Any]:
    """Wait for what the parent says next, asleep."""
    while not (turns := follower.new()):
        time.sleep(LONGEST_SLEEP_S)
    return turns[0]
