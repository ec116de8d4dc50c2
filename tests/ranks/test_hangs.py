"""What usually hangs in data parallelism: two optimizers, validation of uneven length, variables of one rank."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import InvalidError
from tests.ranks.compare import assert_close
from tests.ranks.training import FEATURES, TARGETS, assert_same_bits_on_all_ranks, data, fill, joined, model, values

pytestmark = pytest.mark.ranks(2)

ROWS, BATCH = 8, 4


class Adversaries(keras.Model):
    """A generator and a discriminator, each with an optimizer of its own, trained in one step."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        layers = keras.layers
        self.generator = keras.Sequential([layers.Input((TARGETS,)), layers.Dense(FEATURES)], name="generator")
        self.discriminator = keras.Sequential(
            [layers.Input((FEATURES,)), layers.Dense(4, activation="tanh"), layers.Dense(1)], name="discriminator"
        )
        for number, part in enumerate((self.generator, self.discriminator)):
            fill(part.weights, salt=number)
        self.makes = wrap(keras.optimizers.Adam(0.02))
        self.tells = wrap(keras.optimizers.SGD(0.1, momentum=0.5))

    def call(self, noise: Any) -> Any:
        return self.discriminator(self.generator(noise))

    def compile(self, **options: Any) -> None:
        super().compile(optimizer=None, **options)

    def train_step(self, batch: Any) -> dict[str, Any]:
        real, noise = batch
        with tf.GradientTape() as tape:
            doubt = tf.reduce_mean(tf.nn.softplus(-self.discriminator(real, training=True)))
            belief = tf.reduce_mean(tf.nn.softplus(self.discriminator(self.generator(noise), training=True)))
            told = doubt + belief
        weights = self.discriminator.trainable_variables
        self.tells.apply(tape.gradient(told, weights), weights)
        with tf.GradientTape() as tape:
            made = tf.reduce_mean(tf.nn.softplus(-self.discriminator(self.generator(noise, training=True))))
        weights = self.generator.trainable_variables
        self.makes.apply_gradients(zip(tape.gradient(made, weights), weights, strict=True))
        return {"told": told, "made": made}


def test_two_optimizers_train_two_models_as_on_the_joined_batch() -> None:
    ours, plain = Adversaries(hvd.DistributedOptimizer), Adversaries(lambda optimizer: optimizer)
    # the broadcast makes them rank 0's
    fill(ours.generator.weights, salt=hvd.rank())
    ours.makes.learning_rate, ours.tells.learning_rate = 0.02 + hvd.rank(), 0.1 + hvd.rank()
    ours.compile()
    plain.compile(run_eagerly=True)
    x, y = data(hvd.rank(), ROWS)
    callbacks = hvd.callbacks.synchronized([])
    history = ours.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    expected = plain.fit(*joined(ROWS, BATCH), batch_size=BATCH * hvd.size(), epochs=2, shuffle=False, verbose=0)
    assert_same_bits_on_all_ranks([*ours.weights, *ours.makes.variables, *ours.tells.variables])
    assert_close(ours.weights, plain.weights, rtol=1e-4, atol=1e-5)
    assert not np.array_equal(values(plain.generator.weights)[0], values(Adversaries(lambda one: one).weights)[0])
    assert history.history["told"][-1] == pytest.approx(expected.history["told"][-1], rel=1e-4)


def test_validation_evaluation_and_prediction_may_be_uneven() -> None:
    ours = model()
    ours.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", run_eagerly=True)
    rows = 2 + 3 * hvd.rank()
    validation = hvd.shard(data(0, 5 * hvd.size() - 1), 2, remainder="uneven")
    history = ours.fit(
        hvd.shard(data(0, ROWS * hvd.size() + 1), BATCH),
        epochs=2,
        verbose=0,
        validation_data=validation,
        callbacks=hvd.callbacks.synchronized([]),
    )
    everything = ours.evaluate(*data(0, 5 * hvd.size() - 1), verbose=0)
    assert history.history["val_loss"][-1] == pytest.approx(everything, rel=1e-5)
    assert len(ours.predict(data(hvd.rank(), rows)[0], batch_size=2, verbose=0)) == rows
    ours.evaluate(*data(hvd.rank(), rows), batch_size=2, verbose=0)
    assert_same_bits_on_all_ranks(ours.weights)


@pytest.mark.parametrize("scaled", [False, True])
def test_local_variables_and_their_slots_stay_each_ranks_own(scaled: bool) -> None:
    ours = model()
    fill(ours.weights, salt=hvd.rank())
    kept = ours.weights[0]
    inner = keras.optimizers.SGD(0.0, momentum=1.0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(inner) if scaled else inner)
    optimizer.build(ours.trainable_variables)
    momentums = getattr(optimizer, "inner_optimizer", optimizer).momentums
    for slot in momentums:
        slot.assign(np.full(slot.shape, hvd.rank() + 1.0))
    ours.compile(optimizer, "mse")
    before = values([kept, *ours.weights[1:]])
    callback = hvd.BroadcastGlobalVariablesCallback(local_variables=kept.value if scaled else kept)
    callback.set_model(ours)
    callback.set_params({})
    callback.on_train_begin()
    np.testing.assert_array_equal(kept.numpy(), before[0])
    assert_same_bits_on_all_ranks(ours.weights[1:])
    assert [float(slot.numpy().max()) for slot in momentums] == [hvd.rank() + 1.0, 1.0, 1.0, 1.0]
    assert_same_bits_on_all_ranks([optimizer.learning_rate, *momentums[1:]])
    with pytest.raises(InvalidError, match="local_variables"):
        hvd.BroadcastGlobalVariablesCallback(local_variables=[3])
