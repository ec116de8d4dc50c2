"""Accuracy of partial rounds under severe skew, trained in one process from the list of who was included when.

    python -m benchmarks.studies.stragglers.accuracy FILE.json [IMAGES [EPOCHS [SEEDS]]]

Accuracy depends only on which gradient enters which round, and `hvd_ext.simulation.rounds` plays that. So 8 ranks learn
in one process: step s of a rank computes its gradient at the weights after round s - 1, and a later round may take it.
Nothing is slept; times are those of the model. Beside our modes stand the results of eager-SGD's public code, where a
late gradient is lost and a late rank finds only the newest result: there each rank has weights of its own, which drift
apart unless those of rank 0 are copied to all ranks, here after every epoch.

The skew is that of eager-SGD, section 6.2.3: ranks are delayed by 50 to 400 ms, shifted by one rank after each step.
Late gradients cost the more accuracy the larger the rate is (section 5, theorem 5.2: the rate must fall with the
staleness). So half the rate stands beside the first one.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.studies.convergence import data as data_sets
from benchmarks.studies.markdown import table
from benchmarks.studies.stragglers import replay
from benchmarks.studies.stragglers.workloads import shifted
from hvd_ext.bench import results
from hvd_ext.simulation.rounds import Played, Rules, play

BENCHMARK = "accuracy of partial rounds, replayed"
HEADINGS = (
    *("rate", "mode", "accuracy", "sd", "points over full", "speed-up, modelled", "active ranks"),
    "mean staleness",
)
RANKS, BATCH, COMPUTING_S = 8, 16, 0.015
SLEPT = shifted(0.050, 0.400)
EPOCHS, SEEDS = 8, 3
WARM_UP = 100  # rounds

Vector = npt.NDArray[np.float32]
# gives the sum over ranks of their gradients of a step, at weights
Gradient = Callable[[Vector, int, Sequence[int]], Vector]


@dataclass(frozen=True)
class Mode:
    """A row of the table: the rules of its rounds, and whether the results are eager-SGD's overwritten ones."""

    name: str
    rules: Rules
    lost: bool = False
    copied: bool = False  # rank 0's weights to all ranks, after every epoch
    rate: float = 0.2  # the highest learning rate


LOWER = 0.1
MODES = (
    Mode("full", Rules()),
    Mode("majority", Rules("majority", seed=1)),
    Mode("quorum 4", Rules("quorum", quorum=RANKS // 2)),
    Mode("solo", Rules("solo")),
    Mode("full, delay 1", Rules(delay=1)),
    Mode("majority, overwritten", Rules("majority", seed=1), lost=True),
    Mode("majority, overwritten, copied", Rules("majority", seed=1), lost=True, copied=True),
    Mode("solo, overwritten", Rules("solo"), lost=True),
    Mode("solo, overwritten, copied", Rules("solo"), lost=True, copied=True),
    Mode("full", Rules(), rate=LOWER),
    Mode("majority", Rules("majority", seed=1), rate=LOWER),
    Mode("full, delay 1", Rules(delay=1), rate=LOWER),
)


def skewed_s(steps: int) -> npt.NDArray[np.float64]:
    """Give how long each rank takes for each step, seconds [ranks, steps]."""
    return np.array([[COMPUTING_S + SLEPT(0, step, rank, RANKS) for step in range(steps)] for rank in range(RANKS)])


@dataclass
class Learner:
    """Weights that SGD changes; a step per result."""

    weights: Vector
    rounds: int
    rate: float

    def apply(self, mean: Vector, number: int) -> None:
        """Apply the result of a round at the rate of the step `number`: a warm-up, then half a cosine."""
        share = min(1.0, number / WARM_UP) * 0.5 * (1 + np.cos(np.pi * number / self.rounds))
        self.weights = self.weights - np.float32(self.rate * share) * mean


def kept(
    arrived: replay.Numbers,
    begin: Vector,
    gradient: Gradient,
    rate: float,
    delay: int,
    tell: Callable[[int, list[Vector]], None],
) -> None:
    """Train where no gradient is lost and all ranks have the same weights.

    Args:
        arrived: [rounds, ranks].
        begin: the first weights.
        gradient: gives the sum of some ranks' gradients of a step.
        rate: the highest learning rate.
        delay: 1: a step takes the result of the round before its own.
        tell: takes the number of a round that is over, and the weights after it, once for all ranks.
    """
    rounds, ranks = arrived.shape
    learner = Learner(begin, rounds, rate)
    weights = {0: begin}  # after a round
    for number, given in enumerate(replay.included(arrived), 1):
        by_step: dict[int, list[int]] = {}
        for rank, step in given:
            by_step.setdefault(step, []).append(rank)
        # the gradients of one step are those of one batch, because they have the same weights
        sums = [gradient(weights[max(step - 1 - delay, 0)], step, of) for step, of in sorted(by_step.items())]
        total = replay.total(sums)
        learner.apply(np.zeros_like(begin) if total is None else total / np.float32(ranks), number)
        weights[number] = learner.weights
        oldest = int(arrived[number - 1].min()) - delay
        for old in [one for one in weights if one < oldest]:
            del weights[old]
        tell(number, [learner.weights])


def overwritten(
    arrived: replay.Numbers,
    begin: Vector,
    gradient: Gradient,
    rate: float,
    copied_after: int,
    tell: Callable[[int, list[Vector]], None],
) -> None:
    """Train as eager-SGD's public code does: a late gradient is lost, and a late rank finds only the newest result.

    Args:
        arrived: [rounds, ranks].
        begin: the first weights.
        gradient: gives the sum of some ranks' gradients of a step.
        rate: the highest learning rate.
        copied_after: rank 0's weights go to all ranks after every so many rounds; 0 for never. These rounds
            must wait for all ranks.
        tell: takes the number of a round that is over, and the weights of all ranks as they are then.
    """
    rounds, ranks = arrived.shape
    found = replay.newest(arrived)
    learners = [Learner(begin, rounds, rate) for _ in range(ranks)]
    taken = [0] * ranks
    means: list[Vector] = [begin]  # that of round 0 is never used

    def catch_up(rank: int, steps: int) -> None:
        for step in range(taken[rank] + 1, steps + 1):
            learners[rank].apply(means[found[step - 1, rank]], step)
        taken[rank] = steps

    for number, given in enumerate(replay.included(arrived, lost=True), 1):
        for rank, step in given:
            catch_up(rank, step - 1)
        total = replay.total([gradient(learners[rank].weights, step, [rank]) for rank, step in given])
        means.append(np.zeros_like(begin) if total is None else total / np.float32(ranks))
        if (arrived[number - 1] == number).all():
            for rank in range(ranks):
                catch_up(rank, number)
            if copied_after and number % copied_after == 0:
                learners = [Learner(learners[0].weights, rounds, rate) for _ in range(ranks)]
        tell(number, [learner.weights for learner in learners])


class Images:
    """A small convolutional network on the procedural images: shape, texture and colour are a label each.

    It normalises groups of channels of one image, and no batch, so that the gradient of joined batches is the sum of
    theirs.
    """

    FILTERS = (16, 32, 48)
    GROUPS = 4

    def __init__(self, data: data_sets.Data, seed: int) -> None:
        import tensorflow as tf

        self._tf, self._data, self._random = tf, data, np.random.default_rng(seed)
        self.steps_per_epoch = len(data.train.inputs) // (RANKS * BATCH)
        self._orders: list[npt.NDArray[np.int64]] = []
        self._seed = seed
        self._gradient = tf.function(self._differentiated, reduce_retracing=True)
        self._right = tf.function(self._counted, reduce_retracing=True)

    @classmethod
    def shapes(cls) -> list[tuple[int, ...]]:
        """List the shapes of the weights: of each layer the filters, scales and offsets, and at last the classes'."""
        found: list[tuple[int, ...]] = []
        for before, count in zip((3, *cls.FILTERS), cls.FILTERS, strict=False):
            found += [(3, 3, before, count), (count,), (count,)]
        return [*found, (cls.FILTERS[-1], 12), (12,)]

    def begin(self) -> Vector:
        """Draw the first weights."""
        parts = []
        for place, shape in enumerate(self.shapes()):
            if len(shape) == 1:  # scales follow filters
                parts.append(np.full(shape, float(place % 3 == 1 and shape != (12,))))
                continue
            spread = np.sqrt(2 / np.prod(shape[:-1])) if len(shape) == 4 else 0.1
            parts.append(self._random.normal(0, spread, int(np.prod(shape))))
        return np.concatenate([part.ravel() for part in parts]).astype(np.float32)

    def gradient(self, weights: Vector, step: int, ranks: Sequence[int]) -> Vector:
        """Sum the gradients of the ranks' mean losses over their batches of a step."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        while len(self._orders) <= epoch:
            order = np.random.default_rng((self._seed, len(self._orders))).permutation(len(self._data.train.inputs))
            self._orders.append(order)
        begins = [(place * RANKS + rank) * BATCH for rank in ranks]
        chosen = np.concatenate([self._orders[epoch][begin : begin + BATCH] for begin in begins])
        split = self._data.train
        return np.asarray(
            self._gradient(self._tf.constant(weights), split.inputs[chosen], split.labels[chosen]).numpy()
        )

    def accuracy(self, weights: Vector) -> float:
        """Give the share of test labels that are right."""
        split, right = self._data.test, 0
        for begin in range(0, len(split.inputs), 1000):
            part = slice(begin, begin + 1000)
            right += int(self._right(weights, split.inputs[part], split.labels[part]))
        return right / split.labels.size

    def _logits(self, weights: Any, images: Any) -> Any:
        tf, shapes = self._tf, self.shapes()
        cut = tf.split(weights, [int(np.prod(shape)) for shape in shapes])
        parts = [tf.reshape(part, shape) for part, shape in zip(cut, shapes, strict=True)]
        x = tf.cast(images, tf.float32) / 64 - 2
        for layer in range(len(self.FILTERS)):
            kernel, scale, offset = parts[3 * layer : 3 * layer + 3]
            x = tf.nn.conv2d(x, kernel, 1 if layer else 2, "SAME")
            x = tf.nn.relu(self._normalised(x) * scale + offset)
            x = tf.nn.max_pool2d(x, 2, 2, "SAME")
        return tf.reshape(tf.reduce_mean(x, (1, 2)) @ parts[-2] + parts[-1], (-1, 3, 4))

    def _normalised(self, x: Any) -> Any:
        _, height, width, count = x.shape
        grouped = self._tf.reshape(x, (-1, height, width, self.GROUPS, count // self.GROUPS))
        mean, variance = self._tf.nn.moments(grouped, (1, 2, 4), keepdims=True)
        return self._tf.reshape((grouped - mean) * self._tf.math.rsqrt(variance + 1e-5), (-1, height, width, count))

    def _differentiated(self, weights: Any, images: Any, labels: Any) -> Any:
        tf = self._tf
        with tf.GradientTape() as tape:
            tape.watch(weights)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, self._logits(weights, images))
            loss = tf.reduce_sum(losses) / (3 * BATCH)
        return tape.gradient(loss, weights)

    def _counted(self, weights: Any, images: Any, labels: Any) -> Any:
        tf = self._tf
        guessed = tf.argmax(self._logits(weights, images), -1, tf.int32)
        return tf.reduce_sum(tf.cast(guessed == labels, tf.int32))


def played(mode: Mode, steps_per_epoch: int, epochs: int) -> Played:
    """Play the rounds of a mode; the last one waits for all ranks, and those before copies of weights do."""
    steps = steps_per_epoch * epochs
    ends = range(steps_per_epoch, steps + 1, steps_per_epoch) if mode.copied else [steps]
    return play(skewed_s(steps), mode.rules, flushed=list(ends))


def train(task: Images, mode: Mode, epochs: int) -> dict[str, Any]:
    """Train once.

    Returns:
        The test accuracy after each epoch, a mean over the ranks if their weights differ, and the modelled times.
    """
    found = played(mode, task.steps_per_epoch, epochs)
    curve: list[float] = []

    def tell(number: int, weights: list[Vector]) -> None:
        if number % task.steps_per_epoch == 0:
            # ranks that drift apart are costly to test; in the middle of the training that of rank 0 does
            tested = weights if number == task.steps_per_epoch * epochs else weights[:1]
            curve.append(statistics.fmean(task.accuracy(one) for one in tested))

    if mode.lost:
        copied_after = task.steps_per_epoch if mode.copied else 0
        overwritten(found.arrived, task.begin(), task.gradient, mode.rate, copied_after, tell)
    else:
        kept(found.arrived, task.begin(), task.gradient, mode.rate, mode.rules.delay, tell)
    ends = np.arange(1, epochs + 1) * task.steps_per_epoch - 1
    counts = found.staleness
    return {
        "accuracies": curve,
        "times_s": found.finished_s[ends].tolist(),
        "active": found.active,
        "staleness": float(counts @ np.arange(len(counts)) / counts.sum()),
    }


def row_of(mode: Mode, trained: Sequence[dict[str, Any]], full: dict[str, Any] | None) -> dict[str, Any]:
    """Make the row of a mode from its trainings, one for each seed, beside the row of full rounds at its rate."""
    samples = [one["accuracies"][-1] for one in trained]
    mean, total_s = statistics.fmean(samples), trained[0]["times_s"][-1]
    return {
        "rate": mode.rate,
        "mode": mode.name,
        "accuracy_mean": mean,
        "accuracy_sd": statistics.stdev(samples) if len(samples) > 1 else None,
        "points_over_full": None if full is None else 100 * (mean - full["accuracy_mean"]),
        "modelled_speedup": 1.0 if full is None else full["times_s"][-1] / total_s,
        "active_ranks": trained[0]["active"],
        "mean_staleness": None if mode.lost else trained[0]["staleness"],
        "times_s": trained[0]["times_s"],
        "curves": [one["accuracies"] for one in trained],
        "samples": samples,
    }


def markdown(result: dict[str, Any]) -> str:
    """Write the rows of a file as a table."""
    lines = [
        [
            f"{row['rate']:g}",
            row["mode"],
            f"{row['accuracy_mean']:.2%}",
            "" if row["accuracy_sd"] is None else f"{100 * row['accuracy_sd']:.2f}",
            "" if row["points_over_full"] is None else f"{row['points_over_full']:+.2f}",
            f"{row['modelled_speedup']:.2f}",
            f"{row['active_ranks']:.1f}",
            "" if row["mean_staleness"] is None else f"{row['mean_staleness']:.2f}",
        ]
        for row in result["rows"]
    ]
    return table(HEADINGS, lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the mean test accuracy over the modelled time, a line for each mode at the first rate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    first = result["rows"][0]
    for row in result["rows"]:
        if row["rate"] != first["rate"]:
            continue
        style = "--" if "overwritten" in row["mode"] else "-"
        axes.plot(row["times_s"], 100 * np.mean(row["curves"], 0), style, marker=".", label=row["mode"])
    axes.set_xlabel("modelled time, seconds")
    axes.set_ylabel("test accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str]) -> None:
    """Train the modes that the file lacks, so that a study that was stopped goes on; write it, and a plot beside it.

    Args:
        arguments: the file, the folder of examples/make_images.py, epochs, and the number of seeds.
    """
    import tensorflow as tf

    tf.config.experimental.enable_op_determinism()
    tf.config.set_visible_devices([], "GPU")
    path, folder, epochs, seeds = [*arguments, *["", "out/images", str(EPOCHS), str(SEEDS)][len(arguments) :]]
    run = results.begin_run("one process")
    data = data_sets.images(Path(folder))
    before = results.load(Path(path), BENCHMARK) if Path(path).exists() else None
    rows: list[dict[str, Any]] = [] if before is None else list(before["rows"])
    ready = {name_of(row) for row in rows}
    for mode in MODES:
        if (mode.rate, mode.name) in ready:
            continue
        trained = [train(Images(data, seed), mode, int(epochs)) for seed in range(int(seeds))]
        full = [row for row in rows if name_of(row) == (mode.rate, "full")]
        rows.append(row_of(mode, trained, full[0] if full else None))
        words = [f"{one:.2%}" for one in rows[-1]["samples"]]
        print(f"{mode.rate:g}, {mode.name}: {', '.join(words)}; x {rows[-1]['modelled_speedup']:.2f}", flush=True)
        result = results.result_of(run, [row for row in rows if name_of(row) not in ready], BENCHMARK)
        results.save(Path(path), results.joined(before, result) if before else result)
    draw({"rows": rows}, Path(path).with_suffix(".png"))


def name_of(row: dict[str, Any]) -> tuple[float, str]:
    """Give what tells a row from the others: its rate and its mode."""
    return row["rate"], row["mode"]


if __name__ == "__main__":
    main(sys.argv[1:])
