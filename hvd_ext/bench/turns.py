"""Jobs that live at the same time and take turns: while one of them measures, the ranks of the others are stopped.

The ranks of Horovod poll while they have nothing to do; on a machine with few cores they would spoil the times of
others. So who has not the turn gets SIGSTOP, and SIGCONT when its turn comes. The launchers and their daemons go on.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from hvd_ext.bench.events import Follower, emit
from hvd_ext.bench.sampling import ALIVE, EVENTS, TURNS
from hvd_ext.runner.launcher import Job, JobError, last_words

FIRST_POLL_S, LONGEST_POLL_S = 1e-3, 20e-3


class Worker:
    """A job whose rank 0 answers each turn with one event."""

    def __init__(self, name: str, job: Job, folder: Path, timeout_s: float) -> None:
        """Take a job that has just been started.

        Args:
            name: for messages and the progress.
            job: it ends when the caller leaves its `with` block.
            folder: where turns and events are written.
            timeout_s: longest time without an answer or another sign of life.
        """
        self.name, self.job = name, job
        self._turns, self._follower, self._timeout_s = folder / TURNS, Follower(folder / EVENTS), timeout_s
        self._ranks: list[psutil.Process] = []

    def find_ranks(self, size: int) -> bool:
        """Find the processes that can be stopped.

        Args:
            size: number of ranks of the job.

        Returns:
            Whether all of them are on this machine.
        """
        found = self.job.ranks()
        self._ranks = found if len(found) == size else []
        return bool(self._ranks)

    def say(self, kind: str, **values: Any) -> None:
        """Write a turn.

        Args:
            kind: "open", "measure" or "end".
            values: what JSON can hold.
        """
        emit(self._turns, kind, **values)

    def answer(self) -> dict[str, Any]:
        """Wait for the next event that is an answer.

        Returns:
            The event.

        Raises:
            JobError: the job has ended, or gave no sign of life for too long.
        """
        end, sleep_s = time.monotonic() + self._timeout_s, FIRST_POLL_S
        while True:
            ended = self.job.status() is not None
            events = self._follower.new()
            if answers := [event for event in events if event["kind"] != ALIVE]:
                return answers[0]
            if events:
                end, sleep_s = time.monotonic() + self._timeout_s, FIRST_POLL_S
            if ended:
                self.job.wait(self._timeout_s)
                raise JobError(f"{self.name}: the job ended before its work was done\n{last_words(self.job.log)}")
            if time.monotonic() > end:
                raise JobError(
                    f"{self.name}: no answer within {self._timeout_s:g} s; where it is only slow, allow more with "
                    f"--timeout\n{last_words(self.job.log)}"
                )
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, LONGEST_POLL_S)

    def pause(self) -> None:
        """Stop the ranks where they are."""
        self._send(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let the ranks go on."""
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        for process in self._ranks:
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue


class Turns:
    """The jobs of one comparison."""

    def __init__(self) -> None:
        """Begin without jobs."""
        self.workers: list[Worker] = []
        self.stopping = True
        self.hello: dict[str, Any] = {}

    def join(self, worker: Worker) -> None:
        """Wait until a job is ready; those that have joined before are stopped meanwhile.

        Args:
            worker: of a job that has just been started.

        Raises:
            JobError: the job failed, or its ranks are on other hosts than those of the jobs before.
        """
        hello = worker.answer()
        if self.hello and hello["hosts"] != self.hello["hosts"]:
            raise JobError(
                f"{worker.name}: its ranks are on {hello['hosts']}, those of {self.workers[0].name} on "
                f"{self.hello['hosts']}; the launcher must place the ranks of all jobs alike"
            )
        self.hello = self.hello or hello
        self.stopping = worker.find_ranks(len(hello["hosts"])) and self.stopping
        self.workers.append(worker)
        self._let(None)

    def give(self, worker: Worker, kind: str, **values: Any) -> dict[str, Any]:
        """Give a job the turn and wait for its answer.

        Args:
            worker: one that has joined.
            kind: "open" or "measure".
            values: of the turn.

        Returns:
            The answer.

        Raises:
            JobError: the job failed or did not answer in time.
        """
        self._let(worker)
        worker.say(kind, **values)
        return worker.answer()

    def end(self, wait: Callable[[Job], None]) -> None:
        """Let all jobs end, one after the other.

        Args:
            wait: waits for a job to end well.
        """
        for worker in self.workers:
            self._let(worker)
            worker.say("end")
            wait(worker.job)

    def _let(self, chosen: Worker | None) -> None:
        # Where some ranks are elsewhere none is stopped: half a job that stands still is worse than one that polls.
        if self.stopping:
            for worker in self.workers:
                if worker is not chosen:
                    worker.pause()
        if chosen is not None:
            chosen.go_on()


def rotated(values: Sequence[Any], by: int) -> list[Any]:
    """Begin a list elsewhere: in each repetition another one is first.

    Args:
        values: of any length.
        by: places.

    Returns:
        As many values.
    """
    return [values[(place + by) % len(values)] for place in range(len(values))]
