"""The schedule benchmark: a model's step is replayed with each way to divide its gradients into buckets, in turns."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.studies.schedule.worker import AUTO, DELAY, SINGLE
from hvd_ext.bench.expected import Cluster
from hvd_ext.bench.jobs import Launcher, Tell, Turns, caveats, check_choices, check_least, compare, samples_of
from hvd_ext.bench.sampling import Task
from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    from hvd_ext.planning.step_times import StepTimes

DEFAULT = (AUTO, "wfbp", SINGLE, "by_size", "mgwfbp", "optimal")
# The times of the file as they are, in place of a ratio.
AS_TOLD = 0.0


@dataclasses.dataclass(frozen=True)
class Request:
    """What to measure.

    Args:
        models: files of models (`planning.step_times`), or names of `planning.models`.
        bucketers: names of bucketers, "auto", and "delay": the buckets of "auto", with steps that take the results of
            the steps before them.
        scale: every tensor has this part of its elements, rounded up.
        ratios: of the time of all gradients in one bucket, measured alone, to the time of computing; the model's
            times are multiplied so that it comes out. `AS_TOLD` takes the times as they are.
        algorithm: the name of an allreduce algorithm for all buckets, or "auto".
        ranks: numbers of ranks on this host, one comparison of each after the other; empty where a launcher says it.
        repetitions: the most samples of a row, each of one step.
        seconds_per_row: long steps have fewer samples, at least 3, so that a row takes about so long.
        rate: bytes per second on the wire of each host, for the bound; None to take the topology's.
        timeout_s: longest time without an answer of a job.

    Raises:
        InvalidError: a value breaks its rule.
    """

    models: tuple[str, ...]
    bucketers: tuple[str, ...] = DEFAULT
    scale: float = 1.0
    ratios: tuple[float, ...] = (1.0,)
    algorithm: str = AUTO
    ranks: tuple[int, ...] = ()
    repetitions: int = 10
    seconds_per_row: float = 8.0
    rate: float | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        from hvd_ext.planning import buckets, registry

        free = [name for name in buckets.names() if name != "by_groups"]  # it follows a user's wishes
        check_choices("bucketer", self.bucketers, (AUTO, *free, DELAY))
        check_choices("algorithm", (self.algorithm,), (AUTO, *registry.names()))
        if not (self.models and self.bucketers and self.ratios):
            raise InvalidError("models, bucketers, ratios: each must name at least one value")
        if not 0 < self.scale <= 1:
            raise InvalidError(f"scale ({self.scale:g}): must be above 0 and at most 1")
        for ratio in self.ratios:
            if not 0 <= ratio < float("inf"):
                raise InvalidError(f"ratio ({ratio:g}): must be a number above 0, or 0 for the times of the model")
        check_least(1, ranks=self.ranks, repetitions=self.repetitions)
        for name, seconds in (("seconds per row", self.seconds_per_row), ("timeout", self.timeout_s)):
            if seconds <= 0:
                raise InvalidError(f"{name} ({seconds:g}): must be more than 0")


def model_of(text: str, scale: float) -> StepTimes:
    """Read a model.

    Args:
        text: the path of a file, or a name of `planning.models`.
        scale: every tensor has this part of its elements, rounded up.

    Returns:
        The model, whose tensors have one dimension.

    Raises:
        InvalidError: there is no such file, and no model of this name.
        PlanError: the file is wrong; the message names the line.
    """
    from hvd_ext.planning import models, step_times

    if text in models.MODELS:
        times = models.times_of(text)
    elif Path(text).exists():
        times = step_times.read(text)
    else:
        raise InvalidError(f"model ({text!r}): there is no such file; or say one of {', '.join(models.MODELS)}")
    tensors = tuple(dataclasses.replace(tensor, shape=(_part(tensor.elements, scale),)) for tensor in times.tensors)
    return dataclasses.replace(times, tensors=tensors)


def _part(elements: int, scale: float) -> int:
    return -int(-elements * scale // 1)


def measure(request: Request, launcher: Launcher, tell: Tell) -> tuple[list[dict[str, Any]], list[str], str]:
    """Measure what was asked for.

    Args:
        request: what to measure.
        launcher: how to start the job.
        tell: takes what runs now, and the number of pairs of model and ratio that have just become ready.

    Returns:
        The rows, what else the user must know, and the YAML text of the topology (empty without one).

    Raises:
        InvalidError: a model is not there.
        PlanError: the file of a model is wrong.
        JobError: the job failed.
    """
    models = {name: model_of(name, request.scale) for name in request.models}
    jobs = {"hvd_ext": ("benchmarks.studies.schedule.worker", Task(("engine",)))}
    return compare(
        request, launcher, jobs, lambda cluster, turns: _measured(request, models, cluster, turns, tell), tell
    )


def _measured(
    request: Request, models: dict[str, StepTimes], cluster: Cluster, turns: Turns, tell: Tell
) -> tuple[list[dict[str, Any]], list[str]]:
    if (why := cluster.refusal(request.algorithm)) is not None:
        raise InvalidError(f"algorithm ({request.algorithm}): it does not apply to {cluster.tree.describe()}: {why}")
    (worker,) = turns.workers
    rows = []
    for name, times in models.items():
        tell(f"{cluster.tree.describe()}, {name}: communication alone", 0)
        told = {
            "tensors": [[tensor.name, tensor.elements] for tensor in times.tensors],
            "ready_s": times.ready_s,
            "forward_s": times.forward_s,
            "update_s": times.update_s,
        }
        alone_s = turns.give(worker, "model", times=told, algorithm=request.algorithm)["seconds"]
        for ratio in request.ratios:
            tell(f"{cluster.tree.describe()}, {name}, ratio {ratio:g}", 0)
            computing_s = times.computed_s + (times.update_s or 0.0)
            factor = 1.0 if ratio == AS_TOLD else alone_s / ratio / computing_s
            opened = turns.give(worker, "open", factor=factor, bucketers=request.bucketers)["contestants"]
            # a layout is measured once, whoever has found it
            replays = {facts["replay"]: facts for facts in reversed(opened)}
            samples = samples_of(request, turns, [[replays[number] for number in sorted(replays)]])
            place = {
                "model": Path(name).stem,
                "scale": request.scale,
                "ratio": ratio or alone_s / computing_s,
                "algorithm": request.algorithm,
                "ranks": cluster.ranks,
                "hosts": len(cluster.ranks_per_host),
                "ranks_per_host": cluster.ranks_per_host,
                "tensors": len(times.tensors),
                "bytes": sum(tensor.nbytes for tensor in times.tensors),
                "communication_seconds": alone_s,
                "bound_seconds": cluster.bound_seconds(
                    request.algorithm, sum(tensor.nbytes for tensor in times.tensors)
                ),
            }
            rows += beside([_row(place, facts, samples[0, facts["replay"]]) for facts in opened])
            tell(f"{cluster.tree.describe()}, {name}, ratio {ratio:g}", 1)
    return rows, caveats(cluster, turns, {}, "its predictions say nothing")


def _row(place: dict[str, Any], facts: dict[str, Any], taken: Sequence[dict[str, Any]]) -> dict[str, Any]:
    times = [sample["seconds"] for sample in taken]
    wrong = [words for sample in [facts, *taken] for words in sample["wrong"]]
    median_s, compute_s = statistics.median(times), facts["compute_seconds"]
    row = {
        **place,
        **{name: facts[name] for name in ("bucketer", "chosen", "replay", "buckets", "algorithms")},
        "compute_seconds": compute_s,
        "predicted_seconds": facts["predicted_seconds"],
        "seconds_median": median_s,
        "seconds_min": min(times),
        "x_predicted": median_s / facts["predicted_seconds"],
        "exposed_seconds": median_s - compute_s,
        "late_seconds": statistics.median(sample["late_seconds"] for sample in taken),
        "late_seconds_p99": max(sample["late_seconds_p99"] for sample in taken),
        "correct": not wrong,
        "samples": times,
    }
    return {**row, "wrong": wrong[:1]} if wrong else row


def beside(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare the rows of one cluster, model and ratio with each other.

    Returns:
        The rows, each with x_best, its step over that of the fastest bucketer but "auto" and "delay", and x_single, the
        step of "single" over its own, above 1 is faster; None where that was not measured.
    """
    steps = {row["bucketer"]: row["seconds_median"] for row in rows}
    best_s = min((step_s for name, step_s in steps.items() if name not in (AUTO, DELAY)), default=None)
    single_s = steps.get(SINGLE)
    return [
        {
            **row,
            "x_best": None if best_s is None else row["seconds_median"] / best_s,
            "x_single": None if single_s is None else single_s / row["seconds_median"],
        }
        for row in rows
    ]
