"""A slow source: training on two hosts whose source is held to a rate, with and without keeping what was read.

The network's step takes a third of the time of its input: what computing lacks is slept, so that ranks that share cores
lose what ranks on machines of their own lose.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.studies.data.goals import FIRST_WAIT, LATER_WAIT, OURS, TRAINING
from benchmarks.studies.data.samples import Source
from benchmarks.studies.data.ways import ours, photographs, room
from benchmarks.studies.data.worker import Task, Tell
from hvd_ext.bench.jobs import rotated
from hvd_ext.bench.pictures import decoded, write_pictures

if TYPE_CHECKING:
    import tensorflow as tf

RATE, FILE_S = 12.5e6, 0.002
SHARE = 1 / 3  # of the input's time
BATCH, STEPS, EPOCHS = 32, 24, 10
# Epochs of a turn that are measured: those of reading every time are alike, and so are the later ones of the others.
READ, LATER = 2, 2
HEIGHT, WIDTH, SIDE = 200, 210, 32
CLASSES = 10


class Network:
    """A small network, its optimizer of ours, and a step that takes a given time."""

    def __init__(self, step_s: float) -> None:
        """Build it.

        Args:
            step_s: how long a step takes, unless computing takes longer.
        """
        import keras
        import tensorflow as tf

        import hvd_ext as hvd

        keras.utils.set_random_seed(1)
        layers = keras.layers
        self._step_s = step_s
        self._model = keras.Sequential(
            [layers.Input((SIDE, SIDE, 3)), layers.Rescaling(1 / 255), layers.Flatten(), layers.Dense(64, "relu")]
        )
        self._model.add(layers.Dense(CLASSES))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
        optimizer.build(self._model.trainable_variables)

        @tf.function
        def step(x: tf.Tensor) -> tf.Tensor:
            labels = tf.cast(x[:, 0, 0, 0], tf.int32) % CLASSES
            with tf.GradientTape() as tape:
                logits = self._model(tf.cast(x, tf.float32), training=True)
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
            optimizer.apply(tape.gradient(loss, self._model.trainable_variables), self._model.trainable_variables)
            return loss

        self._step = step

    def step(self, x: tf.Tensor) -> None:
        """Train a batch."""
        begin = time.perf_counter()
        float(self._step(x))
        time.sleep(max(0.0, self._step_s - (time.perf_counter() - begin)))


def measure(task: Task, tell: Tell) -> None:
    """Be a rank of the training; rank 0 tells."""
    import hvd_ext as hvd

    hvd.init()
    run(task, tell)
    hvd.shutdown()


def run(task: Task, tell: Tell) -> None:
    """Do it in a job that has begun."""
    import hvd_ext as hvd

    rank, size = hvd.rank(), hvd.size()
    steps = task.count(STEPS, 1)
    count = steps * BATCH * size
    if rank == 0:
        write_pictures(task.path("slow"), count, HEIGHT, WIDTH)
    hvd.barrier()
    paths = write_pictures(task.path("slow"), count, HEIGHT, WIDTH)
    file_bytes = sum(task.path("slow", name).stat().st_size for name in paths) / count
    input_s = max(BATCH * hvd.local_size() * file_bytes / RATE, BATCH * FILE_S)
    source = Source(task.path(f"source-{hvd.cross_rank()}"), RATE, FILE_S)
    network = Network(SHARE * input_s)
    ways = Ways(task, paths, source, rank, size)

    def epoch(data: tf.data.Dataset) -> float:
        """Train an epoch; give the seconds of a step."""
        hvd.barrier()
        begin, done = time.perf_counter(), 0
        for x in data:
            network.step(x)
            done += 1
        if done != steps:
            raise RuntimeError(f"slow source: {done} steps in an epoch, must be {steps}")
        return (time.perf_counter() - begin) / steps

    repeated = ways.repeated(steps)
    epoch(repeated)
    found: dict[str, list[list[float]]] = {way: [] for way in task.contestants}
    steps_s = []
    for turn in range(task.repetitions):
        alone_s = epoch(repeated)
        steps_s.append(alone_s)
        for way in rotated(task.contestants, turn):
            data, close = ways.open(way, turn)
            found[way].append([epoch(data) for _ in range(READ if way == "decode" else 1 + LATER)])
            close()
            if rank == 0:
                tell("", way, TRAINING, [])  # a sign of life
    if rank == 0:
        place = f"{hvd.cross_size()} hosts, {size} ranks"
        facts: dict[str, Any] = {"batch": BATCH, "count": count, "epochs": EPOCHS, "steps": steps, "ranks": size}
        facts |= {"file_bytes": file_bytes, "source_bytes_per_second": RATE, "file_seconds": FILE_S}
        facts |= {"input_seconds": input_s, "step_seconds": steps_s, "step_share": float(np.median(steps_s)) / input_s}
        for way, turns in found.items():
            pairs = list(zip(turns, steps_s, strict=True))
            tell(place, way, FIRST_WAIT, [one[0] - alone_s for one, alone_s in pairs], **facts)
            tell(place, way, LATER_WAIT, [float(np.mean(one[1:])) - alone_s for one, alone_s in pairs], **facts)
            trained_s = [steps * (one[0] + (EPOCHS - 1) * float(np.mean(one[1:]))) for one in turns]
            tell(place, way, TRAINING, trained_s, **facts)


class Ways:
    """Opens the ways to read; all ranks use it alike."""

    def __init__(self, task: Task, paths: list[str], source: Source, rank: int, size: int) -> None:
        """Take what they read."""
        self._task, self._paths, self._source, self._rank, self._size = task, paths, source, rank, size

    def _read(self, path: tf.Tensor) -> tf.Tensor:
        import tensorflow as tf

        return tf.ensure_shape(tf.numpy_function(self._source.read, [path], tf.string), ())

    def open(self, way: str, turn: int) -> tuple[tf.data.Dataset, Callable[[], None]]:
        """Give the batches of this rank, read from the source at first, and a function that closes them."""
        if way == OURS:
            memory = room(len(self._paths), 3 * SIDE * SIDE)
            # each host has a store of its own, which is an attribute of what load calls
            cache = ours(np.array(self._paths), lambda path: decoded(self._read(path), SIDE), memory, version="1")
            return cache.dataset(batch_size=BATCH, shuffle=True, seed=turn), cache.close
        mine = self._paths[self._rank :: self._size]
        folder = self._task.path(f"slow-{way}-{turn}-{self._rank}")
        data = photographs(way, mine, lambda contents: decoded(contents, SIDE), BATCH, folder, self._read)
        return data, lambda: None

    def repeated(self, steps: int) -> tf.data.Dataset:
        """Give one batch again and again."""
        import tensorflow as tf

        batch = np.random.default_rng(self._rank).integers(0, 256, (BATCH, SIDE, SIDE, 3), np.uint8)
        return tf.data.Dataset.from_tensors(batch).repeat(steps)
