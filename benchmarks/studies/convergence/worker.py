"""One rank of the convergence study: `LAUNCHER python -m benchmarks.studies.convergence.worker TASK`."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.studies.convergence import data as data_sets
from benchmarks.studies.convergence.plan import BENCHMARK, Setting
from hvd_ext.bench.results import machine, save, versions
from hvd_ext.bench.sampling import EVENTS, emit
from hvd_ext.compression.topk import WARMUP_DENSITIES, TopK

if TYPE_CHECKING:
    import keras

# Steps before those that are timed: buckets are planned again after 20, and tried until step 40. Of slow steps there
# are only so many as take UNTIMED_S seconds, but FIRST.
UNTIMED, UNTIMED_S, FIRST = 43, 30.0, 3
# Of fast steps so many are timed as take TIMED_S seconds, but at most MOST_TIMED.
TIMED_S, MOST_TIMED = 5.0, 60
# The share of the steps in which the learning rate rises (Goyal et al. 2017, section 2.2), and where it ends.
RISE, LAST_SHARE = 0.1, 0.05
TEST_BATCH = 250


@dataclasses.dataclass(frozen=True)
class Task:
    """What the ranks of a job do.

    Attributes:
        folder: where each run writes its file.
        events: where rank 0 writes events.
        data: files of the data sets, by model.
        runs: the facts of each run, by its name, in their order.
    """

    folder: str
    events: str
    data: dict[str, str]
    runs: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Task:
        """Read a task that `write` has written."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        """Write the task into a file, because it is too long for an argument."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")


def order(seed: int, epoch: int, count: int, rank: int, size: int, batch: int) -> NDArray[np.int64]:
    """Give the examples that a rank takes in an epoch: all ranks shuffle alike and divide the examples of each step.

    Args:
        seed: of the run.
        epoch: from 0.
        count: of all examples.
        rank: this rank.
        size: number of ranks.
        batch: examples of a rank's batch.

    Returns:
        Places of examples, int64 [steps * batch]; what does not fill a step is left out.
    """
    mixed = np.random.default_rng((seed, epoch)).permutation(count)
    steps = count // (size * batch)
    return mixed[: steps * size * batch].reshape(steps, size, batch)[:, rank].ravel()


def optimizer(facts: dict[str, Any], steps: int) -> Any:
    """Make the distributed optimizer of a run, a training of so many steps, as a user writes it."""
    import keras

    import hvd_ext as hvd

    recipe, how = facts["recipe"], facts["how"]
    rise, rate = max(1, round(RISE * steps)), recipe["learning_rate"]
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, max(1, steps - rise), LAST_SHARE, warmup_target=rate, warmup_steps=rise
    )
    given: dict[str, Any] = {"momentum": recipe["momentum"], "nesterov": recipe["nesterov"]}
    if recipe.get("optimizer") == "lars":
        plain = hvd.optimizers.LARS(schedule, **given, **(recipe["lars"] or {}))
    else:
        plain = keras.optimizers.SGD(schedule, **given)
    # a step is timed as it is after the warm-up
    warmed = round(how["warmup"] * steps) if facts["seed"] is not None else 0
    keywords = dict(how["topk"])
    local = hvd.LocalSteps(**how["local"], start=warmed) if how.get("local") else None
    wrap = functools.partial(hvd.DistributedOptimizer, plain, algorithm=how["algorithm"], local_steps=local)
    if how.get("codec"):
        sent = Setting(codec=how["codec"]).compression()
        first = "start" if how["codec"].startswith("lowrank") else "dense_steps"
        return wrap(compression=dataclasses.replace(sent, **{first: warmed}) if warmed and not local else sent)
    if not keywords:
        return wrap()
    if warmed:
        densities = how["warmup_densities"]
        keywords["warmup"] = hvd.Warmup(warmed, densities) if densities else hvd.Warmup(warmed)
    if how.get("until") and facts["seed"] is not None:
        keywords["until"] = max(2, warmed + 2, round(how["until"] * steps))
    return wrap(compression=hvd.TopK(**keywords))


def compiled(facts: dict[str, Any], data: data_sets.Data, steps: int) -> keras.Model:
    """Make the model of a run, with the first weights of its seed."""
    import keras

    from benchmarks.studies.convergence.models import build

    keras.utils.clear_session()
    keras.utils.set_random_seed(facts["seed"] or 0)
    classes = int(max(data.train.labels.max(), data.test.labels.max())) + 1
    shape, labels = data.train.inputs.shape[1:], data.train.labels.shape[1]
    model = build(facts["model"], shape, labels, classes, facts["recipe"]["width"])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer(facts, steps), loss, metrics=["accuracy"], jit_compile=False)
    return model


def right(model: keras.Model, split: data_sets.Split) -> tuple[int, int]:
    """Test a model, each rank with its part of the examples.

    Returns:
        How many labels were right, and of how many, over all ranks.
    """
    import hvd_ext as hvd

    mine = data_sets.Split(split.inputs[hvd.rank() :: hvd.size()], split.labels[hvd.rank() :: hvd.size()])
    count = 0
    for begin in range(0, len(mine.labels), TEST_BATCH):
        logits = model.predict_on_batch(mine.inputs[begin : begin + TEST_BATCH])
        count += int((np.argmax(logits, -1) == mine.labels[begin : begin + TEST_BATCH]).sum())
    counts = hvd.allgather_object((count, mine.labels.size))
    return sum(found for found, _ in counts), sum(total for _, total in counts)


def learn(facts: dict[str, Any], data: data_sets.Data, tell: Callable[..., None]) -> dict[str, Any]:
    """Train a model and test it.

    Args:
        facts: of the run.
        data: its data set.
        tell: takes what a reader wants to know after each epoch.

    Returns:
        Accuracies, 0 to 1, after each epoch and at the end, the time, whether ranks ended alike, the parameters.
    """
    import hvd_ext as hvd

    recipe, rank, size = facts["recipe"], hvd.rank(), hvd.size()
    train, test = data.train.first(recipe["train"]), data.test
    steps = len(train.labels) // (size * recipe["batch"])
    count = max(1, round(recipe["epochs"] * facts["how"]["epochs"]))
    model = compiled(facts, data, steps * count)
    begin, epochs, found, total = time.perf_counter(), [], 0, 1
    for epoch in range(count):
        mine = order(facts["seed"], epoch, len(train.labels), rank, size, recipe["batch"])
        more = {"initial_epoch": epoch, "epochs": epoch + 1, "shuffle": False, "verbose": 0}
        together = [hvd.callbacks.AverageStatistics()]  # all ranks test one model
        history = model.fit(train.inputs[mine], train.labels[mine], recipe["batch"], callbacks=together, **more).history
        last = epoch == count - 1
        curve_found, curve_total = right(model, test.first(recipe["curve"]))
        if last:
            found, total = right(model, test)
        accuracy = curve_found / curve_total
        epochs.append({"steps": (epoch + 1) * steps, "loss": _finite(history["loss"][0]), "accuracy": accuracy})
        tell(epoch=epoch + 1, epochs=count, accuracy=found / total if last else accuracy)
    return {
        "accuracy": found / total,
        "tested": total,
        "curve": epochs,
        "seconds": time.perf_counter() - begin,
        "equal": _equal(model),
        **_about(model),
    }


def timed(facts: dict[str, Any], data: data_sets.Data) -> dict[str, Any]:
    """Measure the time of a step, after the warm-up and with each of its densities.

    Returns:
        The seconds of each step on the rank that was slowest in it, their median, and such seconds for each density of
        the warm-up, and for the dense steps from `until` on. With local steps the mean of each `every` steps stands for
        a step.
    """
    how = facts["how"]
    warmed = [
        _step_seconds({**facts, "how": {**how, "topk": {**how["topk"], "density": density}}}, data)[0]
        for density in (how["warmup_densities"] or WARMUP_DENSITIES if how["warmup"] and how["topk"] else ())
        if density > how["topk"].get("density", TopK().density)
    ]
    if how["warmup"] and not how["topk"]:
        warmed = [_step_seconds({**facts, "how": {**how, "algorithm": "auto", "codec": "", "local": {}}}, data)[0]]
    dense = {**facts, "how": {**how, "algorithm": "auto", "topk": {}}}
    whole = _step_seconds(dense, data)[0] if how.get("until") else []
    slowest, model = _step_seconds(facts, data)
    return {
        "step_seconds": slowest,
        "step_seconds_median": statistics.median(slowest),
        "warm_step_seconds": warmed,
        "whole_step_seconds": whole,
        "predicted_step_seconds": None if how.get("local") else _predicted_s(model),
        **_about(model),
    }


def _step_seconds(facts: dict[str, Any], data: data_sets.Data) -> tuple[list[float], keras.Model]:
    import tensorflow as tf

    import hvd_ext as hvd

    batch = facts["recipe"]["batch"]
    model = compiled(facts, data, 1000)
    mine = order(0, 0, len(data.train.labels), hvd.rank(), hvd.size(), batch)
    inputs, labels = tf.constant(data.train.inputs[mine[:batch]]), tf.constant(data.train.labels[mine[:batch]])
    every = facts["how"].get("local", {}).get("every", 1)
    taken = step_seconds(lambda: model.train_on_batch(inputs, labels), hvd.allgather_object, facts["steps"], every)
    return taken, model


def step_seconds(
    step: Callable[[], object], gathered: Callable[[Any], list[Any]], least: int, every: int, untimed: int = UNTIMED
) -> list[float]:
    """Make steps, and time those after the first ones.

    Args:
        step: makes a step; it returns when the weights are updated.
        gathered: collects a value of each rank, on all ranks.
        least: how many steps are timed at least.
        every: with local steps the number of steps to an exchange, else 1.
        untimed: how many steps are made before, if they are not too slow.

    Returns:
        The seconds of each step on the rank that was slowest in it. With local steps the means of each `every` steps.
    """

    def slowest(count: int) -> list[float]:
        taken = []
        for _ in range(count):
            begin = time.perf_counter()
            step()
            taken.append(time.perf_counter() - begin)
        return [max(of_ranks) for of_ranks in zip(*gathered(taken), strict=True)]

    def means(rounds: int) -> list[float]:
        taken = slowest(every * rounds)
        return [statistics.mean(taken[at : at + every]) for at in range(0, len(taken), every)]

    first_s = min(means(FIRST if every == 1 else 1))
    before = means(_within(UNTIMED_S, first_s * every, least=1, most=-(-untimed // every)))
    return means(timed_rounds(least, every, statistics.median(before)))


def timed_rounds(least: int, every: int, step_s: float) -> int:
    """Give how many steps are timed; with local steps how many rounds of `every`, with an exchange in each."""
    if every == 1:
        return _within(TIMED_S, step_s, least, max(least, MOST_TIMED))
    return _within(UNTIMED_S, step_s * every, least=3, most=max(3, 192 // every))


def _within(seconds: float, round_s: float, least: int, most: int) -> int:
    return max(least, min(most, round(seconds / round_s)))


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _equal(model: keras.Model) -> bool:
    import hvd_ext as hvd

    weights = np.concatenate([weight.ravel() for weight in model.get_weights()])
    return len(set(hvd.allgather_object(hashlib.sha256(weights.tobytes()).hexdigest()))) == 1


def _about(model: keras.Model) -> dict[str, Any]:
    return {"parameters": int(sum(np.prod(weight.shape) for weight in model.trainable_weights))}


def _predicted_s(model: keras.Model) -> float | None:
    """Give the step that was predicted when buckets were planned last; None if they were not planned by times."""
    (every, *_) = model.optimizer._hvd_ext.reducer.sets
    reviews = [planned.reviews[-1] for planned in every.replannings.values() if planned.reviews]
    if not reviews:
        return None
    return reviews[-1].after_s if reviews[-1].switched else reviews[-1].before_s


def serve(
    task: Task,
    rank: int,
    learned: Callable[[dict[str, Any], data_sets.Data, Callable[..., None]], dict[str, Any]],
    timed: Callable[[dict[str, Any], data_sets.Data], dict[str, Any]],
    more_versions: Mapping[str, str],
) -> None:
    """Do all runs of a task.

    Args:
        task: of the job.
        rank: this rank; rank 0 writes events and files.
        learned: does a run that learns; see `learn`.
        timed: does a run that measures the time of a step; see `timed`.
        more_versions: of the packages of the peer, by name.
    """
    events = Path(task.events) / EVENTS if rank == 0 else None
    loaded: dict[str, data_sets.Data] = {}
    for name, facts in task.runs.items():
        source = task.data[facts["model"]]
        loaded[source] = data = loaded.get(source) or data_sets.load(Path(source))
        emit(events, "run", name=name)
        about = {"date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"), "machine": machine()}

        def tell(name: str = name, **values: Any) -> None:
            emit(events, "epoch", name=name, **values)

        found = timed(facts, data) if facts["seed"] is None else learned(facts, data, tell)
        if rank == 0:
            both = {**versions(), **more_versions}
            heads = {"benchmark": BENCHMARK, "facts": facts, "digest": data.digest, **about, "versions": both}
            save(Path(task.folder) / f"{name}.json", {**heads, **found})
        emit(events, "done", name=name)


def main(path: str) -> None:
    """Do all runs of the task in a file; a failure ends the whole job."""
    import hvd_ext as hvd

    hvd.init()
    try:
        serve(Task.read(Path(path)), hvd.rank(), learn, timed, {})
        hvd.shutdown()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(1)


if __name__ == "__main__":
    main(sys.argv[1])
