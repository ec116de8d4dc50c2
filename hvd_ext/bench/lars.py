"""The benchmark of LARS: what is asked for, the jobs that measure it, its goals, and its table."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from hvd_ext.bench.jobs import Launcher, events_of
from hvd_ext.bench.lars_worker import CONTESTANTS, MODELS, NORMS, PTO, UPDATE, Task
from hvd_ext.bench.sampling import EVENTS, Follower
from hvd_ext.bench.table import drawn
from hvd_ext.errors import InvalidError
from hvd_ext.runner.launcher import Job, job_environment

NAMES = {
    (NORMS, "read"): "one pass over the same bytes",
    (NORMS, "ours"): "norms: all in one op",
    (NORMS, "l2_loss"): "norms: tf.nn.l2_loss, one op per tensor",
    (NORMS, "norm"): "norms: tf.norm of each tensor",
    (UPDATE, "ours"): "hvd.optimizers.LARS",
    (UPDATE, "ops"): "the same LARS in Keras' operations",
    (UPDATE, "sgd"): "keras.optimizers.SGD, momentum",
    (PTO, "alone"): "norms: each rank all",
    (PTO, "together"): "norms: divided among the ranks",
    (PTO, "auto"): "norms: auto",
}
# part, contestant, what is compared, with whom, and the most that it may be; the paper's times on 128 GPUs are 11 and
# 7 ms for ResNet-50, 30 and 14 ms for a Transformer (CommLib, section 5.4).
GOALS = (
    (NORMS, "ours", "seconds", "read", 1.3),
    (NORMS, "ours", "cpu", "l2_loss", 1 / 3),
    (UPDATE, "ours", "cpu", "ops", 0.5),
    (UPDATE, "ours", "cpu", "sgd", 1.2),
    (PTO, "together", "cpu", "alone", 0.35),
    (PTO, "auto", "seconds", "best", 1.05),
)
# A goal of divided norms holds from so many ranks on: two could save no more than half.
LEAST_RANKS = {(PTO, "together"): 4, (PTO, "auto"): 2}
HEADINGS = ("place", "what", "time, ms", "CPU of all ranks, ms", "chosen")
PAPER = "CommLib, section 5.4, 128 GPUs: ResNet-50 11 ms alone, 7 ms divided; Transformer 30 ms and 14 ms"


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
            for value in values:
                if value not in valid:
                    raise InvalidError(f"{what} ({value!r}): must be one of {', '.join(valid)}")
        for ranks in self.ranks:
            if ranks < 1:
                raise InvalidError(f"ranks ({ranks}): must be at least 1")
        for what, value in (("repetitions", self.repetitions), ("calls", self.calls), ("threads", self.threads)):
            if value < 1:
                raise InvalidError(f"{what} ({value}): must be at least 1")
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
            program = [sys.executable, "-m", "hvd_ext.bench.lars_worker", task.write()]
            threads = {name: str(request.threads) for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")}
            command = launcher.command(ranks, program)
            with Job(command, Path(folder) / "log", job_environment(**threads)) as job:
                events = events_of(job, Follower(Path(folder) / EVENTS), request.timeout_s, "bench lars")
                rows += [event["row"] for event in events]
        tell(f"{ranks or 'all'} ranks", 1)
    return [{**row, **summary(row)} for row in rows]


def summary(row: Mapping[str, Any]) -> dict[str, float]:
    """Give the medians of a row's samples."""
    return {name: statistics.median(row[f"{name}_samples"]) for name in ("seconds", "cpu")}


def ratio(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], what: str, other: str) -> float:
    """Compare a row with another one of its group, in the turns of both.

    Args:
        row: of a contestant.
        rows: with those that it is compared with.
        what: "seconds" or "cpu".
        other: a contestant; "best": the better of alone and together.

    Returns:
        The median of the ratios of the samples of a turn; with "best" the ratio of medians.
    """
    group = {one["contestant"]: one for one in rows if _place(one) == _place(row)}
    if other == "best":
        return float(row[what] / min(group["alone"][what], group["together"][what]))
    pairs = zip(row[f"{what}_samples"], group[other][f"{what}_samples"], strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs if theirs > 0)


def goals(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say of each goal, for each place, what was measured."""
    lines = []
    for part, contestant, what, other, most in GOALS:
        for row in rows:
            fewest = LEAST_RANKS.get((part, contestant), 1)
            if (row["part"], row["contestant"]) != (part, contestant) or row["ranks"] < fewest:
                continue
            seen = ratio(row, rows, what, other)
            verdict = "reached" if seen <= most else "missed"
            than = "the better way" if other == "best" else NAMES[part, other]
            lines.append(
                f"{where(row)}: {NAMES[part, contestant]}, {'time' if what == 'seconds' else 'CPU'} {seen:.2f} of "
                f"{than} (goal {most:.2f}: {verdict})"
            )
    return lines


def where(row: Mapping[str, Any]) -> str:
    """Name a row's place, such as "resnet50 on 2 + 2 ranks"."""
    hosts = " + ".join(str(count) for count in row["ranks_per_host"])
    return f"{row['model']} on {hosts} rank{'s' * (row['ranks'] > 1)}"


def lars_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Draw the rows: medians of the slowest rank's time for one call, and of the CPU of all ranks together."""
    lines = [(_place(row), cells(row), False) for row in rows]
    return drawn("LARS: medians for one call", None, HEADINGS, lines, HEADINGS[:2])


def cells(row: Mapping[str, Any]) -> list[str]:
    """Give the texts of a row, one for each of `HEADINGS`."""
    name = NAMES[row["part"], row["contestant"]]
    return [where(row), name, f"{1e3 * row['seconds']:.2f}", f"{1e3 * row['cpu']:.2f}", row["chosen"] or ""]


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row.get("run"), row["model"], tuple(row["ranks_per_host"]), row["part"]
