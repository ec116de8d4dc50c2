"""Replays a model without TensorFlow on a rank: `LAUNCHER python -m benchmarks.studies.schedule.worker FOLDER TASK`.

Computing is sleeping: the rank sleeps until a tensor is ready, hands it to the engine, and waits for all results at the
end. So computing takes no core from the ranks that share it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hvd_ext.bench.sampling import (
    ALIVE,
    EVENTS,
    FIRST_SLEEP_S,
    SHORT_S,
    Ranks,
    answer_turns,
    emit,
    fault_of,
    sum_of,
    values_of,
)

if TYPE_CHECKING:
    from hvd_ext.engine.channels import Parts
    from hvd_ext.planning.layout import Layout
    from hvd_ext.planning.step_times import StepTimes

SINGLE, AUTO = "single", "auto"
# Not a bucketer: the buckets of "auto", and a step takes the results of the step before it, as with delay=1.
DELAY = "delay"
WARMUP_STEPS, ALONE_STEPS, DELAYED_STEPS = 1, 3, 3
PR_SET_TIMERSLACK = 29  # linux/prctl.h


def sleep_precisely() -> None:
    """Let the sleeps of this thread end within a microsecond or so of their time, where Linux would allow 50."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
    except (AttributeError, OSError):
        return


def sleep_until(deadline_s: float) -> None:
    """Sleep until a time of `time.monotonic`; return at once if it has passed."""
    left_s = deadline_s - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)


@dataclasses.dataclass(frozen=True)
class Replay:
    """A step of a model on a channel of its own.

    Attributes:
        channel: the engine's handle.
        parts: the steps of the channel.
        times: when the tensors are ready.
        delayed: a step takes the results of the step before it.
    """

    channel: int
    parts: Parts
    times: StepTimes
    delayed: bool = False

    def step(self) -> tuple[float, list[float]]:
        """Run a step, or several in a row that are delayed.

        Returns:
            The time of a step, and for each tensor how late it was handed over, in seconds.
        """
        if self.delayed:
            self._compute()
        begin_s, late_s = time.monotonic(), []
        steps = DELAYED_STEPS if self.delayed else 1
        for _ in range(steps):
            late_s += self._compute()
            self.parts.collect(int(self.delayed))
            if self.times.update_s:
                time.sleep(self.times.update_s)
        step_s = (time.monotonic() - begin_s) / steps
        if self.delayed:
            self.parts.collect()
        return step_s, late_s

    def _compute(self) -> list[float]:
        """Hand the tensors over, and return how late."""
        begin_s, late_s = time.monotonic(), []
        self.parts.begin()
        for place in self.times.order:
            deadline_s = begin_s + self.times.ready_s[place]
            sleep_until(deadline_s)
            late_s.append(time.monotonic() - deadline_s)
            self.parts.submit(place)
        # a layer without tensors may come first
        sleep_until(begin_s + self.times.computed_s)
        return late_s


class Stage:
    """The replays of one model; all ranks use it alike."""

    def __init__(self, ranks: Ranks, times: StepTimes, algorithm: str) -> None:
        """Make the tensors.

        Args:
            ranks: all ranks.
            times: the model; its times count as shares of each other, until `open` scales them.
            algorithm: of all buckets, or "auto".
        """
        self._ranks, self._times, self._algorithm = ranks, times, algorithm
        elements = [tensor.elements for tensor in times.tensors]
        self._inputs = [values_of(ranks.rank, count) for count in elements]
        self._outputs = [np.empty(count, np.float32) for count in elements]
        self._replays: list[Replay] = []

    def alone(self) -> float:
        """Measure the communication alone: all tensors are ready at once and travel in one bucket.

        Returns:
            The median of the slowest rank's times, seconds.
        """
        at_once = _at_once(self._times)
        replay = self._opened(self._planned(SINGLE, at_once)[0], at_once)
        for _ in range(WARMUP_STEPS):
            self._run(replay)
        seconds = [self._run(replay)["seconds"] for _ in range(ALONE_STEPS)]
        self._close(replay)
        return statistics.median(seconds)

    def open(self, factor: float, bucketers: Sequence[str]) -> list[dict[str, Any]]:
        """Prepare the replays, and take the first steps of each.

        Args:
            factor: all times of the model are multiplied by it.
            bucketers: their names, "auto" and "delay".

        Returns:
            What the parent must know of each. Bucketers with the same layout share a replay; "delay" has its own.
        """
        self.release()
        times = dataclasses.replace(
            self._times,
            ready_s=tuple(factor * ready_s for ready_s in self._times.ready_s),
            forward_s=factor * self._times.forward_s,
            update_s=None if self._times.update_s is None else factor * self._times.update_s,
        )
        facts, numbers = [], {}
        for bucketer in bucketers:
            laid_out, predicted_s = self._planned(bucketer, times)
            delayed = bucketer == DELAY
            new = (laid_out.digest, delayed) not in numbers
            number = numbers.setdefault((laid_out.digest, delayed), len(numbers))
            if new:
                self._replays.append(self._opened(laid_out, times, delayed))
            warmup = [self._run(self._replays[number]) for _ in range(WARMUP_STEPS) if new and predicted_s < SHORT_S]
            facts.append(
                {
                    "bucketer": bucketer,
                    "chosen": laid_out.bucketer,
                    "replay": number,
                    "buckets": [
                        [len(bucket.tensors), nbytes]
                        for bucket, nbytes in zip(laid_out.buckets, laid_out.nbytes, strict=True)
                    ],
                    "algorithms": sorted({bucket.plan.algorithm for bucket in laid_out.buckets}),
                    "predicted_seconds": predicted_s,
                    "compute_seconds": times.computed_s + (times.update_s or 0.0),
                    "sample_seconds": max([predicted_s, *(one["seconds"] for one in warmup)])
                    * (1 + DELAYED_STEPS if delayed else 1),
                    "wrong": [words for one in warmup for words in one["wrong"]],
                }
            )
        return facts

    def sample(self, index: int) -> dict[str, Any]:
        """Run one step of a replay; see `_run`."""
        return {"index": index, **self._run(self._replays[index])}

    def release(self) -> None:
        """Close the channels."""
        while self._replays:
            self._close(self._replays.pop())

    def _planned(self, bucketer: str, times: StepTimes) -> tuple[Layout, float]:
        """Lay a step out, and predict its time, on all ranks alike."""
        from hvd_ext.job import runtime
        from hvd_ext.options import Sum
        from hvd_ext.planning.layout import layout
        from hvd_ext.planning.prediction import predict

        tree = runtime.current().tree
        planned: tuple[Layout, float] | None = None
        if self._ranks.rank == 0:
            # the ranks share cores, and all would plan alike
            buckets = AUTO if bucketer == DELAY else bucketer
            laid_out = layout(tree, times.tensors, Sum, algorithm=self._algorithm, buckets=buckets, times=times)
            if bucketer == DELAY:
                # communication and the next step's computation run beside each other
                computing_s = times.computed_s + (times.update_s or 0.0)
                planned = laid_out, max(computing_s, predict(tree, laid_out, _at_once(times)).step_s)
            else:
                planned = laid_out, predict(tree, laid_out, times).step_s
        found: tuple[Layout, float] = self._ranks.broadcast(planned)
        return found

    def _opened(self, layout: Layout, times: StepTimes, delayed: bool = False) -> Replay:
        from hvd_ext.job import runtime

        job = runtime.current()
        channel = job.open("bench schedule", layout)
        return Replay(channel, job.engine.in_parts(channel, self._inputs, self._outputs), times, delayed)

    def _close(self, replay: Replay) -> None:
        from hvd_ext.job import runtime

        # a rank that has its results may be ahead of one that still waits for the channel
        self._ranks.meet()
        runtime.current().engine.close_channel(replay.channel)

    def _run(self, replay: Replay) -> dict[str, Any]:
        """Run one step on all ranks, which begin together.

        Returns:
            The seconds of the slowest rank; how late tensors were handed over, the median over the ranks' medians, and
            the largest of the ranks' 99th percentiles; and what was wrong on which rank.
        """
        for output in self._outputs:
            output.fill(np.nan)
        # a rank that has waited for long looks seldom, so a second barrier lets all ranks begin together
        self._ranks.meet()
        self._ranks.meet(FIRST_SLEEP_S)
        seconds, late_s = replay.step()
        self._ranks.meet()
        told = (seconds, float(np.median(late_s)), float(np.quantile(late_s, 0.99)), self._fault())
        times, median_s, late_most_s, faults = zip(*self._ranks.gather(told), strict=True)
        return {
            "seconds": max(times),
            "late_seconds": statistics.median(median_s),
            "late_seconds_p99": max(late_most_s),
            "wrong": [f"rank {rank}: {words}" for rank, words in enumerate(faults) if words],
        }

    def _fault(self) -> str:
        def right(count: int) -> NDArray[np.float32]:
            return sum_of(self._ranks.size, count)

        for tensor, output in zip(self._times.tensors, self._outputs, strict=True):
            if words := fault_of(output, tensor.elements, right):
                return f"{tensor.name}: {words}"
        return ""


def _at_once(times: StepTimes) -> StepTimes:
    """Give a model whose computing takes no time."""
    return dataclasses.replace(times, ready_s=(0.0,) * len(times.ready_s), forward_s=0.0, update_s=None)


def _read(told: dict[str, Any]) -> StepTimes:
    from hvd_ext.planning.step_times import StepTimes
    from hvd_ext.planning.tensors import Tensor

    tensors = tuple(Tensor(name, (elements,), "float32") for name, elements in told["tensors"])
    return StepTimes(tensors, tuple(told["ready_s"]), told["forward_s"], told["update_s"])


def serve(folder: str) -> None:
    """Replay as the parent says; see `sampling.answer_turns`. hvd_ext must have been started."""
    ranks = Ranks()
    stages: list[Stage] = []

    def alive() -> None:
        emit(Path(folder) / EVENTS if ranks.rank == 0 else None, ALIVE)

    def answer(turn: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        if turn["kind"] in ("model", "end"):
            while stages:
                stages.pop().release()
        if turn["kind"] == "model":
            stages.append(Stage(ranks, _read(turn["times"]), turn["algorithm"]))
            return "weighed", {"seconds": stages[0].alone()}
        if turn["kind"] == "open":
            return "opened", {"contestants": stages[0].open(turn["factor"], turn["bucketers"])}
        if turn["kind"] == "measure":
            samples = []
            for index in turn["which"]:
                samples.append(stages[0].sample(index))
                alive()
            return "measured", {"samples": samples}
        return "ended", {}

    answer_turns(folder, ranks, answer)


def main(folder: str, _: str) -> None:
    """Serve the parent, which has written the task."""
    from hvd_ext.job import process

    process.init()
    sleep_precisely()
    serve(folder)
    process.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
