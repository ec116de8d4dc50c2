"""1.28 million samples: memory of one process, the size of what a checkpoint keeps of the data, and going on."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.studies.data.goals import OURS, PRIVATE, RESTORE, SAVE, SKIP, STATE
from benchmarks.studies.data.memory import private_bytes, spent
from benchmarks.studies.data.ways import ours, room
from benchmarks.studies.data.worker import Task, Tell

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

SAMPLES, BATCH, SIDE, STEPS = 1_280_000, 128, 96, 1000
LITTLE_ROOM = 1 << 26
PLACE = "one process"


def measure(task: Task, tell: Tell) -> None:
    """Measure ours, and the iterator of tf.data that shuffles all samples."""
    count, steps = task.count(SAMPLES, BATCH), task.count(STEPS, 1)
    if OURS in task.contestants:
        _memory(task, count, tell)
        _going_on(task, max(count, (steps + 2) * BATCH), steps, tell)
    if "shuffle" in task.contestants:
        _shuffled(task, count, steps, tell)


def _records(path: Path, count: int) -> Any:
    """Write records of two numbers into a file, and map it."""
    records = np.memmap(path, np.int64, "w+", shape=(count, 2))
    records[:, 0], records[:, 1] = np.arange(count), -np.arange(count)
    records.flush()
    return np.memmap(path, np.int64, "r", shape=(count, 2))


def _memory(task: Task, count: int, tell: Tell) -> None:
    """Tell how much private memory the process has more than before it opened the cache, after each epoch."""
    import tensorflow as tf

    records = _records(task.path("records"), count)
    # what TensorFlow keeps after any pipeline shall not count
    for _ in tf.data.Dataset.range(count).batch(BATCH).map(tf.identity, tf.data.AUTOTUNE).take(1000):
        pass
    before = private_bytes()
    cache = ours(records, lambda record: record, room(count, 16))
    data = cache.dataset(batch_size=BATCH, shuffle=True, seed=1)
    facts = {"sample_bytes": 16, "batch": BATCH, "count": count}
    for epoch in range(task.repetitions + 1):
        total, wrong = 0, ""
        for batch in data:
            values = batch.numpy()
            total += int(values[:, 0].sum())
            wrong = wrong or ("" if (values.sum(1) == 0).all() else "a record is torn")
        if total != count * (count - 1) // 2:
            wrong = wrong or "an epoch does not have every sample once"
        tell(PLACE, OURS, PRIVATE, [private_bytes() - before] if epoch else [], **facts, wrong=wrong)
    cache.close()


class _Stopped(Exception):
    """A training has come as far as is needed."""


def _model() -> keras.Model:
    import keras

    layers = keras.layers
    model = keras.Sequential(
        [layers.Input((SIDE, SIDE, 3)), layers.Rescaling(1 / 255), layers.GlobalAveragePooling2D(), layers.Dense(1)]
    )
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    return model


def _fit(data: tf.data.Dataset, checkpoint: Any, steps: int) -> float:
    """Train so many steps; give the seconds until the first of them was over."""
    import keras

    over: list[float] = []

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            over.append(time.perf_counter())
            if len(over) >= steps:
                raise _Stopped

    begin = time.perf_counter()
    try:
        # what comes first is called first: the checkpoint is saved before the training stops
        _model().fit(data, epochs=1, verbose=0, callbacks=[checkpoint, Stop()])
    except _Stopped:
        return over[0] - begin
    raise RuntimeError(f"{len(over)} steps were trained, must be {steps}")


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _going_on(task: Task, count: int, steps: int, tell: Tell) -> None:
    """Stop a training of images after some steps, and go on with another one."""
    import tensorflow as tf

    import hvd_ext as hvd

    hvd.init()
    facts = {"sample_bytes": 3 * SIDE * SIDE, "batch": BATCH, "count": count, "steps": steps}

    def load(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        value = tf.cast(number % 251, tf.uint8)
        return tf.fill((SIDE, SIDE, 3), value), tf.cast(value, tf.float32)

    cache = ours(np.arange(count), load, LITTLE_ROOM)
    data = cache.dataset(batch_size=BATCH, shuffle=True, seed=1)
    folder, without = task.path("checkpoint"), task.path("without")

    def kept(where: Path, resume: bool) -> Any:
        return hvd.callbacks.Checkpoint(where, every=None, every_steps=steps, resume=resume, signals=())

    plain = tf.data.Dataset.from_tensors((np.zeros((BATCH, SIDE, SIDE, 3), np.uint8), np.zeros(BATCH, np.float32)))
    _fit(plain.repeat(steps), kept(without, False), steps)
    _fit(data, kept(folder, False), steps)
    tell(PLACE, OURS, STATE, [_size(folder) - _size(without)], **facts, checkpoint_bytes=_size(folder))
    for turn in range(task.repetitions):
        afresh_s = _fit(data, kept(task.path(f"none-{turn}"), False), 1)
        later_s = _fit(data, kept(folder, True), 1)
        tell(PLACE, OURS, SKIP, [later_s - afresh_s], **facts)
        _of_checkpoint(kept(task.path(f"saved-{turn}"), False), folder, steps, tell, facts)
    cache.close()
    hvd.shutdown()


def _of_checkpoint(checkpoint: Any, folder: Path, steps: int, tell: Tell, facts: dict[str, Any]) -> None:
    """Tell how long it takes to save all of the training in the middle of an epoch, and to restore it."""
    import hvd_ext as hvd

    checkpoint.set_model(_model())
    tell(PLACE, OURS, SAVE, [spent(lambda: checkpoint.save(0, steps))[1]], **facts)
    again = hvd.callbacks.Checkpoint(folder, resume=True, signals=())
    again.set_model(_model())
    _, wall_s, place = spent(again.restore)
    wrong = "" if tuple(place) == (0, steps) else f"training goes on from {place}, must be (0, {steps})"
    tell(PLACE, OURS, RESTORE, [wall_s], **facts, wrong=wrong)


def _shuffled(task: Task, count: int, steps: int, tell: Tell) -> None:
    """Do the same with the iterator of tf.data that shuffles all numbers; once, because it takes long."""
    import tensorflow as tf

    facts = {"batch": BATCH, "count": count, "steps": steps}
    before = private_bytes()
    data = tf.data.Dataset.range(count).shuffle(count, seed=1).batch(BATCH)
    iterator = iter(data)
    next(iterator)
    tell(PLACE, "shuffle", PRIVATE, [private_bytes() - before], **facts)
    folder = task.path("iterator")
    folder.mkdir()
    path = timed(tell, "shuffle", SAVE, facts, lambda: tf.train.Checkpoint(it=iterator).write(str(folder / "it")))
    tell(PLACE, "shuffle", STATE, [_size(folder)], **facts)
    other = iter(data)
    timed(tell, "shuffle", RESTORE, facts, lambda: tf.train.Checkpoint(it=other).read(path))
    if next(other)[0] != next(iterator)[0]:
        raise RuntimeError("the iterator that was restored goes on elsewhere")
    # the first batch after so many steps, beside the first one
    first_s, later_s = (spent(lambda skipped=skipped: _nth(data, skipped))[1] for skipped in (0, steps))
    tell(PLACE, "shuffle", SKIP, [later_s - first_s], **facts)
    shutil.rmtree(folder)


def _nth(data: tf.data.Dataset, number: int) -> Any:
    return next(itertools.islice(data.skip(number), 1))


def timed(tell: Tell, name: str, quantity: str, facts: dict[str, Any], call: Callable[[], Any]) -> Any:
    """Tell how long a call takes; give its result."""
    _, wall_s, found = spent(call)
    tell(PLACE, name, quantity, [wall_s], **facts)
    return found
