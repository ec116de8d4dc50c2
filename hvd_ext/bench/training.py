"""The training benchmark: a Keras model trained with our algorithms and with Horovod, in turns."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

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
    rotated,
)
from hvd_ext.bench.training_worker import COMPUTE, Task, named, parts_of
from hvd_ext.errors import InvalidError
from hvd_ext.options.gradients import GradientOptions
from hvd_ext.runner.launcher import JobError

WIDTHS = {"mlp": 1024, "cnn": 512, "small-160": 32, "small-1000": 32, "deep-60": 40}
HOROVOD = "horovod"
# The variables of a job by name; each name is a job of its own. Autotune gets a few samples of two steps each; its
# defaults take hundreds of steps.
HOROVODS: dict[str, dict[str, str]] = {
    HOROVOD: {},
    "horovod-links2": {"OMPI_MCA_btl_tcp_links": "2"},
    "horovod-autotune": {
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "2",
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "8",
    },
}
STRATEGY = "multiworker"
PEERS = (*HOROVODS, STRATEGY)
NO_STRATEGY = (
    "tf_keras is not installed and MultiWorkerMirroredStrategy was not measured (python -m pip install tf_keras)"
)
DEFAULT = ("auto", HOROVOD, "horovod-links2")


@dataclasses.dataclass(frozen=True)
class Request:
    """What to measure.

    Args:
        algorithms: names of allreduce algorithms, "auto", and those of `PEERS`; nothing else is measured.
        model: "mlp", "cnn", "small-160", "small-1000" or "deep-60".
        width: units of a hidden dense layer; 0 for the model's own.
        steps: timed steps of each contestant.
        repetitions: turns among which the steps are divided.
        ranks: numbers of ranks on this host, one comparison of each after the other; empty where a launcher says it.
        rate: bytes per second on the wire of each host, for the bound; None to take the topology's.
        options: keywords of our `DistributedOptimizer` as texts, such as compression=bf16; Horovod's gets none.
        buckets: values of the option `buckets`; each of our algorithms is measured with each of them. Empty: only with
            that of the options.
        compressions: the same of the option `compression`.
        warmup: steps of each contestant before the timed ones; ours may change their buckets after 20 and 200 steps,
            and may change them back 20 steps later, and Horovod's autotune needs some.

    Raises:
        InvalidError: a value breaks its rule.
    """

    algorithms: tuple[str, ...] = DEFAULT
    model: str = "mlp"
    width: int = 0
    batch: int = 64
    steps: int = 10
    repetitions: int = 5
    ranks: tuple[int, ...] = ()
    rate: float | None = None
    timeout_s: float = 600.0
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    buckets: tuple[str, ...] = ()
    compressions: tuple[str, ...] = ()
    warmup: int = 0

    def __post_init__(self) -> None:
        from hvd_ext.planning import registry

        check_choices("algorithm", self.algorithms, ("auto", *registry.names(), *PEERS))
        check_choices("model", (self.model,), WIDTHS)
        if not self.algorithms:
            raise InvalidError("algorithms (none): must name at least one")
        check_least(1, ranks=self.ranks, batch=self.batch, repetitions=self.repetitions)
        check_least(0, width=self.width, warmup=self.warmup)
        check_least(self.repetitions, ", one for each repetition", steps=self.steps)
        if "algorithm" in self.options:
            raise InvalidError("option algorithm: say --algorithms, which compares them")
        for option, listed, values in (
            ("buckets", "--buckets", self.buckets),
            ("compression", "--compressions", self.compressions),
        ):
            check_choices(option, values, values)
            if values and option in self.options:
                raise InvalidError(f"option {option}: say {listed}, which compares them")
        for name in self.ours:
            GradientOptions.from_texts("bench training", {**self.options, **parts_of(name)[1]})
        if self.timeout_s <= 0:
            raise InvalidError(f"timeout ({self.timeout_s:g}): must be more than 0")

    def steps_of(self, repetition: int) -> int:
        """Give the number of steps of one turn, counted from 0; all turns together have `steps`."""
        return self.steps * (repetition + 1) // self.repetitions - self.steps * repetition // self.repetitions

    @property
    def ours(self) -> tuple[str, ...]:
        """The contestants that are ours: algorithms, each with each of the values of options (`named`)."""
        names = [name for name in self.algorithms if name not in PEERS]
        pairs = list(itertools.product(self.buckets or ("",), self.compressions or ("",)))
        return tuple(named(name, buckets=buckets, compression=sent) for name in names for buckets, sent in pairs)


def measure(request: Request, launcher: Launcher, tell: Tell) -> tuple[list[dict[str, Any]], list[str], str]:
    """Measure what was asked for.

    Returns:
        The rows, what else the user must know, and the YAML text of the topology (empty without one).

    Raises:
        InvalidError: there is nothing to measure, or scikit-learn with its digits is not installed.
        JobError: a job failed, or the jobs did not train the same.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise InvalidError("digits (scikit-learn): it is not installed; python -m pip install scikit-learn")
    theirs = [name for name in request.algorithms if name in HOROVODS and has_horovod()]
    missing = [NO_HOROVOD] if set(HOROVODS) & set(request.algorithms) and not theirs else []
    strategy = STRATEGY in request.algorithms and importlib.util.find_spec("tf_keras") is not None
    if STRATEGY in request.algorithms and not strategy:
        missing.append(NO_STRATEGY)
    if not request.ours and not theirs and not strategy:
        raise InvalidError(f"algorithms ({', '.join(request.algorithms)}): {'; '.join(missing)}")

    task = Task(request.model, request.width or WIDTHS[request.model], request.batch, options=request.options)
    jobs = {"hvd_ext": ("hvd_ext.bench.training_worker", task)} if request.ours else {}
    for name in theirs:
        jobs[name] = ("hvd_ext.bench.training_horovod", dataclasses.replace(task, environment=HOROVODS[name]))
    if strategy:
        jobs[STRATEGY] = ("hvd_ext.bench.training_strategy", task)
    rows, notes, topology = compare(
        request, launcher, jobs, lambda cluster, turns: _measured(request, cluster, turns, tell), tell
    )
    return rows, missing + notes, topology


def _measured(request: Request, cluster: Cluster, turns: Turns, tell: Tell) -> tuple[list[dict[str, Any]], list[str]]:
    refused = {name: why for name in request.ours if (why := cluster.refusal(parts_of(name)[0])) is not None}
    ours = [name for name in request.ours if name not in refused]
    notes = caveats(cluster, turns, refused, "auto may choose badly")
    opened = []
    for worker in turns.workers:
        names = [worker.name] if worker.name in PEERS else ours
        tell(f"{cluster.tree.describe()}, {worker.name}: first steps", 0)
        opened.append(turns.give(worker, "open", algorithms=names))
    check_alike([worker.name for worker in turns.workers], opened)
    for worker, answer in zip(turns.workers, opened, strict=True):
        for index in range(1, len(answer["contestants"]) if request.warmup else 0):
            tell(f"{cluster.tree.describe()}, {worker.name}: warm-up", 0)
            turns.give(worker, "measure", which=[index], steps=request.warmup)
    samples = _samples(request, cluster, turns, opened, tell)
    ended = [turns.give(worker, "check") for worker in turns.workers]
    compute = statistics.median(samples[0, 0])
    rows = []
    for (job, index), times in samples.items():
        facts = opened[job]["contestants"][index]
        facts |= ended[job]["layouts"][index]
        faults = [*facts["wrong"], *ended[job]["wrong"][index]]
        rows.append(_row(request, cluster, opened[job]["bytes"], facts, times, compute, faults))
    return against(rows), notes


def check_alike(names: Sequence[str], opened: Sequence[dict[str, Any]]) -> None:
    """Check that all jobs train the same model from the same weights.

    Raises:
        JobError: the models, the weights that they begin with, or the losses of the first step differ.
    """
    first = opened[0]
    for name, other in zip(names[1:], opened[1:], strict=True):
        for what in ("bytes", "start"):
            if other[what] != first[what]:
                raise JobError(f"{name}: its model must begin as that of {names[0]}; {what}: {other[what]}")
        for rank, (loss, theirs) in enumerate(zip(first["first_losses"], other["first_losses"], strict=True)):
            if not math.isclose(loss, theirs, rel_tol=1e-5):
                raise JobError(
                    f"{name}: the loss of the first step of rank {rank} is {theirs:g}, {names[0]} has {loss:g}"
                )


def _samples(
    request: Request,
    cluster: Cluster,
    turns: Turns,
    opened: Sequence[dict[str, Any]],
    tell: Tell,
) -> dict[tuple[int, int], list[float]]:
    """Let the jobs take turns; the model without communication is measured in the first job alone."""
    places = [range(0 if job == 0 else 1, len(answer["contestants"])) for job, answer in enumerate(opened)]
    samples: dict[tuple[int, int], list[float]] = {
        (job, index): [] for job, which in enumerate(places) for index in which
    }
    for repetition in range(request.repetitions):
        for job in rotated(range(len(opened)), repetition):
            tell(f"{cluster.tree.describe()}, {turns.workers[job].name}", 0)
            which, steps = rotated(places[job], repetition), request.steps_of(repetition)
            for index, seconds in turns.give(turns.workers[job], "measure", which=which, steps=steps)["seconds"]:
                samples[job, index] += seconds
        tell(cluster.tree.describe(), 1)
    return samples


def _row(
    request: Request,
    cluster: Cluster,
    nbytes: int,
    facts: dict[str, Any],
    times: Sequence[float],
    compute_s: float,
    wrong: Sequence[str],
) -> dict[str, Any]:
    alone = facts["algorithm"] == COMPUTE
    median = statistics.median(times)
    row = {
        "algorithm": facts["algorithm"],
        "chosen": facts["chosen"] or facts["way"],
        "model": request.model,
        "width": request.width or WIDTHS[request.model],
        "batch": request.batch,
        **cluster.place,
        "bytes": nbytes,
        "samples_per_second": cluster.ranks * request.batch / median,
        "step_seconds_median": median,
        "step_seconds_min": min(times),
        "compute_seconds": compute_s,
        "exposed_communication_seconds": None if alone else median - compute_s,
        "bound_seconds": None if alone else cluster.bound_seconds(facts["chosen"], nbytes),
        "correct": None if alone else not wrong,
        "samples": list(times),
    }
    if "buckets" in facts:
        row |= {"bucketer": facts["bucketer"], "buckets": facts["buckets"]}
    if facts["ways"]:
        row["trial_seconds"] = facts["ways"]
    return {**row, "wrong": wrong[:1]} if wrong else row


def against(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare the rows of one cluster with Horovod's.

    Returns:
        The rows, each with against_horovod and against_horovod_links2: its samples per second over Horovod's, above 1
        is faster; None if Horovod was not measured, and for the model that does not communicate.
    """
    speeds = {row["algorithm"]: row["samples_per_second"] for row in rows}

    def over(row: dict[str, Any], name: str) -> float | None:
        return row["samples_per_second"] / speeds[name] if name in speeds and row["algorithm"] != COMPUTE else None

    fields = {name: f"against_{name.replace('-', '_')}" for name in HOROVODS}
    return [{**row, **{field: over(row, name) for name, field in fields.items()}} for row in rows]
