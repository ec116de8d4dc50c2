"""The ways in which scripts for Horovod train, with ours: equal weights, and training on the joined batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

import hvd_ext as hvd
from tests.ranks.training import assert_same_bits_on_all_ranks, assert_trained_alike, data, fill, joined, model

pytestmark = pytest.mark.ranks(2)

ROWS, BATCH = 8, 4


class Rates(keras.callbacks.Callback):
    """Notes the learning rate of every step, or sets it to what was noted."""

    def __init__(self, noted: list[float] | None = None) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.noted = noted

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self.noted is not None:
            self.model.optimizer.learning_rate = self.noted[len(self.seen)]
        self.seen.append(float(self.model.optimizer.learning_rate))


def test_fit_with_horovods_callbacks_then_resuming_from_rank_0s_file(tmp_path: Path) -> None:
    """A scaled rate, warm-up, broadcast, averaged metrics, checkpoints of rank 0; then a second script goes on."""
    scaled = 0.01 * hvd.size()
    ours = model()
    fill(ours.weights, salt=hvd.rank())  # the broadcast makes them equal
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.Adam(scaled), backward_passes_per_step=1, average_aggregated_gradients=True
    )
    ours.compile(loss="mse", optimizer=optimizer, metrics=["mae"])
    rates = Rates()
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled, warmup_epochs=2, verbose=0),
        rates,
    ]
    if hvd.rank() == 0:
        callbacks.append(keras.callbacks.ModelCheckpoint(str(tmp_path / "checkpoint-{epoch}.keras")))
    dataset = tf.data.Dataset.from_tensor_slices(data(hvd.rank(), ROWS)).repeat().batch(BATCH)
    kept = ours.fit(dataset, steps_per_epoch=ROWS // BATCH, epochs=3, callbacks=callbacks, verbose=0)

    reference = model()
    reference.compile(keras.optimizers.Adam(scaled), "mse", run_eagerly=True)
    x, y = joined(ROWS, BATCH)
    plain = {"batch_size": BATCH * hvd.size(), "shuffle": False, "verbose": 0}
    reference.fit(x, y, epochs=3, callbacks=[Rates(rates.seen)], **plain)
    assert_trained_alike(ours, reference)
    assert rates.seen[-1] == pytest.approx(scaled)
    assert len(set(hvd.allgather_object(kept.history["loss"][-1]))) == 1

    # the second script: rank 0 looks for files, all learn the epoch, and all have rank 0's state
    found = max((int(path.stem.split("-")[1]) for path in tmp_path.glob("*.keras")), default=0)
    epoch = hvd.broadcast_object(found, root_rank=0, name="resume_from_epoch")
    assert epoch == 3
    if hvd.rank() == 0:  # the others have no such file
        again = hvd.load_model(tmp_path / f"checkpoint-{epoch}.keras")
    else:
        again = model()
        fill(again.weights, salt=3)
        again.compile(loss="mse", optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(scaled)), metrics=["mae"])
    again.run_eagerly = True
    first = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    again.fit(dataset, steps_per_epoch=ROWS // BATCH, epochs=4, initial_epoch=epoch, callbacks=first, verbose=0)
    reference.fit(x, y, epochs=1, **plain)
    assert_trained_alike(again, reference)


def test_a_loop_with_a_tape_that_broadcasts_after_its_first_batch() -> None:
    """The ranks begin with different weights; the first step is taken from them, then all have rank 0's."""
    ours = model()
    fill(ours.weights, salt=hvd.rank())
    optimizer, plain = keras.optimizers.Adam(0.02), keras.optimizers.Adam(0.02)

    def loss_of(network: keras.Model, x: Any, y: Any) -> tf.Tensor:
        return tf.reduce_mean(tf.square(network(x, training=True) - y))

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor, first: bool) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(ours, x, y)
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, ours.trainable_variables)
        optimizer.apply_gradients(zip(gradients, ours.trainable_variables, strict=True))
        if first:
            hvd.broadcast_variables(ours.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
        return loss

    step(*(tf.constant(part) for part in data(hvd.rank(), BATCH)), True)
    assert_same_bits_on_all_ranks([*ours.variables, *optimizer.variables])
    reference = model()
    plain.build(reference.trainable_variables)
    for variable, value in zip(
        [*reference.variables, *plain.variables], ours.variables + optimizer.variables, strict=True
    ):
        variable.assign(value)
    for salt in (1, 2):
        step(*(tf.constant(part) for part in data(hvd.rank(), BATCH, salt)), False)
        x, y = joined(BATCH, BATCH, salt)
        with tf.GradientTape() as tape:
            loss = loss_of(reference, x, y)
        plain.apply(tape.gradient(loss, reference.trainable_variables), reference.trainable_variables)
    assert_trained_alike(ours, reference)
    assert_same_bits_on_all_ranks(optimizer.variables)
