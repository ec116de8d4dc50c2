"""The ways in which scripts for Horovod train, with ours: equal weights, and training on the joined batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from tests.ranks.training import (
    assert_same_bits_on_all_ranks,
    assert_trained_alike,
    data,
    fill,
    joined,
    model,
    values,
)

ROWS, BATCH = 12, 4


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
    first = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    again.fit(dataset, steps_per_epoch=3, epochs=4, initial_epoch=epoch, callbacks=first, verbose=0)
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

    def gradients_of(network: keras.Model, x: np.ndarray, y: np.ndarray) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = loss_of(network, x, y)
        return tape.gradient(loss, [variable.value for variable in network.trainable_variables])

    each = []
    for rank in range(hvd.size()):
        begin = model()
        fill(begin.weights, salt=rank)
        each.append(gradients_of(begin, *data(rank, BATCH)))
    reference = model()
    fill(reference.weights)
    mean = [tf.add_n(list(parts)) / hvd.size() for parts in zip(*each, strict=True)]
    plain.apply(mean, reference.trainable_variables)
    step(*(tf.constant(part) for part in data(hvd.rank(), BATCH)), True)
    for salt in (1, 2):
        step(*(tf.constant(part) for part in data(hvd.rank(), BATCH, salt)), False)
        plain.apply(gradients_of(reference, *joined(BATCH, BATCH, salt)), reference.trainable_variables)
    assert_trained_alike(ours, reference)
    assert_same_bits_on_all_ranks(optimizer.variables)


def test_even_and_odd_ranks_train_models_of_their_own() -> None:
    """Each half has its process set, optimizer and collectives; the calls of both have the same names."""
    halves = [list(range(first, hvd.size(), 2)) for first in (0, 1)]
    if hvd.size() == 1:
        mine, halves, sets = hvd.global_process_set, halves[:1], []
    else:
        sets = [hvd.add_process_set(ranks) for ranks in halves]
        mine = next(process_set for process_set in sets if process_set.included())
    members = halves[hvd.rank() % 2]
    ours, reference = model(), model()
    for network in (ours, reference):
        fill(network.weights, salt=members[0])
    ours.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), process_set=mine), "mse")
    reference.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", run_eagerly=True)
    for salt in range(2):
        ours.train_on_batch(*data(hvd.rank(), BATCH, salt))
        parts = [data(rank, BATCH, salt) for rank in members]
        reference.train_on_batch(*(np.concatenate(part) for part in zip(*parts, strict=True)))
    for got, expected in zip(values(ours.weights), values(reference.weights), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)
    prints = hvd.allgather_object(b"".join(value.tobytes() for value in values(ours.weights)))
    assert {prints[rank] for rank in members} == {prints[hvd.rank()]}
    assert len(set(prints)) == len(halves)

    total = hvd.allreduce(tf.constant(float(hvd.rank())), op=hvd.Sum, name="total", process_set=mine)
    assert float(total) == sum(members)
    rows = hvd.allgather(tf.fill([hvd.rank() + 1, 1], hvd.rank()), name="rows", process_set=mine)
    assert rows.numpy().ravel().tolist() == [rank for rank in members for _ in range(rank + 1)]
    assert hvd.broadcast_object(hvd.rank(), root_rank=members[-1], process_set=mine) == members[-1]
    for process_set in sets:
        assert hvd.remove_process_set(process_set)
