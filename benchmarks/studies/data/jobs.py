"""The benchmark of data: what is asked for, the processes and jobs that measure it, and the rows.

Each part has a process or a job of its own, which tells samples; parts come one after the other, and the contestants of
a part take turns inside it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.studies.data.goals import OURS, UNITS, judged
from benchmarks.studies.data.ranks import NOTHING, beside_nothing
from benchmarks.studies.data.second import clear_kept
from benchmarks.studies.data.worker import Task
from hvd_ext.bench.jobs import check_choices, check_least, events_of
from hvd_ext.bench.sampling import EVENTS, Follower
from hvd_ext.errors import InvalidError
from hvd_ext.runner.launcher import Job, job_environment, mpirun

# In words, in the order in which they are measured.
PARTS = {
    "hits": "samples that were read before",
    "ranks": "four ranks of a host",
    "first": "first epoch, photographs",
    "second": "second job of a host",
    "half": "room for half of the data",
    "slow": "slow source",
    "many": "1.28 million samples",
}
NAMES = {
    OURS: "DataCache",
    "datacache-disk": "DataCache, on disk",
    "datacache-keep": "DataCache, memory kept",
    "memcpy": "memcpy",
    "cache": "cache()",
    "cache-part": "cache() of a rank's part",
    "cache-file": "cache(file)",
    "snapshot": "snapshot()",
    "memmap": "np.memmap, take",
    "decode": "decode from disk",
    "grain": "Grain, np.memmap",
    "streaming": "MosaicML Streaming",
    "shuffle": "shuffle(all)",
}
# The contestants of a part; those that a package brings are left out where it is not installed.
CONTESTANTS = {
    "hits": ("memcpy", OURS, "cache", "cache-file", "snapshot", "memmap", "decode", "grain", "streaming"),
    "ranks": (OURS, "cache", "cache-part"),
    "first": ("decode", OURS, "cache", "cache-file", "snapshot"),
    "second": ("datacache-disk", "datacache-keep", "cache-file", "snapshot", "decode"),
    "half": (OURS,),
    "slow": ("decode", OURS, "cache"),
    "many": (OURS, "shuffle"),
}
PACKAGES = {
    "grain": ("grain", "Grain is left out: it is not installed (python -m pip install grain)"),
    "streaming": (
        "streaming",
        "MosaicML Streaming is left out: it is not installed (python -m pip install mosaicml-streaming)",
    ),
}
SIDES = (32, 96, 224)  # of the pictures of hits: 3.1, 27.6 and 150.5 kB
RANKS, HOSTS, RATE = 4, (2, 2), "1gbit"
ONE_HOST = "slow source: all ranks run on this host, because a rehearsed cluster {why}"
SMALL = "scale {scale:g}: the goals are meant for the full number of samples"

Tell = Callable[[str, int], None]


@dataclasses.dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
        parts: keys of `PARTS`.
        contestants: keys of `NAMES`; empty for all of each part.
        repetitions: samples of a figure.
        scale: the share of the full number of samples, above 0, at most 1.
        timeout_s: longest time without a new sample.
        folder: where everything is written; None for a temporary folder, which is removed.
    """

    parts: tuple[str, ...] = tuple(PARTS)
    contestants: tuple[str, ...] = ()
    repetitions: int = 5
    scale: float = 1.0
    timeout_s: float = 300.0
    folder: Path | None = None

    def __post_init__(self) -> None:
        check_choices("part", self.parts, PARTS)
        check_choices("contestant", self.contestants, NAMES)
        if not self.parts:
            raise InvalidError("parts (none): must name at least one")
        check_least(1, repetitions=self.repetitions)
        if not 0 < self.scale <= 1:
            raise InvalidError(f"scale ({self.scale:g}): must be above 0 and at most 1")
        if self.timeout_s <= 0:
            raise InvalidError(f"timeout ({self.timeout_s:g}): must be above 0")

    def of(self, part: str) -> tuple[str, ...]:
        """Give the contestants of a part that are asked for and installed."""
        return tuple(
            name
            for name in CONTESTANTS[part]
            if (not self.contestants or name in self.contestants) and (name not in PACKAGES or _installed(name))
        )

    def notes(self) -> list[str]:
        """Say what is left out, and what the figures are not good for."""
        asked = {name for part in self.parts for name in CONTESTANTS[part]}
        missing = [
            words
            for name, (_, words) in PACKAGES.items()
            if name in asked and (not self.contestants or name in self.contestants) and not _installed(name)
        ]
        return [*missing, *([SMALL.format(scale=self.scale)] if self.scale < 1 else [])]


def _installed(name: str) -> bool:
    return importlib.util.find_spec(PACKAGES[name][0]) is not None


def measure(request: Request, tell: Tell = lambda title, ready: None) -> tuple[list[dict[str, Any]], list[str]]:
    """Measure the parts one after the other.

    Args:
        request: what to measure.
        tell: takes what runs now, and the number of parts that are just done.

    Returns:
        The rows, see `goals.judged`, and what else the user must know.

    Raises:
        JobError: a process failed, or told nothing for too long.
    """
    rows: list[dict[str, Any]] = []
    notes = request.notes()
    for part in request.parts:
        if names := request.of(part):
            samples: list[dict[str, Any]] = []
            with _folder(request) as folder:
                task = Task(part, str(folder), request.scale, request.repetitions, names)
                for title, event in _told(task, request.timeout_s, notes):
                    tell(f"{PARTS[part]}, {title}", 0)
                    if event["kind"] == "samples":
                        samples.append(event)
            rows += beside_nothing(rows_of(part, samples)) if part == "ranks" else rows_of(part, samples)
        tell(PARTS[part], 1)
    return [{**row, "correct": not row["wrong"]} for row in judged(rows)], notes


@contextmanager
def _folder(request: Request) -> Iterator[Path]:
    where = None if request.folder is None else str(request.folder)
    with tempfile.TemporaryDirectory(prefix="hvd_ext_data_", dir=where, ignore_cleanup_errors=True) as name:
        yield Path(name)


def rows_of(part: str, events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Join what was told: the samples of one place, contestant and quantity are a row, in the order in which they came.

    The facts of a row are those that were told last, but the first thing that was wrong.
    """
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for event in events:
        key = (event["place"], event["contestant"], event["quantity"])
        row = found.setdefault(key, {"part": part, **dict(zip(("place", "contestant", "quantity"), key, strict=True))})
        wrong = row.get("wrong") or event["facts"].get("wrong", "")
        row.update({**event["facts"], "wrong": wrong})
        row["unit"] = UNITS[event["quantity"]]
        row["samples"] = [*row.get("samples", []), *event["samples"]]
    return [row for row in found.values() if row["samples"]]


def _told(task: Task, timeout_s: float, notes: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run the processes of a part; yield what they tell, with what runs now in words."""
    if task.part == "hits":
        for side in SIDES:
            yield from _of_process(_with(task, side=side), timeout_s, f"{side} x {side} pixels")
    elif task.part == "ranks":
        for name in (NOTHING, *task.contestants):
            one = dataclasses.replace(_with(task, ranks=RANKS), contestants=(name,))
            yield from _of_job(one, timeout_s, name, mpirun(RANKS, _command(one)), job_environment())
    elif task.part == "second":
        try:
            yield from _of_process(_with(task, fill=True), timeout_s, "first job")
            for turn in range(task.repetitions):
                yield from _of_process(_with(task, turn=turn), timeout_s, f"job {turn + 2}")
        finally:
            clear_kept(task)
    elif task.part == "slow":
        yield from _slow(task, timeout_s, notes)
    else:
        yield from _of_process(task, timeout_s, "one process")


def _with(task: Task, **facts: Any) -> Task:
    return dataclasses.replace(task, facts={**task.facts, **facts})


def _command(task: Task) -> list[str]:
    return [sys.executable, "-m", "benchmarks.studies.data.worker", task.write()]


def _of_process(task: Task, timeout_s: float, words: str) -> Iterator[tuple[str, dict[str, Any]]]:
    threads = str(len(os.sched_getaffinity(0)))
    environment = job_environment(TF_NUM_INTRAOP_THREADS=threads, TF_NUM_INTEROP_THREADS=threads)
    yield from _of_job(task, timeout_s, words, _command(task), environment)


def _of_job(
    task: Task, timeout_s: float, words: str, command: Sequence[str], environment: Mapping[str, str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    events = task.path(EVENTS)
    events.unlink(missing_ok=True)
    yield words, {"kind": "begin"}
    with Job(command, task.path("log"), environment) as job:
        for event in events_of(job, Follower(events), timeout_s, f"data, {PARTS[task.part]}"):
            yield words, event


def _slow(task: Task, timeout_s: float, notes: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Train on a rehearsed cluster, or on this host where there cannot be one."""
    # imported here, because it is needed by this part alone
    from hvd_ext.cluster.rehearsal import Cluster
    from hvd_ext.cluster.spec import Spec
    from hvd_ext.cluster.tools import obstacle

    if why := obstacle():
        notes.append(ONE_HOST.format(why=why))
        yield from _of_job(task, timeout_s, f"{RANKS} ranks", mpirun(RANKS, _command(task)), job_environment())
        return
    with Cluster(Spec(HOSTS, rate=RATE)) as cluster:
        words = f"hosts of {' + '.join(map(str, HOSTS))} ranks"
        yield from _of_job(task, timeout_s, words, cluster.command(_command(task)), cluster.environment())
