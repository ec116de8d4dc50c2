"""Shuffled training that was stopped in the middle of an epoch goes on with the samples that are left, bit for bit."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.keras.checkpoint.callback import Checkpoint, newest
from hvd_ext.state import manifest
from tests.ranks.compare import assert_equal
from tests.ranks.test_checkpoint import Crash, CrashError
from tests.ranks.training import assert_same_bits_on_all_ranks, everything, fill

pytestmark = pytest.mark.ranks(2)

BATCH, STEPS = 2, 5


class Recorded(keras.Model):
    """Trains, and writes down the samples of each step; a sample's first feature is its number."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.seen: list[list[int]] = []
        self.build((None, 3))
        fill(self.trainable_weights)
        self.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse", run_eagerly=True)

    def build(self, shape: Any) -> None:
        """Make the layer's variables."""
        self.dense.build(shape)
        self.built = True

    def call(self, x: Any) -> Any:
        return self.dense(x / 100)

    def noted(self, x: np.ndarray) -> list[Any]:
        """Give what is written down of the samples of a step."""
        return x[:, 0].astype(int).tolist()

    def train_step(self, data: Any) -> Any:
        self.seen.append(self.noted(data[0].numpy()))
        return super().train_step(data)


def samples(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Make samples and their targets."""
    number = np.arange(count, dtype=np.float32)
    return np.stack([number, number**2 / 99, 7 - number], 1), np.stack([number, -number], 1) / 50


def fit(data: tf.data.Dataset, *callbacks: keras.callbacks.Callback) -> Recorded:
    """Train a model for three epochs."""
    model = Recorded()
    model.fit(data, epochs=3, verbose=0, shuffle=False, callbacks=list(callbacks))
    return model


def of_all_ranks(model: Recorded, data: Any, directory: Path, every: int, crash: int) -> list[list[Any]]:
    """Train three epochs, from the newest checkpoint, with a crash after so many steps if any are left.

    Returns:
        What all ranks have written down of each step.
    """
    checkpoint = Checkpoint(directory, every=None, every_steps=every)
    callbacks = hvd.callbacks.synchronized([Crash(crash), checkpoint])
    with contextlib.suppress(CrashError):
        model.fit(data, epochs=3, verbose=0, shuffle=False, callbacks=callbacks)
    ranks = hvd.allgather_object([list(step) for step in model.seen])  # Keras has made it a list of its own
    return [[row for own in step for row in own] for step in zip(*ranks, strict=True)]


def shuffled() -> tf.data.Dataset:
    """Divide and shuffle samples."""
    return hvd.shard(samples((BATCH * STEPS + 1) * hvd.size() - 1), BATCH, shuffle=True, seed=3)


def test_stopped_in_the_middle_of_an_epoch_shuffled_training_goes_on_bit_for_bit(shared: Path) -> None:
    """With steps_per_epoch too: tests/unit/data/test_cursor.py."""
    whole = fit(shuffled(), *hvd.callbacks.synchronized([]))
    rows = np.concatenate(whole.seen)
    assert set(rows % hvd.size()) == {hvd.rank()}  # the same part in every epoch
    assert len(set(rows[: BATCH * STEPS])) == BATCH * STEPS
    assert whole.seen[:STEPS] != whole.seen[STEPS : 2 * STEPS]
    with pytest.raises(CrashError):
        fit(shuffled(), Checkpoint(shared, every_steps=2), Crash(STEPS + 3))
    data = shuffled()
    next(iter(data))  # data that were looked at, and others that were made before, change nothing
    resumed = fit(data, *hvd.callbacks.synchronized([Checkpoint(shared)]))
    assert resumed.seen == whole.seen[STEPS + 2 :]
    assert_equal(everything(resumed), everything(whole))
    assert_same_bits_on_all_ranks(resumed.weights)

    # in a loop of one's own too, whose checkpoints keep the same of the data
    checkpoint, data = Checkpoint(shared), shuffled()
    checkpoint.set_model(Recorded())
    assert checkpoint.restore() == (3, 0)
    next_epoch = [batch[:, 0].astype(int).tolist() for batch, _ in data.as_numpy_iterator()]
    kept, size = manifest.read(newest(shared)).data, hvd.size()
    of_shard = {"parts": size, "samples": 11 * size - 1, "samples of a step": BATCH * size, "seed": 3}
    assert kept == {"shard": of_shard}
    checkpoint.save(4)
    assert manifest.read(newest(shared)).data == kept
    longer = Recorded()
    longer.fit(shuffled(), initial_epoch=3, epochs=4, verbose=0, callbacks=hvd.callbacks.synchronized([]))
    assert next_epoch == longer.seen


def test_arrays_of_text_and_of_ones_own_are_shuffled_too() -> None:
    rank = hvd.rank()
    own = {"n": np.arange(4 + rank), "t": np.array([f"é{number}" for number in range(4 + rank)])}
    seen = [batch for _ in range(2) for batch in hvd.shard(own, 2, shuffle=True, own=True).as_numpy_iterator()]
    assert [len(batch["n"]) for batch in seen] == [2] * 4
    assert all([f"é{n}".encode() for n in batch["n"]] == batch["t"].tolist() for batch in seen)
    few = hvd.shard(np.arange(3 * hvd.size()), 2, shuffle=True, steps=4)
    (first, second) = (np.concatenate(list(few.as_numpy_iterator())).tolist() for _ in range(2))
    assert sorted(first[:3]) == list(range(rank, 3 * hvd.size(), hvd.size()))
    assert len(first) == 8
    assert set(second) == set(first)
