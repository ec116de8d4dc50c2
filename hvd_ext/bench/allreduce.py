"""The allreduce benchmark: our algorithms beside MPI_Allreduce and Horovod, repetition by repetition."""

from __future__ import annotations

import dataclasses
import importlib.util
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from hvd_ext.bench.expected import Cluster, cluster_of
from hvd_ext.bench.launcher import Launcher
from hvd_ext.bench.sampling import Task
from hvd_ext.bench.turns import Turns, Worker, rotated
from hvd_ext.errors import InvalidError
from hvd_ext.runner.launcher import Job, job_environment

HOWS = ("graph", "engine", "eager")
# These are no plans.
BASELINES = ("mpi", "horovod")
NO_HOROVOD = "Horovod is not installed and was not measured (python -m hvd_ext install-horovod)"
LEAST_REPETITIONS = 3
# Buffers of one size that a rank holds at a time: with NumPy the input, the result and the engine's; with TensorFlow
# a tensor and its result more; with Horovod the values, a tensor, the fused buffer and a result.
NUMPY_BUFFERS, TENSORFLOW_BUFFERS, HOROVOD_BUFFERS = 3, 5, 4
MOST_OF_MEMORY = 0.9
Samples = dict[tuple[int, int], list[dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Request:
    """What to measure.

    Args:
        sizes: bytes of the float32 buffer, multiples of 4.
        algorithms: names of allreduce algorithms, "auto", "mpi", "horovod"; nothing else is measured.
        hows: how to call: "graph", "engine", "eager". Horovod knows the first and the last; MPI is always called with
            NumPy buffers, which is named "engine".
        ranks: numbers of ranks on this host, one job of each after the other; empty where a launcher says it.
        repetitions: the most samples of a row.
        seconds_per_row: long calls have fewer samples, at least 3, so that a row takes about so long.
        check: compare every result with the right one.
        rate: bytes per second on the wire of each host, for the bound; None to take the topology's.
        timeout_s: longest time without an answer of a job.

    Raises:
        InvalidError: a value breaks its rule.
    """

    sizes: tuple[int, ...]
    algorithms: tuple[str, ...] = ("auto", *BASELINES)
    hows: tuple[str, ...] = ("graph", "engine")
    ranks: tuple[int, ...] = ()
    repetitions: int = 30
    seconds_per_row: float = 8.0
    check: bool = True
    rate: float | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        from hvd_ext.planning import registry

        known = ("auto", *registry.names(), *BASELINES)
        for ranks in self.ranks:
            if ranks < 1:
                raise InvalidError(f"ranks ({ranks}): must be at least 1")
        for nbytes in self.sizes:
            if nbytes < 4 or nbytes % 4:
                raise InvalidError(f"bytes ({nbytes}): must be a multiple of 4, the size of a float32, and at least 4")
        for name, values, valid in (("algorithm", self.algorithms, known), ("how", self.hows, HOWS)):
            for value in values:
                if value not in valid:
                    raise InvalidError(f"{name} ({value!r}): there is none of this name; there are {', '.join(valid)}")
                if values.count(value) > 1:
                    raise InvalidError(f"{name} ({value!r}): must be named once")
        if self.repetitions < 1:
            raise InvalidError(f"repetitions ({self.repetitions}): must be at least 1")
        for name, seconds in (("seconds per row", self.seconds_per_row), ("timeout", self.timeout_s)):
            if seconds <= 0:
                raise InvalidError(f"{name} ({seconds:g}): must be more than 0")
        if not (self.sizes and self.algorithms and self.hows):
            raise InvalidError("bytes, algorithms, how: each must name at least one value")

    @property
    def jobs(self) -> tuple[tuple[str, str], ...]:
        """The jobs that live at the same time: a name, and the module that each rank runs."""
        jobs = []
        if set(self.algorithms) - {"horovod"}:
            jobs.append(("hvd_ext", "hvd_ext.bench.worker"))
        if "horovod" in self.algorithms and has_horovod():
            jobs.append(("Horovod", "hvd_ext.bench.horovod_worker"))
        return tuple(jobs)

    def memory_of(self, nbytes: int) -> int:
        """How much memory a rank of each job needs together, in bytes.

        Args:
            nbytes: size of the buffer.

        Returns:
            The buffers that are held at a time; what a process needs anyway is left out.
        """
        ours = TENSORFLOW_BUFFERS if {"graph", "eager"} & set(self.hows) else NUMPY_BUFFERS
        copies = {"hvd_ext": ours, "Horovod": HOROVOD_BUFFERS}
        return nbytes * sum(copies[name] for name, _ in self.jobs)


def has_horovod() -> bool:
    """Tell whether Horovod can be measured."""
    return importlib.util.find_spec("horovod") is not None


def measure(
    request: Request, launcher: Launcher, tell: Callable[[str, int], None]
) -> tuple[list[dict[str, Any]], list[str], str]:
    """Measure what was asked for.

    Args:
        request: what to measure.
        launcher: how to start the jobs.
        tell: takes what runs now, and the number of sizes that have just become ready.

    Returns:
        The rows, what else the user must know, and the YAML text of the topology (empty without one).

    Raises:
        InvalidError: there is nothing to measure.
        JobError: a job failed.
    """
    if not request.jobs:
        raise InvalidError(f"algorithms ({', '.join(request.algorithms)}): {NO_HOROVOD}")
    rows: list[dict[str, Any]] = []
    notes = [NO_HOROVOD] if "horovod" in request.algorithms and not has_horovod() else []
    topology = ""
    for ranks in request.ranks or (None,):
        # The folders go first: who is told to end may be killed before all processes of the jobs have ended.
        with ExitStack() as stack, ExitStack() as folders:
            turns = Turns()
            for name, module in request.jobs:
                tell(f"{name} starts", 0)
                turns.join(_start(stack, folders, request, launcher, ranks, name, module))
            cluster, topology = cluster_of(turns.hello, request.rate), turns.hello["topology"]
            found, said = _measure(request, cluster, turns, tell)
            turns.end(lambda job: job.wait(request.timeout_s))
        rows += found
        notes += [note for note in said if note not in notes]
    return rows, notes, topology


def _start(
    stack: ExitStack,
    folders: ExitStack,
    request: Request,
    launcher: Launcher,
    ranks: int | None,
    name: str,
    module: str,
) -> Worker:
    # a rank may write while its folder goes
    temporary = tempfile.TemporaryDirectory(prefix="hvd_ext-bench-", ignore_cleanup_errors=True)
    folder = Path(folders.enter_context(temporary))
    hows = request.hows
    if name == "Horovod":
        hows = tuple(how for how in hows if how != "engine") or ("graph",)
    task = Task(str(folder), hows, request.check)
    command = launcher.command(ranks, [sys.executable, "-m", module, task.write()])
    job = stack.enter_context(Job(command, folder / "log", job_environment()))
    return Worker(name, job, folder, request.timeout_s)


def _measure(
    request: Request, cluster: Cluster, turns: Turns, tell: Callable[[str, int], None]
) -> tuple[list[dict[str, Any]], list[str]]:
    refusals = {name: cluster.refusal(name) for name in request.algorithms}
    ours = [name for name, why in refusals.items() if why is None and name != "horovod"]
    notes = [
        f"{name} does not apply to {cluster.tree.describe()}: {why}"
        for name, why in refusals.items()
        if why is not None
    ]
    if len(cluster.ranks_per_host) > 1 and not cluster.given:
        notes.append(
            "no topology was told (HVD_EXT_TOPOLOGY): the planner assumes its links, so its prices say nothing"
        )
    if not turns.stopping and len(turns.workers) > 1:
        notes.append("not all ranks are on this machine: the job that has not its turn is not stopped, and may disturb")
    rows = []
    for nbytes in request.sizes:
        # those who wait for the next turn hold the buffers of the last size still
        room = psutil.virtual_memory().available
        needed = request.memory_of(nbytes) * cluster.ranks
        if turns.stopping and needed > MOST_OF_MEMORY * room:
            notes.append(
                f"{nbytes:,} bytes were left out: {cluster.ranks} ranks need about {needed / 2**30:.1f} GiB, and "
                f"{room / 2**30:.1f} GiB are free"
            )
            tell("", 1)
            continue
        tell(f"{cluster.tree.describe()}, {nbytes:,} bytes", 0)
        opened = [turns.give(worker, "open", bytes=nbytes, algorithms=ours)["contestants"] for worker in turns.workers]
        samples = samples_of(request, turns, opened)
        for (job, index), taken in samples.items():
            rows.append(_row(cluster, nbytes, opened[job][index], taken, request.check))
        tell(f"{cluster.tree.describe()}, {nbytes:,} bytes", 1)
    return rows, notes


def wanted(request: Request, sample_s: float) -> int:
    """How many samples a row has.

    Args:
        request: the most, and the seconds of a row.
        sample_s: what a sample takes.

    Returns:
        As many as fit, at least 3, and at most what was asked for.
    """
    fit = int(request.seconds_per_row / max(sample_s, 1e-6))
    return min(request.repetitions, max(LEAST_REPETITIONS, fit))


def samples_of(request: Any, turns: Turns, opened: Sequence[Sequence[dict[str, Any]]]) -> Samples:
    """Let the jobs take turns; in each repetition everybody is measured once, in another order."""
    left = {
        (job, index): wanted(request, facts["sample_seconds"])
        for job, contestants in enumerate(opened)
        for index, facts in enumerate(contestants)
    }
    samples: Samples = {place: [] for place in left}
    for repetition in range(max(left.values(), default=0)):
        for job in rotated(range(len(opened)), repetition):
            which = [index for index in range(len(opened[job])) if left[job, index] > repetition]
            if which:
                answer = turns.give(turns.workers[job], "measure", which=rotated(which, repetition))
                for sample in answer["samples"]:
                    samples[job, sample["index"]].append(sample)
    return samples


def _row(
    cluster: Cluster, nbytes: int, facts: dict[str, Any], taken: Sequence[dict[str, Any]], checked: bool
) -> dict[str, Any]:
    times = [sample["seconds"] for sample in taken]
    wrong = [words for sample in [facts, *taken] for words in sample["wrong"]]
    plan = facts["chosen"] or facts["algorithm"]
    predicted_s, bottleneck = cluster.predicted(plan, nbytes)
    sums = facts["algorithm"] != "noop"
    row = {
        "algorithm": facts["algorithm"],
        "chosen": facts["chosen"],
        "how": facts["how"],
        "ranks": cluster.ranks,
        "hosts": len(cluster.ranks_per_host),
        "ranks_per_host": cluster.ranks_per_host,
        "bytes": nbytes,
        "seconds_median": statistics.median(times),
        "seconds_min": min(times),
        "bound_seconds": cluster.bound_seconds(plan, nbytes) if sums else None,
        "bottleneck_bytes": bottleneck,
        "predicted_seconds": predicted_s,
        "correct": not wrong if checked else None,
        "segment_bytes": facts["segment_bytes"] or None,
        "calls_per_sample": facts["calls_per_sample"],
        "samples": times,
    }
    return {**row, "wrong": wrong[:1]} if wrong else row
