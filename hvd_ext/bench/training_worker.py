"""A rank that trains with hvd_ext: `LAUNCHER python -m hvd_ext.bench.training_worker FOLDER TASK`; Horovod's too."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hvd_ext.bench.sampling import Argument, Ranks, answer_turns
from hvd_ext.errors import HvdExtError

if TYPE_CHECKING:
    from hvd_ext.bench.training_model import Learner

# The contestant without communication: what a step takes on its own.
COMPUTE = "compute"
TRIAL_STEPS = 3
# Sums in another order may differ: an element of the first update may be so far from the average of the ranks' own
# updates, as a share of the largest element.
TOLERANCE = 1e-2


@dataclasses.dataclass(frozen=True)
class Task(Argument):
    """What the ranks of a job receive when they start.

    Attributes:
        environment: variables that are set before MPI starts.
        options: keywords of our optimizer, as texts.
    """

    model: str
    width: int
    batch: int
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def set_environment(self) -> None:
        """Set the variables for this process; MPI and Horovod read them when they start.

        A launcher may keep variables of the environment to itself, so they are set here, in the rank.
        """
        os.environ.update(self.environment)


SENT = "compression="


def named(algorithm: str, buckets: str = "", compression: str = "") -> str:
    """Name the contestant with this algorithm and these values of options, "" for none."""
    return "+".join(part for part in (algorithm, buckets, compression and SENT + compression) if part)


def parts_of(contestant: str) -> tuple[str, dict[str, str]]:
    """Give the algorithm and the options of a contestant that `named` has named."""
    algorithm, *options = contestant.split("+")
    return algorithm, {
        "compression" if option.startswith(SENT) else "buckets": option.removeprefix(SENT) for option in options
    }


# From the name of a contestant to its ways, by name, of which the fastest is kept.
Make = Callable[[str], "dict[str, Learner]"]


class Contest:
    """The models that train in one job; all ranks use it alike."""

    def __init__(self, plain: Learner, ranks: Ranks) -> None:
        """Take the first step of the model with the plain optimizer: its average is what the first update must be."""
        self._ranks = ranks
        self._before = plain.weights()
        self._first_loss = plain.step()
        self._first = ranks.average(plain.weights())
        self._learners, self._finite = [plain], [math.isfinite(self._first_loss)]
        starts = ranks.gather(_fingerprint(self._before))
        if len(set(starts)) > 1:
            raise HvdExtError(
                "weights: must be the same on all ranks at the start; the ranks run different versions of Keras"
            )
        self.start, self.first_losses = starts[0], ranks.gather(self._first_loss)
        self.facts: list[dict[str, Any]] = [{"algorithm": COMPUTE, "chosen": "", "way": "", "ways": {}, "wrong": []}]

    def enter(
        self, algorithm: str, ways: dict[str, Learner], chosen: Callable[[Learner], str], *, lossy: bool = False
    ) -> None:
        """Take the first steps of a contestant, and keep the fastest of its ways.

        Args:
            ways: models by the name of the way; the first step of each is checked.
            chosen: tells after the first step which algorithm runs.
            lossy: whether the first update need not be the average of the ranks' own.
        """
        wrong = [words for way in ways.values() for words in self._first_step(way, lossy)]
        seconds = dict.fromkeys(ways, 0.0)
        if len(ways) > 1:
            for _ in range(TRIAL_STEPS):
                for name, learner in ways.items():
                    seconds[name] += sum(self._timed(learner, 1)[0]) / TRIAL_STEPS
        best = min(ways, key=lambda name: seconds[name])
        fact = {"algorithm": algorithm, "chosen": chosen(ways[best]), "way": best, "wrong": wrong}
        self.facts.append({**fact, "ways": seconds if len(ways) > 1 else {}})
        self._learners.append(ways[best])
        self._finite.append(True)

    def layouts(self, laid_out: Callable[[Learner], dict[str, Any]]) -> list[dict[str, Any]]:
        """Give what is known of the buckets of each contestant now, by index; nothing of the plain model."""
        return [{}, *(laid_out(learner) for learner in self._learners[1:])]

    @property
    def parameters(self) -> int:
        """The number of trained weights."""
        return len(self._before)

    def measure(self, index: int, steps: int) -> list[float]:
        """Let a contestant train.

        Args:
            index: in the order of entry; 0 is the model that does not communicate.

        Returns:
            The seconds of each step on the rank that was slowest in it.
        """
        seconds, losses = self._timed(self._learners[index], steps)
        self._finite[index] &= all(math.isfinite(loss) for loss in losses)
        return seconds

    def check(self, index: int) -> list[str]:
        """Say what is wrong after the last step: all ranks must have the same weights, bit for bit."""
        weights = self._learners[index].weights()
        finite = self._finite[index] and bool(np.isfinite(weights).all())
        answers = self._ranks.gather((_fingerprint(weights), finite))
        wrong = [f"rank {rank}: a loss or a weight is not finite" for rank, (_, fine) in enumerate(answers) if not fine]
        others = [rank for rank, (seen, _) in enumerate(answers) if seen != answers[0][0]]
        if others:
            wrong.append(f"rank {others[0]}: its weights differ from those of rank 0 after the last step")
        return wrong

    def _timed(self, learner: Learner, steps: int) -> tuple[list[float], list[float]]:
        seconds, losses = [], []
        self._ranks.meet()
        begin = time.perf_counter()
        for _ in range(steps):
            losses.append(learner.step())
            end = time.perf_counter()
            seconds.append(end - begin)
            begin = end
        return [max(step) for step in zip(*self._ranks.gather(seconds), strict=True)], losses

    def _first_step(self, learner: Learner, lossy: bool) -> list[str]:
        begun = np.array_equal(learner.weights(), self._before)
        loss = learner.step()
        near = math.isclose(loss, self._first_loss, rel_tol=1e-5)
        update = self._first - self._before
        error = float(np.abs(learner.weights() - self._first).max())
        right = lossy or error <= TOLERANCE * float(np.abs(update).max())
        conditions = [
            (begun, "the model did not begin with the same weights"),
            (near, f"the loss of the first step is {loss:g}, must be {self._first_loss:g}"),
            (right, f"the first update is not the average of the ranks' own: a weight is off by {error:g}"),
        ]
        answers = self._ranks.gather([words for fine, words in conditions if not fine])
        return [f"rank {rank}: {words}" for rank, said in enumerate(answers) for words in said]


def _fingerprint(weights: NDArray[np.float32]) -> str:
    from hvd_ext.bench.training_model import fingerprint

    return fingerprint(weights)


def serve(
    folder: str,
    make: Make,
    chosen: Callable[[Learner], str] = lambda learner: "",
    laid_out: Callable[[Learner], dict[str, Any]] = lambda learner: {},
) -> None:
    """Train as the parent says; see `sampling.answer_turns`.

    Args:
        make: gives the ways of a contestant by its name; "compute" is the plain model, in one way.
        chosen: tells after the first step which algorithm runs.
        laid_out: tells after the last step which algorithm runs, and which buckets there are.
    """
    ranks = Ranks()
    contests: list[Contest] = []

    def answer(turn: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        if turn["kind"] == "open":
            (plain,) = make(COMPUTE).values()
            contests[:] = [contest := Contest(plain, ranks)]
            for algorithm in turn["algorithms"]:
                contest.enter(algorithm, make(algorithm), chosen, lossy="compression" in parts_of(algorithm)[1])
            begin = {"start": contest.start, "first_losses": contest.first_losses}
            return "opened", {"contestants": contest.facts, "bytes": 4 * contest.parameters, **begin}
        if turn["kind"] == "measure":
            seconds = [[index, contests[0].measure(index, turn["steps"])] for index in turn["which"]]
            return "measured", {"seconds": seconds}
        if turn["kind"] == "check":
            wrong = [contests[0].check(index) for index in range(1, len(contests[0].facts))]
            return "checked", {"wrong": [[], *wrong], "layouts": contests[0].layouts(laid_out)}
        return "ended", {}

    answer_turns(folder, ranks, answer)


def main(folder: str, text: str) -> None:
    """Serve the parent, which has written the task, with optimizers of hvd_ext as a user writes them."""
    task = Task.read(text)
    task.set_environment()
    import hvd_ext as hvd
    from hvd_ext.bench.training_model import Learner, batches
    from hvd_ext.keras.optimizers.optimizer import channels
    from hvd_ext.options.gradients import GradientOptions

    hvd.init()
    data = batches(hvd.rank(), hvd.size(), task.batch)

    def make(algorithm: str) -> dict[str, Learner]:
        if algorithm == COMPUTE:
            return {"": Learner(task.model, task.width, data)}
        name, options = parts_of(algorithm)
        parsed = GradientOptions.from_texts("bench training", {**task.options, **options})
        # what a codec sends has algorithms of its own
        keywords = {**parsed.keywords(), "algorithm": name if parsed.codec is None or name != "auto" else None}
        wrapped = functools.partial(hvd.DistributedOptimizer, **keywords)
        return {"": Learner(task.model, task.width, data, wrap=wrapped)}

    def chosen(learner: Learner) -> str:
        (channel,) = channels(learner.optimizer)
        largest = channel.layout.largest
        return largest.choice.algorithm if largest is not None and largest.choice is not None else ""

    def laid_out(learner: Learner) -> dict[str, Any]:
        (channel,) = channels(learner.optimizer)
        now = channel.layout
        return {"chosen": chosen(learner), "bucketer": now.bucketer, "buckets": len(now.buckets)}

    serve(folder, make, chosen, laid_out)
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
