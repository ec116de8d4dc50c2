"""One rank that trains and is late: `LAUNCHER python -m benchmarks.studies.stragglers.worker FOLDER TASK`.

A linear model learns the coefficients of a hyperplane in a compiled training step of our own. Before each step the rank
sleeps as the workload says, so that what is uneven takes no core from the ranks that share it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.studies.stragglers.workloads import WORKLOADS, Workload
from hvd_ext.bench.sampling import FIRST_SLEEP_S, Argument, Ranks, answer_turns

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

FULL, AUTO, DELAY = "full", "auto", "delay"
# In the order in which they are shown; "quorum" waits for half of the ranks, "delay" is full with delay=1.
MODES = (FULL, "solo", "majority", "quorum", AUTO, DELAY)
STALENESS = 4
RATE = 0.03
NOISE = 0.5  # the standard deviation of what the hyperplane does not explain; the coefficients explain 1
BATCHES, VALIDATED = 16, 2048
# When a contestant enters: buckets may change after 20 steps, which takes time. What "auto" sees of its first 100 steps
# shall be delayed.
UNDELAYED_STEPS = 24
AUTO_UNDELAYED_STEPS = 1


@dataclasses.dataclass(frozen=True)
class Task(Argument):
    """What the ranks of a job are told when they start.

    Attributes:
        seed: of the data and of the sleeps.
        environment: variables that are set before MPI starts.
    """

    seed: int
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def set_environment(self) -> None:
        """Set the variables for this process; MPI and Horovod read them when they start."""
        os.environ.update(self.environment)


def keywords_of(mode: str, ranks: int) -> dict[str, Any]:
    """Give the keywords of `DistributedOptimizer` for one of `MODES`."""
    if mode in (FULL, DELAY):
        return {"sync": FULL, "delay": int(mode == DELAY)}
    return {"sync": mode, "staleness": STALENESS} | ({"quorum": max(1, ranks // 2)} if mode == "quorum" else {})


@dataclasses.dataclass(frozen=True)
class Hyperplane:
    """What is learnt: y = a x + noise, with x and a drawn from normal distributions, and a of length 1.

    Attributes:
        batches: inputs float32 [batch, dimensions] and labels float32 [batch, 1] of a rank, taken again and again.
        validation: the same of all ranks, not trained.
    """

    batches: Sequence[tuple[tf.Tensor, tf.Tensor]]
    validation: tuple[tf.Tensor, tf.Tensor]

    @classmethod
    def of(cls, seed: int, rank: int, dimensions: int, batch: int) -> Hyperplane:
        """Draw the data of a rank, `batch` examples of it in a step."""
        import tensorflow as tf

        true = np.random.default_rng(seed).standard_normal((dimensions, 1), np.float32)
        true /= np.linalg.norm(true)

        def drawn(random: np.random.Generator, count: int) -> tuple[tf.Tensor, tf.Tensor]:
            x = random.standard_normal((count, dimensions), np.float32)
            return tf.constant(x), tf.constant(x @ true + NOISE * random.standard_normal((count, 1), np.float32))

        mine = np.random.default_rng((seed, 1, rank))
        return cls([drawn(mine, batch) for _ in range(BATCHES)], drawn(np.random.default_rng((seed, 2)), VALIDATED))


class Learner:
    """A linear model, its compiled training step, and its place in the batches."""

    def __init__(
        self,
        data: Hyperplane,
        *,
        wrap: Callable[[keras.optimizers.Optimizer], keras.optimizers.Optimizer] = lambda optimizer: optimizer,
        reduce: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]] = lambda gradients: gradients,
    ) -> None:
        """Build a model whose weights are zeros.

        Args:
            data: what is learnt.
            wrap: makes another optimizer of the plain one.
            reduce: takes the gradients before the optimizer does.
        """
        import keras
        import tensorflow as tf

        self._data, self._steps = data, 0
        self.model = keras.Sequential(
            [keras.layers.Input((data.batches[0][0].shape[1],)), keras.layers.Dense(1, kernel_initializer="zeros")]
        )
        self.optimizer = wrap(keras.optimizers.SGD(RATE))
        self.optimizer.build(self.model.trainable_variables)

        # without XLA: neither Horovod's operations here nor ours have kernels for it
        @tf.function
        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self.model(x, training=True) - y))
            gradients = tape.gradient(loss, self.model.trainable_variables)
            self.optimizer.apply(reduce(gradients), self.model.trainable_variables)
            return loss

        self._step = step

    def step(self) -> float:
        """Train one batch and give its loss."""
        x, y = self._data.batches[self._steps % len(self._data.batches)]
        self._steps += 1
        return float(self._step(x, y))

    def loss(self) -> float:
        """Give the mean squared error on the validation data."""
        x, y = self._data.validation
        return float(np.mean(np.square(self.model(x) - y)))

    def fingerprint(self) -> str:
        """Give a digest that is equal if the weights are equal bit for bit."""
        from hvd_ext.bench.training_model import fingerprint

        return fingerprint(np.concatenate([np.asarray(one).ravel() for one in self.model.trainable_variables]))


class Contestant:
    """A mode of ours, or Horovod; what it cannot do differently is here for Horovod."""

    def __init__(self, learner: Learner) -> None:
        """Take what learns."""
        self.learner = learner

    def flush(self) -> None:
        """Make the next step wait for all ranks and take what they hold."""

    def close(self) -> None:
        """Give back what the learner has opened; all ranks call it."""

    def over(self) -> int:
        """Give the number of rounds so far; 0 where there are none."""
        return 0

    def rounds(self, before: int, count: int) -> dict[str, Any] | None:
        """Tell how partial rounds went; None where there are none.

        Args:
            before: how many rounds there were before the first of them.
            count: the number of rounds.
        """
        return None


def burn(processor_s: float) -> None:
    """Spend processor time of this thread."""
    end_s = time.thread_time() + processor_s
    while time.thread_time() < end_s:
        pass


class Race:
    """The contestants of one workload; all ranks use it alike."""

    def __init__(self, workload: Workload, seed: int, ranks: Ranks) -> None:
        """Begin without contestants."""
        self._workload, self._seed, self._ranks = workload, seed, ranks
        self._contestants: list[Contestant] = []
        self._finite: list[bool] = []

    def enter(self, contestant: Contestant, steps: int) -> None:
        """Let a contestant take its first steps, without a sleep."""
        self._contestants.append(contestant)
        self._finite.append(True)
        for _ in range(steps):
            contestant.flush()
            self._finite[-1] &= math.isfinite(contestant.learner.step())

    def measure(self, index: int, first: int, steps: int) -> dict[str, Any]:
        """Let a contestant train; after the timed steps comes one that waits for all ranks.

        Args:
            index: of the contestant.
            first: the number of the first step, which decides how long ranks sleep.
            steps: how many are timed.

        Returns:
            When each step was over on the first rank, seconds since the begin; how long each rank slept before it
            [ranks, steps]; and `Contestant.rounds` as rank 0 knows it.
        """
        contestant, ranks, workload = self._contestants[index], self._ranks, self._workload
        times_s = [workload.slept_s(self._seed, first + step, ranks.rank, ranks.size) for step in range(steps)]
        before = contestant.over()
        losses, over_s, slept_s = [], [], []
        # a rank that has waited for long looks seldom, so a second barrier lets all ranks begin together
        ranks.meet()
        ranks.meet(FIRST_SLEEP_S)
        begin_s = time.perf_counter()
        for time_s in times_s:
            asleep_s = time.perf_counter()
            time.sleep(time_s)
            slept_s.append(time.perf_counter() - asleep_s)
            burn(workload.processor_s)
            losses.append(contestant.learner.step())
            over_s.append(time.perf_counter() - begin_s)
        contestant.flush()
        losses.append(contestant.learner.step())
        self._finite[index] &= all(math.isfinite(loss) for loss in losses)
        told = ranks.gather((over_s, slept_s))
        return {
            "over_s": [min(times) for times in zip(*(one for one, _ in told), strict=True)],
            "slept_s": [one for _, one in told],
            "rounds": contestant.rounds(before, steps),
        }

    def check(self, index: int) -> dict[str, Any]:
        """Give the loss on the validation data, and what is wrong: all ranks must have the same weights bit for bit."""
        learner, finite = self._contestants[index].learner, self._finite[index]
        loss = learner.loss()
        answers = self._ranks.gather((learner.fingerprint(), finite and math.isfinite(loss)))
        wrong = [f"rank {rank}: a loss is not finite" for rank, (_, fine) in enumerate(answers) if not fine]
        others = [rank for rank, (seen, _) in enumerate(answers) if seen != answers[0][0]]
        if others:
            wrong.append(f"rank {others[0]}: its weights differ from those of rank 0 after the last step")
        return {"loss": loss, "wrong": wrong}

    def release(self) -> None:
        """Close the contestants."""
        self._ranks.meet()
        while self._contestants:
            self._contestants.pop().close()


# From the name of a contestant and what it learns.
Make = Callable[[str, Hyperplane], Contestant]


def serve(folder: str, task: Task, make: Make) -> None:
    """Train as the parent says; see `sampling.answer_turns`. The library must have been started."""
    from benchmarks.studies.schedule.worker import sleep_precisely

    ranks = Ranks()
    races: list[Race] = []
    sleep_precisely()

    @functools.lru_cache(maxsize=1)
    def data(dimensions: int, batch: int) -> Hyperplane:
        return Hyperplane.of(task.seed, ranks.rank, dimensions, batch)

    def answer(turn: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        if turn["kind"] in ("open", "end"):
            while races:
                races.pop().release()
        if turn["kind"] == "open":
            workload = WORKLOADS[turn["workload"]]
            races.append(Race(workload, task.seed, ranks))
            for name in turn["contestants"]:
                contestant = make(name, data(workload.dimensions, max(1, workload.batch // ranks.size)))
                races[0].enter(contestant, AUTO_UNDELAYED_STEPS if name == AUTO else UNDELAYED_STEPS)
            return "opened", {}
        if turn["kind"] == "measure":
            return "measured", races[0].measure(turn["index"], turn["first"], turn["steps"])
        if turn["kind"] == "check":
            return "checked", {"contestants": [races[0].check(index) for index in range(turn["count"])]}
        return "ended", {}

    answer_turns(folder, ranks, answer)


def main(folder: str, text: str) -> None:
    """Serve the parent, which has written the task, with optimizers of hvd_ext as a user writes them."""
    task = Task.read(text)
    task.set_environment()
    import hvd_ext as hvd
    from hvd_ext.job import runtime

    class Ours(Contestant):
        """A mode of ours."""

        def flush(self) -> None:
            """Make the next step wait for all ranks and take what they hold."""
            if self._reducer.options.partial:
                hvd.flush(self.learner.optimizer)

        def close(self) -> None:
            """Close its channels."""
            self._reducer.close()

        def over(self) -> int:
            """Give the number of rounds so far; 0 where there are none."""
            (channel,) = self._reducer.channels
            return 0 if channel.partial is None else runtime.current().engine.progress(channel.handle).over

        def rounds(self, before: int, count: int) -> dict[str, Any] | None:
            """Tell how partial rounds went; None where there are none."""
            (channel,), (one,) = self._reducer.channels, self._reducer.sets
            if channel.partial is None:
                return None
            found = runtime.current().engine.rounds(channel.handle, before + 1, count)
            return {
                "mode": channel.partial.options.sync,
                "quorum": int(one.policy.save().get("quorum", channel.partial.options.quorum or 1)),
                "seed": channel.partial.seed,
                "before": channel.partial.before + before,
                "arrived": (found.arrived - before).tolist(),
                "round_s": (found.finished_s - found.begins_s).tolist(),
            }

        @property
        def _reducer(self) -> Any:
            return self.learner.optimizer._hvd_ext.reducer

    hvd.init()

    def make(name: str, data: Hyperplane) -> Contestant:
        wrapped = functools.partial(hvd.DistributedOptimizer, **keywords_of(name, hvd.size()))
        return Ours(Learner(data, wrap=wrapped))

    serve(folder, task, make)
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
