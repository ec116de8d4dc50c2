"""The benchmark of LARS: what is asked for, the jobs that measure it, its goals, and its table."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.studies.lars.worker import CONTESTANTS, MODELS, Task
from hvd_ext.bench.jobs import Launcher, check_choices, check_least, events_of
from hvd_ext.bench.sampling import EVENTS, Follower
from hvd_ext.errors import InvalidError
from hvd_ext.runner.launcher import Job, job_environment


@dataclasses.dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
        ranks: numbers of ranks on this host; empty with a launcher of the user's.
        models: keys of `MODELS`.
        parts: keys of `CONTESTANTS`.
        repetitions: samples of each row.
        calls: calls of a sample.
        threads: of each rank.
        timeout_s: longest time without a new row.
    """

    ranks: tuple[int, ...] = (1, 2, 4)
    models: tuple[str, ...] = tuple(MODELS)
    parts: tuple[str, ...] = tuple(CONTESTANTS)
    repetitions: int = 7
    calls: int = 3
    threads: int = 1
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for what, values, valid in (("model", self.models, MODELS), ("part", self.parts, CONTESTANTS)):
            if not values or len(set(values)) < len(values):
                raise InvalidError(f"{what}s ({', '.join(values)}): name at least one, and each only once")
            check_choices(what, values, valid)
        check_least(1, ranks=self.ranks, repetitions=self.repetitions, calls=self.calls, threads=self.threads)
        if self.timeout_s <= 0:
            raise InvalidError(f"timeout ({self.timeout_s:g}): must be above 0")

    def jobs(self, launcher: Launcher) -> tuple[int | None, ...]:
        """Give the numbers of ranks of the jobs; None for that of the launcher's line."""
        return (None,) if launcher.line else self.ranks


def measure(
    request: Request, launcher: Launcher, tell: Callable[[str, int], None] = lambda title, ready: None
) -> list[dict[str, Any]]:
    """Measure what was asked for, with one job for each number of ranks.

    Args:
        request: what to measure.
        launcher: how to start the jobs.
        tell: takes what runs now, and how many jobs have just ended.

    Returns:
        The rows, with what `summary` adds to them.

    Raises:
        JobError: a job failed, or told nothing for too long.
    """
    rows: list[dict[str, Any]] = []
    for ranks in request.jobs(launcher):
        tell(f"{ranks or 'all'} ranks", 0)
        with tempfile.TemporaryDirectory(prefix="hvd_ext_lars_") as folder:
            task = Task(folder, request.models, request.parts, request.repetitions, request.calls, request.threads)
            program = [sys.executable, "-m", "benchmarks.studies.lars.worker", task.write()]
            threads = {name: str(request.threads) for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")}
            command = launcher.command(ranks, program)
            with Job(command, Path(folder) / "log", job_environment(**threads)) as job:
                events = events_of(job, Follower(Path(folder) / EVENTS), request.timeout_s, "lars")
                rows += [event["row"] for event in events]
        tell(f"{ranks or 'all'} ranks", 1)
    return [{**row, **summary(row)} for row in rows]


def summary(row: Mapping[str, Any]) -> dict[str, float]:
    """Give the medians of a row's samples."""
    return {name: statistics.median(row[f"{name}_samples"]) for name in ("seconds", "cpu")}
