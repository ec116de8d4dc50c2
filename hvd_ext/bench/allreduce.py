"""The allreduce benchmark on one host: our channel and our eager call beside MPI_Allreduce and Horovod."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hvd_ext.bench.events import Follower
from hvd_ext.bench.job import Job, job_environment, mpirun
from hvd_ext.bench.machine import machine, versions
from hvd_ext.bench.sampling import Task
from hvd_ext.errors import InvalidError

# Who is compared with whom: the way that training uses, and the eager call.
LIKE = {"channel": "horovod graph", "eager": "horovod eager"}
NO_HOROVOD = "Horovod is not installed: no comparison with it (python -m hvd_ext install-horovod)"


@dataclasses.dataclass(frozen=True)
class Request:
    """What to measure.

    Args:
        ranks: numbers of ranks; a job each.
        sizes: bytes of the float32 buffer, multiples of 4.
        algorithms: names of allreduce algorithms, or "auto".
        repetitions: timed samples per row.
        warmup: calls before the first sample.
        sample_s: a sample repeats a short call until it takes about so long.
        horovod: measure Horovod too where it is installed.
        timeout_s: longest time of one job.

    Raises:
        InvalidError: a value breaks its rule.
    """

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    algorithms: tuple[str, ...] = ("auto",)
    repetitions: int = 30
    warmup: int = 5
    sample_s: float = 0.005
    horovod: bool = True
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        from hvd_ext.planning import registry

        known = ("auto", *registry.names())
        for ranks in self.ranks:
            if ranks < 1:
                raise InvalidError(f"ranks ({ranks}): must be at least 1")
        for nbytes in self.sizes:
            if nbytes < 4 or nbytes % 4:
                raise InvalidError(f"bytes ({nbytes}): must be a multiple of 4, the size of a float32, and at least 4")
        for algorithm in self.algorithms:
            if algorithm not in known:
                raise InvalidError(
                    f"algorithm ({algorithm!r}): there is none of this name; there are {', '.join(known)}"
                )
        if self.repetitions < 1:
            raise InvalidError(f"repetitions ({self.repetitions}): must be at least 1")
        if not (self.ranks and self.sizes and self.algorithms):
            raise InvalidError("ranks, bytes, algorithms: each must name at least one value")


def has_horovod() -> bool:
    """Tell whether Horovod can be measured."""
    return importlib.util.find_spec("horovod") is not None


def measure(request: Request, tell: Callable[[str, int], None]) -> dict[str, Any]:
    """Run the jobs of a request, one after the other.

    Args:
        request: what to measure.
        tell: takes the job that runs and the number of sizes that have just become ready.

    Returns:
        What the JSON file holds: date, command, machine, versions, request, rows, notes.

    Raises:
        JobError: a job failed; a wrong result fails its job.
    """
    notes, facts = [], machine()
    workers = [("hvd_ext", "hvd_ext.bench.worker")]
    if request.horovod and has_horovod():
        workers.append(("Horovod", "hvd_ext.bench.horovod_worker"))
    elif request.horovod:
        notes.append(NO_HOROVOD)
    rows: list[dict[str, Any]] = []
    for ranks in request.ranks:
        for name, module in workers:
            title = f"{name}, {ranks} ranks"
            found = _run_job(request, ranks, module, lambda ready, title=title: tell(title, ready))
            rows += [{"ranks": ranks, **row} for row in found]
    return {
        "benchmark": "allreduce on one host, float32, sum",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", "-m", "hvd_ext", *sys.argv[1:]]),
        "machine": facts,
        "versions": versions(),
        "request": dataclasses.asdict(request),
        "notes": notes,
        "rows": compared([_summary(row) for row in rows]),
    }


def _run_job(request: Request, ranks: int, module: str, ready: Callable[[int], None]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="hvd_ext-bench-") as folder:
        paths = {name: Path(folder) / name for name in ("task", "output", "events", "log")}
        task = Task(
            sizes=request.sizes,
            algorithms=request.algorithms,
            repetitions=request.repetitions,
            warmup=request.warmup,
            sample_s=request.sample_s,
            output=str(paths["output"]),
            events=str(paths["events"]),
        )
        paths["task"].write_text(json.dumps(dataclasses.asdict(task)))
        follower = Follower(paths["events"])
        command = mpirun(ranks, [sys.executable, "-m", module, str(paths["task"])])
        ready(0)
        with Job(command, paths["log"], job_environment()) as job:
            job.wait(request.timeout_s, lambda: ready(len(follower.new())))
        return list(json.loads(paths["output"].read_text()))


def _summary(row: dict[str, Any]) -> dict[str, Any]:
    samples = row["samples_s"]
    return {**row, "median_s": statistics.median(samples), "min_s": min(samples)}


def compared(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Set the rows of hvd_ext beside MPI_Allreduce and Horovod.

    Args:
        rows: with ranks, nbytes, what and median_s.

    Returns:
        The rows, and in each of ours "to_mpi" and "to_horovod": our median over theirs, below 1 where we are faster;
        Horovod's rows have "to_mpi".
    """
    medians = {(row["ranks"], row["nbytes"], row["what"]): row["median_s"] for row in rows}

    def ratio(row: dict[str, Any], other: str | None) -> float | None:
        theirs = medians.get((row["ranks"], row["nbytes"], other))
        return row["median_s"] / theirs if theirs else None

    return [
        {
            **row,
            "to_mpi": None if row["what"] in ("mpi", "noop") else ratio(row, "mpi"),
            "to_horovod": ratio(row, LIKE.get(row["what"])),
        }
        for row in rows
    ]
