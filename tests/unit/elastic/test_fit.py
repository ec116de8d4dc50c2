"""`fit` with elastic=True under a supervisor: workers are killed, asked to leave and added while it trains."""

from __future__ import annotations

import collections
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hvd_ext.runner import launcher
from hvd_ext.state.folder import newest
from hvd_ext.state.manifest import read
from tests.waiting import ended, until

pytestmark = pytest.mark.slow  # starts TensorFlow several times
JOB = Path(__file__).with_name("counting_job.py")
SAMPLES, EPOCHS = 240, 12


class Training:
    """A supervised job of `counting_job.py`."""

    def __init__(self, folder: Path, *words: str, epochs: int = EPOCHS, density: str = "", **variables: str) -> None:
        self.folder = folder
        self.world = -1  # the newest one that the test has seen
        environment = {name: text for name, text in os.environ.items() if name not in launcher.RANK_VARIABLES}
        environment |= {"HVD_EXT_PROBE": "off", "HVD_EXT_STALL_FATAL_S": "120", "TF_CPP_MIN_LOG_LEVEL": "2"}
        environment |= variables
        command = [sys.executable, str(JOB), str(folder), str(SAMPLES), str(epochs), "0.03", *filter(None, [density])]
        with (folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hvd_ext", "run", *words, "--", *command],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Gives the lines of the log that have something of this name."""
        log = self.folder / "log"
        text = log.read_text() if log.exists() else ""
        return [line for one in text.split("\n")[:-1] if name in (line := json.loads(one))]

    def reached(self, updates: int) -> None:
        """Waits for an update."""
        self._until(lambda line: bool(line["updates"] >= updates), f"update {updates}")

    def changed(self, size: int) -> None:
        """Waits until a world of this size trains that is newer than those seen before; meanwhile the job is slow."""
        slowly = self.folder / "slowly"
        slowly.touch()
        seen = self.world
        self._until(lambda line: bool(line["size"] == size and line["world"] > seen), f"a later world of {size}")
        slowly.unlink()

    def _until(self, wanted: Callable[[dict[str, Any]], bool], words: str) -> None:
        """Waits for a line about an update, and notes its world."""

        def found() -> bool:
            assert self.process.poll() is None, self.output()
            worlds = [line["world"] for line in self.lines("updates") if wanted(line)]
            self.world = max(worlds, default=self.world)
            return bool(worlds)

        until(found, words)

    def workers(self) -> dict[int, int]:
        """Gives the processes of the workers of the newest world, by rank, once all of them train."""

        def found() -> dict[int, int]:
            lines = self.lines("updates")
            newest = [one for one in lines if one["world"] == lines[-1]["world"]]
            by_rank = {one["rank"]: one["pid"] for one in newest}
            return by_rank if len(by_rank) == newest[0]["size"] else {}

        until(found, "all ranks of a world")
        return found()

    def output(self) -> str:
        """Gives what the job has printed."""
        return (self.folder / "output").read_text(errors="replace")

    def ended(self) -> list[dict[str, Any]]:
        """Waits for the end; gives what the workers found that were there at the end."""
        ended(self.process, self.folder / "output")
        return self.lines("counts")


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    """Starts a job, which does not outlive the test."""
    jobs: list[Training] = []

    def start(*words: str, **variables: Any) -> Training:
        jobs.append(Training(tmp_path, *words, **variables))
        return jobs[-1]

    yield start
    for job in jobs:
        job.process.terminate()
        job.process.wait(30)
        print(job.output())  # seen if the test has failed


def check(ends: list[dict[str, Any]], worlds: int, *, traced: bool = True, epochs: int = EPOCHS) -> None:
    """Checks that all ranks have the same weights, and that each sample was trained on once in each epoch.

    Args:
        ends: what the workers have found.
        worlds: how many there were; each division of the rest of an epoch may drop samples that do not divide.
        traced: whether all functions were traced before the first change.
        epochs: how many there were.
    """
    counts = ends[0]["counts"]
    assert all(end["counts"] == counts for end in ends)
    assert all(end["iterations"] == ends[0]["iterations"] for end in ends)
    assert not traced or all(len(end["traced_in"]) == 1 and end["traced_in"][0] <= 0 for end in ends)
    assert max(counts) <= epochs
    assert sum(counts) >= epochs * SAMPLES - 4 * worlds
    assert collections.Counter(counts).most_common(1)[0][0] == epochs


def test_training_survives_killed_workers_takes_new_ones_and_lets_workers_leave(started):
    epochs = 18
    job = started("-np", "3", "--min-np", "2", epochs=epochs, DIES="3 joins")
    job.reached(20)
    os.kill(job.workers()[1], signal.SIGKILL)
    job.changed(2)  # worker 3 is started, and dies while it joins
    job.changed(3)  # worker 4 has joined
    os.kill(job.workers()[2], signal.SIGTERM)
    job.changed(2)
    os.kill(job.workers()[0], signal.SIGKILL)  # with rank 0
    ends = job.ended()
    check(ends, 8, epochs=epochs)
    output = job.output()
    assert output.count("ended by SIGKILL") == 3
    assert re.search(r"worker 3 \(.*\) lost: ended by SIGKILL", output)
    assert "has left: SIGTERM" in output


def test_several_workers_die_at_once_and_in_a_row(started):
    job = started("-np", "4", "--min-np", "1")
    draw = random.Random(4)
    job.reached(15)
    victims = draw.sample(sorted(job.workers()), 2)
    pids = job.workers()
    for rank in victims:
        os.kill(pids[rank], signal.SIGKILL)
    left = [pid for rank, pid in pids.items() if rank not in victims]
    os.kill(left[0], signal.SIGKILL)  # perhaps while the others meet
    ends = job.ended()
    assert ends
    check(ends, 8)


def test_a_worker_that_dies_while_a_checkpoint_is_written_leaves_the_others_whole(started):
    job = started("-np", "3", "--min-np", "2", "--max-np", "3", DIES="0 saves", CHECKPOINTS="1", CACHE="1")
    check(job.ended(), 4)
    assert "worker 0 (rank 0, host localhost) lost: ended by SIGKILL" in job.output()
    assert newest(job.folder / "checkpoints") is not None


def with_a_successor(started: Any, **words: str) -> Training:
    """Starts a job of two calls of `fit`, and kills a worker in the second one; its successor is about to join."""
    job: Training = started("-np", "2", "--min-np", "1", epochs=2, MORE_EPOCHS=str(EPOCHS - 2), **words)
    job.reached(70)  # 30 updates an epoch
    os.kill(job.workers()[1], signal.SIGKILL)
    job.changed(1)
    return job


@pytest.mark.parametrize("density", ["", "1"])  # with a density the ranks flush in between
def test_a_worker_that_comes_late_passes_over_the_calls_of_fit_that_are_done(started, density):
    job = with_a_successor(started, density=density)
    job.changed(2)
    ends = job.ended()
    check(ends, 4, traced=False)  # the second call has another optimizer or a codec
    assert all(end["last_loss"] == ends[0]["last_loss"] and end["epochs"] == 2 for end in ends)  # of the first call
    assert any(line["size"] == 2 and line["worker"] > 1 for line in job.lines("updates"))


def test_too_few_workers_end_with_a_checkpoint(started):
    words = ("-np", "2", "--min-np", "2", "--elastic-timeout", "2", "--blacklist-cooldown-range", "600", "600")
    job = started(*words, CHECKPOINTS="1")
    job.reached(20)
    os.kill(job.workers()[1], signal.SIGKILL)
    assert job.process.wait(60) == 1
    assert "this worker ends: too few workers" in job.output()
    found = newest(job.folder / "checkpoints")
    assert found is not None
    saved = read(found)
    assert (saved.reason, saved.ranks) == ("too few workers", 1)
    assert saved.data["shard"]["again: epoch"] == saved.epoch
