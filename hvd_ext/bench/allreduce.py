"""The allreduce benchmark: our algorithms beside MPI_Allreduce and Horovod, repetition by repetition."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import psutil

from hvd_ext.bench.expected import Cluster
from hvd_ext.bench.jobs import (
    NO_HOROVOD,
    Launcher,
    Tell,
    Turns,
    caveats,
    check_choices,
    check_least,
    compare,
    has_horovod,
    samples_of,
)
from hvd_ext.bench.results import BASELINES, YARDSTICKS, ratios
from hvd_ext.bench.sampling import Task
from hvd_ext.errors import InvalidError

HOWS = ("graph", "engine", "eager")
DEFAULT = ("auto", "mpi", "horovod", *YARDSTICKS)
# The buffers of one size that a rank holds at the same time: with NumPy the input, the result and the engine's; with
# TensorFlow also a tensor and its result; with Horovod the values, a tensor, the fused buffer and a result.
NUMPY_BUFFERS, TENSORFLOW_BUFFERS, HOROVOD_BUFFERS = 3, 5, 4
# The yardstick `memory` has an input and a result of its own.
MEMORY_BUFFERS = 2
MOST_OF_MEMORY = 0.9


@dataclasses.dataclass(frozen=True)
class Request:
    """What to measure.

    Args:
        sizes: bytes of the float32 buffer, multiples of 4.
        algorithms: names of allreduce algorithms, "auto", "mpi", "horovod", "tcp", "memory"; nothing else is measured.
            The last two are the yardsticks of several hosts and of one, and of both the one that applies is measured.
        hows: how to call: "graph", "engine", "eager". Horovod knows the first and the last; MPI and the yardsticks are
            always called with NumPy buffers, which is named "engine".
        ranks: numbers of ranks on this host, one job of each after the other; empty where a launcher says it.
        seconds_per_row: long calls have fewer samples, at least 3, so that a row takes about that time.
        rate: bytes per second on the wire of each host, for the bound; None to take the topology's.

    Raises:
        InvalidError: a value breaks its rule.
    """

    sizes: tuple[int, ...]
    algorithms: tuple[str, ...] = DEFAULT
    hows: tuple[str, ...] = ("graph", "engine")
    ranks: tuple[int, ...] = ()
    repetitions: int = 30
    seconds_per_row: float = 8.0
    check: bool = True
    rate: float | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        from hvd_ext.planning import registry

        check_least(1, ranks=self.ranks)
        for nbytes in self.sizes:
            if nbytes < 4 or nbytes % 4:
                raise InvalidError(f"bytes ({nbytes}): must be a multiple of 4, the size of a float32, and at least 4")
        check_choices("algorithm", self.algorithms, ("auto", *registry.names(), *BASELINES))
        check_choices("how", self.hows, HOWS)
        check_least(1, repetitions=self.repetitions)
        for name, seconds in (("seconds per row", self.seconds_per_row), ("timeout", self.timeout_s)):
            if seconds <= 0:
                raise InvalidError(f"{name} ({seconds:g}): must be more than 0")
        if not (self.sizes and self.algorithms and self.hows):
            raise InvalidError("bytes, algorithms, how: each must name at least one value")

    @property
    def jobs(self) -> dict[str, str]:
        """The jobs that live at the same time: the modules that their ranks run, by name."""
        jobs = {"hvd_ext": "hvd_ext.bench.allreduce_worker"} if set(self.algorithms) - {"horovod"} else {}
        if "horovod" in self.algorithms and has_horovod():
            jobs["Horovod"] = "hvd_ext.bench.allreduce_horovod"
        return jobs

    def memory_of(self, nbytes: int) -> int:
        """Give the bytes that one rank of each job needs for buffers of a size, all jobs together."""
        ours = TENSORFLOW_BUFFERS if {"graph", "eager"} & set(self.hows) else NUMPY_BUFFERS
        copies = {"hvd_ext": ours, "Horovod": HOROVOD_BUFFERS}
        more = MEMORY_BUFFERS if "memory" in self.algorithms else 0
        return nbytes * (sum(copies[name] for name in self.jobs) + more)


def measure(request: Request, launcher: Launcher, tell: Tell) -> tuple[list[dict[str, Any]], list[str], str]:
    """Measure what was asked for.

    Returns:
        The rows, what else the user must know, and the YAML text of the topology (empty without one).

    Raises:
        InvalidError: there is nothing to measure.
        JobError: a job failed.
    """
    if not request.jobs:
        raise InvalidError(f"algorithms ({', '.join(request.algorithms)}): {NO_HOROVOD}")

    hows = {"hvd_ext": request.hows, "Horovod": tuple(how for how in request.hows if how != "engine") or ("graph",)}
    jobs = {name: (module, Task(hows[name], request.check)) for name, module in request.jobs.items()}
    rows, notes, topology = compare(
        request, launcher, jobs, lambda cluster, turns: _measured(request, cluster, turns, tell), tell
    )
    missing = [NO_HOROVOD] if "horovod" in request.algorithms and not has_horovod() else []
    return rows, missing + notes, topology


def _measured(request: Request, cluster: Cluster, turns: Turns, tell: Tell) -> tuple[list[dict[str, Any]], list[str]]:
    refused = {name: why for name in request.algorithms if (why := cluster.refusal(name)) is not None}
    ours = [name for name in request.algorithms if name not in refused and name != "horovod"]
    if set(ours) & set(YARDSTICKS):
        # the default names both, and one of them never applies
        refused = {name: why for name, why in refused.items() if name not in YARDSTICKS}
    notes = caveats(cluster, turns, refused, "its prices say nothing")
    rows = []
    for nbytes in request.sizes:
        # ranks that wait for their next turn still hold the buffers of the last size
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
        measured = with_dispatch(
            [_row(cluster, nbytes, opened[job][index], taken, request.check) for (job, index), taken in samples.items()]
        )
        rows += [{**row, "x_yardstick": ratios(row, measured)["yardstick"]} for row in measured]
        tell(f"{cluster.tree.describe()}, {nbytes:,} bytes", 1)
    return rows, notes


def with_dispatch(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to the price of a call in a graph what TensorFlow needs for a graph without communication.

    Args:
        rows: the rows of one cluster and size; the no-op is that graph, measured in turns with the others.
    """
    dispatch_s = next((row["seconds_median"] for row in rows if row["algorithm"] == "noop"), 0.0)
    return [
        {**row, "predicted_seconds": row["predicted_seconds"] + dispatch_s}
        if row["how"] == "graph" and row["predicted_seconds"] is not None
        else row
        for row in rows
    ]


def _row(
    cluster: Cluster, nbytes: int, facts: dict[str, Any], taken: Sequence[dict[str, Any]], checked: bool
) -> dict[str, Any]:
    times = [sample["seconds"] for sample in taken]
    processor_s = statistics.fmean(sample["processor_seconds"] for sample in taken)
    wrong = [words for sample in [facts, *taken] for words in sample["wrong"]]
    plan = facts["chosen"] or facts["algorithm"]
    predicted_s, bottleneck = cluster.predicted(plan, nbytes, facts["how"])
    sums = facts["algorithm"] != "noop"
    row = {
        "algorithm": facts["algorithm"],
        "chosen": facts["chosen"],
        "how": facts["how"],
        **cluster.place,
        "bytes": nbytes,
        "seconds_median": statistics.median(times),
        "seconds_min": min(times),
        "processor_seconds_per_call": processor_s,
        "processor_seconds_per_gb": processor_s / nbytes * 1e9,
        "bound_seconds": cluster.bound_seconds(plan, nbytes) if sums else None,
        "bottleneck_bytes": bottleneck,
        "predicted_seconds": predicted_s,
        "correct": not wrong if checked else None,
        "segment_bytes": facts["segment_bytes"] or None,
        "calls_per_sample": facts["calls_per_sample"],
        "samples": times,
    }
    return {**row, "wrong": wrong[:1]} if wrong else row
