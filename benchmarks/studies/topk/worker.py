"""The process that measures top-k, held to its cores: it takes samples in turns and tells rows to its parent."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.studies.topk.inputs import count, make, segments
from hvd_ext.bench.sampling import Argument, emit
from hvd_ext.errors import HvdExtError

if TYPE_CHECKING:
    from benchmarks.studies.topk.peers import Bench, Contestant

EVENTS = "events"
DEVICES, NVIDIA = Path("/dev"), "nvidia[0-9]*"
# So much is read before every timed call that neither input nor output is left in a cache: more than the caches
# hold of any processor that this was tried on.
EVICT_BYTES = 512 * 2**20
FEWEST_SAMPLES = 3
# Each call is made on so many elements right before it is timed: the data of a step are in no cache, but its code may
# be. Without this, an identity of TensorFlow takes 0.3 ms instead of 0.01.
FEW = 4096


@dataclasses.dataclass(frozen=True)
class Task(Argument):
    """What the process is told.

    Attributes:
        folder: where the events are written and gradients are kept.
        elements: lengths of the inputs.
        densities: of the selections.
        inputs: names, see `inputs.make`.
        contestants: by name of the input, names of `topk.NAMES`.
        threads: of everything that is measured; the process is held to as many cores, and is started with as many
            TF_NUM_INTRAOP_THREADS.
        repetitions: the most samples of a contestant.
        seconds_per_row: after so much time a contestant has no more turns, unless it has fewer than `FEWEST_SAMPLES`.
        evict_bytes: see `EVICT_BYTES`.
    """

    folder: str
    elements: tuple[int, ...]
    densities: tuple[float, ...]
    inputs: tuple[str, ...]
    contestants: dict[str, tuple[str, ...]]
    threads: int
    repetitions: int
    seconds_per_row: float
    evict_bytes: int = EVICT_BYTES


class Sampler:
    """Times contestants of one input in turns, each beside its yardstick."""

    def __init__(self, task: Task, evict: Callable[[], Any]) -> None:
        """Take the number of samples from a task, and a function that empties the caches."""
        self._task, self._evict = task, evict

    def rows(self, bench: Bench, contestants: Sequence[Contestant], small: Bench) -> list[dict[str, Any]]:
        """Take the samples.

        Args:
            bench: of the input.
            contestants: of it.
            small: of a few elements, for the calls that warm the code.

        Returns:
            For each contestant its rounds, and for each round the seconds of the yardstick and of the contestant, which
            was called right after it; the data of both were in no cache. cpu_samples and cpu_yardstick_samples are the
            processor's time of the same calls, which other processes disturb less.
        """
        import numpy as np

        rng = np.random.default_rng(0)
        kinds = ("yardstick_samples", "cpu_yardstick_samples", "samples", "cpu_samples")
        found: list[dict[str, Any]] = [{"rounds": [], **{kind: [] for kind in kinds}} for _ in contestants]
        spent = [0.0] * len(contestants)
        twins = [small.contestant(one.name) for one in contestants]
        for turn in range(self._task.repetitions):
            for index in rng.permutation(len(contestants)):
                row, one = found[index], contestants[index]
                if spent[index] >= self._task.seconds_per_row and len(row["samples"]) >= FEWEST_SAMPLES:
                    continue
                pass_s = self._timed(small.yardstick(one.beside), bench.yardstick(one.beside))
                call_s = self._timed(twins[index].call, one.call)
                row["rounds"].append(turn)
                for kind, time_s in zip(kinds, (*pass_s, *call_s), strict=True):
                    row[kind].append(time_s)
                spent[index] += call_s[0]
        return found

    def _timed(self, warm: Callable[[], Any], call: Callable[[], Any]) -> tuple[float, float]:
        self._evict()
        warm()
        begin, cpu = time.perf_counter(), time.process_time()
        kept = call()
        seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
        # the result is freed outside of the timed part, for all contestants alike
        del kept
        return seconds, cpu_s


def evictor(nbytes: int) -> Callable[[], Any]:
    """Make a function that reads a buffer of its own, of so many bytes."""
    import numpy as np

    from benchmarks.studies.topk.functions import read_pass

    buffer = np.full(nbytes // 4, np.float32(1))
    return lambda: read_pass(buffer)


def serve(task: Task) -> None:
    """Measure everything that a task names, and write an event with a row for each contestant of each input."""
    import tensorflow as tf

    from benchmarks.studies.topk.peers import Bench, has_torch

    events = Path(task.folder) / EVENTS
    # a TensorFlow without CUDA sees no GPU, but the system may show some
    gpus = [device.name for device in tf.config.list_physical_devices("GPU")] or sorted(map(str, DEVICES.glob(NVIDIA)))
    emit(events, "hello", gpus=gpus, torch=has_torch(), cores=sorted(os.sched_getaffinity(0)))
    sampler = Sampler(task, evictor(task.evict_bytes))
    for elements in task.elements:
        offsets = segments(elements)
        for name in task.inputs:
            with tf.device("CPU:0"):
                x = tf.constant(make(name, elements, Path(task.folder)))
                for density in task.densities:
                    k = count(density, elements)
                    bench = Bench(x, k, density, offsets, task.threads)
                    few = min(FEW, elements)
                    small = Bench(tf.constant(x[:few]), count(density, few), density, segments(few), 1)
                    place = {"input": name, "elements": elements, "density": density, "k": k, "threads": task.threads}
                    for row in measured(bench, small, task.contestants[name], sampler):
                        emit(events, "row", row={**place, **row})


def measured(bench: Bench, small: Bench, names: Sequence[str], sampler: Sampler) -> list[dict[str, Any]]:
    """Warm contestants up, check what they return, and time them.

    Args:
        bench: makes them.
        small: makes those of a few elements.
        names: of the contestants; "torch" is left out where PyTorch is not installed.
        sampler: takes the samples.

    Returns:
        A row for each.
    """
    from benchmarks.studies.topk.check import Check
    from benchmarks.studies.topk.peers import has_torch

    check = Check(bench.array, bench.k, bench.offsets, bench.segment_picks)
    facts, contestants = [], []
    for name in names:
        if name == "torch" and not has_torch():
            continue
        one = bench.contestant(name)
        found = one.call()
        fact: dict[str, Any] = {"contestant": name, "beside": one.beside}
        nothing = {"returned": None, "recall": None, "correct": None, "wrong": ""}
        facts.append({**fact, **(check.judge(one.promise, *one.answer(found)) if one.answer else nothing)})
        del found
        contestants.append(one)
    times = sampler.rows(bench, contestants, small)
    return [{**fact, **row} for fact, row in zip(facts, times, strict=True)]


def main(arguments: Sequence[str]) -> int:
    """Measure the task that is the only argument; give the exit status."""
    task = Task.read(arguments[0])
    # before TensorFlow starts its threads: they inherit it
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-task.threads :])
    try:
        serve(task)
    except HvdExtError as error:
        print(f"topk: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
