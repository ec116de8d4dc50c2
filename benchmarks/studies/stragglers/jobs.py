"""The straggler benchmark: training with ranks that are late, with each way to begin a step, in turns with Horovod."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.studies.stragglers.worker import AUTO, DELAY, FULL, MODES, STALENESS, Task
from benchmarks.studies.stragglers.workloads import WORKLOADS
from hvd_ext.bench.expected import Cluster
from hvd_ext.bench.jobs import (
    NO_HOROVOD,
    Launcher,
    Tell,
    Turns,
    Worker,
    caveats,
    check_choices,
    check_least,
    compare,
    has_horovod,
    rotated,
)
from hvd_ext.errors import InvalidError
from hvd_ext.simulation.rounds import Rules, active, play, staleness

HOROVOD = "horovod"
DEFAULT = (FULL, "solo", "majority", "quorum", AUTO, HOROVOD)
# Steps of each turn before the timed ones: all ranks begin together, and the bound makes a rank wait only after these.
LEAD = STALENESS + 1
# Steps of "auto" before all others: it begins as "full" and chooses a quorum after 100 rounds (gradients/quorum.py).
# They sleep as other steps than the timed ones do.
CHOOSING, CHOOSING_FROM = 100, 1_000_000

Seconds = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Request:
    """What to measure.

    Args:
        workloads: names of `stragglers_workloads.WORKLOADS`.
        modes: of `worker.MODES`, and "horovod"; "full" is measured always.
        steps: timed steps of each mode.
        repetitions: turns among which the steps are divided; each has a few more steps.
        ranks: numbers of ranks on this host, one comparison of each after the other; empty where a launcher says it.
        seed: of the data and of the sleeps.
        timeout_s: longest time without an answer of a job.
        rate: of the links, which nothing here depends on.

    Raises:
        InvalidError: a value breaks its rule.
    """

    workloads: tuple[str, ...] = tuple(WORKLOADS)
    modes: tuple[str, ...] = DEFAULT
    steps: int = 64
    repetitions: int = 2
    ranks: tuple[int, ...] = ()
    seed: int = 1
    timeout_s: float = 600.0
    rate: float | None = None

    def __post_init__(self) -> None:
        for name, values, valid in (
            ("workload", self.workloads, tuple(WORKLOADS)),
            ("mode", self.modes, (*MODES, HOROVOD)),
        ):
            check_choices(name, values, valid)
            if not values:
                raise InvalidError(f"{name}s (none): must name at least one")
        check_least(2, ranks=self.ranks)
        check_least(1, repetitions=self.repetitions)
        check_least(self.repetitions, ", one for each repetition", steps=self.steps)
        check_least(0, seed=self.seed)
        if self.timeout_s <= 0:
            raise InvalidError(f"timeout ({self.timeout_s:g}): must be more than 0")

    @property
    def ours(self) -> tuple[str, ...]:
        """Our modes, "full" first."""
        return (FULL, *(mode for mode in self.modes if mode not in (FULL, HOROVOD)))

    def first_of(self, repetition: int) -> int:
        """Give the number of timed steps before those of a turn, counted from 0."""
        return self.steps * repetition // self.repetitions


@dataclasses.dataclass(frozen=True)
class Sample:
    """A turn of a mode, as `worker.Race.measure` tells it: `LEAD` steps, then those that count.

    Attributes:
        over_s: when each step was over, seconds since the begin [steps].
        slept_s: how long each rank slept before it [ranks, steps].
        rounds: see `worker.Contestant.rounds`.
    """

    over_s: Seconds
    slept_s: Seconds
    rounds: Mapping[str, Any] | None

    @classmethod
    def told(cls, answer: Mapping[str, Any]) -> Sample:
        """Read an answer of a job."""
        return cls(np.array(answer["over_s"]), np.array(answer["slept_s"]), answer["rounds"])

    @property
    def steps_s(self) -> Seconds:
        """The times of the steps that count."""
        return np.diff(self.over_s)[LEAD - 1 :]

    @property
    def beyond_s(self) -> Seconds:
        """What each step that counts takes beyond its longest sleep."""
        return np.asarray(self.steps_s - self.slept_s.max(0)[LEAD:])


@dataclasses.dataclass(frozen=True)
class Model:
    """What rounds are played with beside the times that the ranks slept, seconds.

    Attributes:
        undelayed_s: of a step of "full", beyond its longest sleep; a round is in it.
        round_s: of a round.
    """

    undelayed_s: float
    round_s: float

    @classmethod
    def of(cls, samples: Mapping[str, Sequence[Sample]]) -> Model:
        """Take the times from the turns of all modes; of the quicker rounds, because in others a rank was busy."""
        undelayed_s = statistics.median(time_s for sample in samples[FULL] for time_s in sample.beyond_s)
        rounds = [sample.rounds["round_s"] for some in samples.values() for sample in some if sample.rounds]
        round_s = float(np.quantile(np.concatenate(rounds), 0.25)) if rounds else 0.0
        return cls(max(undelayed_s, 0.0), min(round_s, max(undelayed_s, 0.0)))

    def played(self, mode: str, sample: Sample) -> tuple[float, float]:
        """Play a turn.

        Returns:
            The seconds of all steps that count, and how many ranks are active in the mean.
        """
        rounds = sample.rounds
        rules = Rules(delay=int(mode == DELAY))
        if rounds:
            rules = Rules(rounds["mode"], rounds["quorum"], STALENESS, rounds["seed"], rounds["before"])
        found = play(sample.slept_s + (self.undelayed_s - self.round_s), rules, self.round_s)
        over_s = found.ends_s.min(0)
        return float(over_s[-1] - over_s[LEAD - 1]), float(active(found.arrived)[LEAD:].mean())


def measure(request: Request, launcher: Launcher, tell: Tell) -> tuple[list[dict[str, Any]], list[str], str]:
    """Measure what was asked for.

    Args:
        request: what to measure.
        launcher: how to start the jobs.
        tell: takes what runs now, and the number of workloads that are just done.

    Returns:
        The rows, what else the user must know, and the YAML text of the topology (empty without one).

    Raises:
        JobError: a job failed.
    """
    theirs = HOROVOD in request.modes and has_horovod()
    missing = [NO_HOROVOD] if HOROVOD in request.modes and not theirs else []

    jobs = {"hvd_ext": ("benchmarks.studies.stragglers.worker", Task(request.seed))}
    if theirs:
        jobs[HOROVOD] = ("benchmarks.studies.stragglers.horovod", Task(request.seed))
    rows, notes, topology = compare(
        request, launcher, jobs, lambda cluster, turns: _measured(request, cluster, turns, tell), tell
    )
    return rows, missing + notes, topology


def _measured(request: Request, cluster: Cluster, turns: Turns, tell: Tell) -> tuple[list[dict[str, Any]], list[str]]:
    rows = []
    names = {worker.name: request.ours if worker.name != HOROVOD else (HOROVOD,) for worker in turns.workers}
    for workload in request.workloads:
        for worker in turns.workers:
            tell(f"{cluster.tree.describe()}, {workload}, {worker.name}: first steps", 0)
            turns.give(worker, "open", workload=workload, contestants=names[worker.name])
        samples = _samples(request, cluster, turns, names, workload, tell)
        ended: dict[str, Any] = {}
        for worker in turns.workers:
            found = turns.give(worker, "check", count=len(names[worker.name]))["contestants"]
            ended |= zip(names[worker.name], found, strict=True)
        place = {
            "workload": workload,
            "ranks": cluster.ranks,
            "hosts": len(cluster.ranks_per_host),
            "ranks_per_host": cluster.ranks_per_host,
            "seed": request.seed,
            "staleness": STALENESS,
        }
        rows += rows_of(place, samples, ended)
        tell(f"{cluster.tree.describe()}, {workload}", 1)
    return rows, caveats(cluster, turns, {}, "auto may choose badly")


def _samples(
    request: Request,
    cluster: Cluster,
    turns: Turns,
    names: Mapping[str, Sequence[str]],
    workload: str,
    tell: Tell,
) -> dict[str, list[Sample]]:
    """Let the modes take turns; all modes sleep alike in a turn."""

    def given(worker: Worker, mode: str, first: int, steps: int) -> Sample:
        tell(f"{cluster.tree.describe()}, {workload}, {mode}", 0)
        index = names[worker.name].index(mode)
        return Sample.told(turns.give(worker, "measure", index=index, first=first, steps=steps))

    places = [(worker, mode) for worker in turns.workers for mode in names[worker.name]]
    for worker, mode in places:
        if mode == AUTO:
            given(worker, mode, CHOOSING_FROM, CHOOSING)
    samples: dict[str, list[Sample]] = {mode: [] for _, mode in places}
    for repetition in range(request.repetitions):
        first = request.first_of(repetition)
        for worker, mode in rotated(places, repetition):
            count = request.first_of(repetition + 1) - first
            samples[mode].append(given(worker, mode, first + LEAD * repetition, LEAD + count))
    return samples


def rows_of(
    place: Mapping[str, Any], samples: Mapping[str, Sequence[Sample]], ended: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Make the rows of a workload, which are compared with each other.

    Args:
        place: what the rows share.
        samples: the turns of each mode; "full" is one of them.
        ended: the loss of each mode on the validation data, and what was wrong.

    Returns:
        The rows. In each x_full and x_horovod say how many times as fast it is, x_full_played the same of the rounds as
        they are played, and x_played is the first over the last. losses are x_full of losses.
    """
    model = Model.of(samples)
    means_s = {mode: float(np.mean(np.concatenate([one.steps_s for one in some]))) for mode, some in samples.items()}
    played_s, active = {}, {}
    for mode, some in samples.items():
        found = [model.played(mode, sample) for sample in some]
        played_s[mode] = sum(time_s for time_s, _ in found) / sum(len(sample.steps_s) for sample in some)
        active[mode] = statistics.fmean(ranks for _, ranks in found)
    rows = []
    for mode, some in samples.items():
        steps_s = np.concatenate([sample.steps_s for sample in some])
        x_full = means_s[FULL] / means_s[mode]
        x_full_played = None if mode == HOROVOD else played_s[FULL] / played_s[mode]
        row = {
            **place,
            "mode": mode,
            "steps": len(steps_s),
            "step_seconds_mean": means_s[mode],
            "step_seconds_median": statistics.median(steps_s),
            "slept_seconds_mean": float(np.mean([sample.slept_s[:, LEAD:].mean() for sample in some])),
            "undelayed_seconds": model.undelayed_s,
            "round_seconds": model.round_s,
            "played_seconds_mean": None if mode == HOROVOD else played_s[mode],
            "x_full": x_full,
            "x_horovod": means_s[HOROVOD] / means_s[mode] if HOROVOD in samples else None,
            "x_full_played": x_full_played,
            "x_played": None if x_full_played is None else x_full / x_full_played,
            **_rounds(some),
            "active_ranks_played": active[mode] if some[0].rounds else None,
            "loss": ended[mode]["loss"],
            "loss_over_full": ended[mode]["loss"] / ended[FULL]["loss"],
            "correct": not ended[mode]["wrong"],
            "samples": steps_s.tolist(),
        }
        rows.append({**row, "wrong": ended[mode]["wrong"][:1]} if ended[mode]["wrong"] else row)
    return rows


def _rounds(samples: Sequence[Sample]) -> dict[str, Any]:
    """Sum up who was on time; nothing where all ranks are."""
    told = [sample.rounds for sample in samples if sample.rounds]
    if not told:
        return {"quorum": None, "active_ranks": None, "stale_gradients": None}
    arrived = [np.array(rounds["arrived"]) for rounds in told]
    counts = [staleness(one) for one in arrived]
    longest = max(len(one) for one in counts)
    return {
        "quorum": [rounds["quorum"] for rounds in told] if told[0]["mode"] == "quorum" else None,
        "active_ranks": statistics.fmean(float(active(one)[LEAD:].mean()) for one in arrived),
        "stale_gradients": np.sum([np.pad(one, (0, longest - len(one))) for one in counts], 0).tolist(),
    }
