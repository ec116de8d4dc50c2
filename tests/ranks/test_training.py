"""Training on several ranks is training on the joined batch, in every way in which Keras 3 can train."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.job import runtime
from hvd_ext.keras.optimizers.optimizer import channels
from tests.ranks.compare import are_equal
from tests.ranks.training import (
    TARGETS,
    assert_same_bits_on_all_ranks,
    assert_trained_alike,
    buckets_sent,
    data,
    fill,
    joined,
    model,
    values,
)

pytestmark = pytest.mark.ranks(1, 2)

ROWS, BATCH = 12, 4


def trained_on_joined_batches(optimizer: keras.optimizers.Optimizer, epochs: int = 2) -> keras.Model:
    reference = model()
    reference.compile(optimizer, "mse", run_eagerly=True)
    x, y = joined(ROWS, BATCH)
    reference.fit(x, y, batch_size=BATCH * hvd.size(), epochs=epochs, shuffle=False, verbose=0)
    return reference


def fit(ours: keras.Model, epochs: int = 2) -> None:
    x, y = data(hvd.rank(), ROWS)
    ours.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)


@pytest.mark.parametrize("how", [{"run_eagerly": True}, {"steps_per_execution": 2}], ids=str)
def test_fit_equals_training_on_the_joined_batch(how: dict[str, object]) -> None:
    ours = model()
    ours.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.02)), "mse", **how)
    fit(ours)
    assert_trained_alike(ours, trained_on_joined_batches(keras.optimizers.Adam(0.02)))


def test_gradient_accumulation_communicates_on_update_steps_only() -> None:
    def optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=3, global_clipnorm=0.5)

    ours = model()
    wrapped = hvd.DistributedOptimizer(optimizer(), bucket_nbytes=64)
    ours.compile(wrapped, "mse")
    before = buckets_sent()
    fit(ours)
    (channel,) = channels(wrapped)
    assert len(channel.layout.buckets) > 1
    assert buckets_sent() - before == 2 * len(channel.layout.buckets)
    assert_trained_alike(ours, trained_on_joined_batches(optimizer()))


def test_train_on_batch_follows_batches_of_new_shapes() -> None:
    ours, reference = model(), model()
    ours.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)), "mse")
    reference.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", run_eagerly=True)
    for salt, rows in enumerate((4, 2, 3, 4)):
        ours.train_on_batch(*data(hvd.rank(), rows, salt))
        reference.train_on_batch(*joined(rows, rows, salt))
    assert_trained_alike(ours, reference)


def test_ranks_may_trace_again_at_different_steps() -> None:
    ours = model()
    ours.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
    for step in range(4):
        rows = 3 if step % (hvd.rank() + 2) else 4 + hvd.rank()
        ours.train_on_batch(*data(hvd.rank(), rows, step))
    assert_same_bits_on_all_ranks(ours.weights)


@pytest.mark.parametrize(
    ("traced", "by_apply"), [(False, True), (True, False)], ids=["eager, apply", "tf.function, apply_gradients"]
)
def test_a_loop_of_ones_own_equals_training_on_the_joined_batch(traced: bool, by_apply: bool) -> None:
    def step_of(network: keras.Model, optimizer: keras.optimizers.Optimizer) -> Callable[..., None]:
        def step(x: tf.Tensor, y: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(network(x, training=True) - y))
            gradients = tape.gradient(loss, network.trainable_variables)
            if by_apply:
                optimizer.apply(gradients, network.trainable_variables)
            else:
                optimizer.apply_gradients(zip(gradients, network.trainable_variables, strict=True))

        return step

    ours, reference = model(), model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.02))
    step = step_of(ours, optimizer)
    step = tf.function(step) if traced else step
    plain = step_of(reference, keras.optimizers.Adam(0.02))
    for salt in range(3):
        step(*(tf.constant(part) for part in data(hvd.rank(), BATCH, salt)))
        plain(*joined(BATCH, BATCH, salt))
    assert_trained_alike(ours, reference)
    assert optimizer.iterations == 3


def test_steps_in_one_graph_keep_their_order_though_nothing_else_connects_them() -> None:
    """The gradients do not depend on the variable: only the step counter orders the steps."""
    variable = keras.Variable(np.zeros(300, np.float32))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), bucket_nbytes=400)

    @tf.function
    def steps(count: tf.Tensor) -> None:
        for step in tf.range(count):
            gradient = tf.range(300, dtype=tf.float32) * tf.cast(step + 1, tf.float32) * float(hvd.rank() + 1)
            optimizer.apply([gradient], [variable])
            optimizer.apply([2 * gradient], [variable])

    steps(tf.constant(6))
    mean_rank = sum(range(1, hvd.size() + 1)) / hvd.size()
    np.testing.assert_allclose(variable.numpy(), -np.arange(300) * 21 * 3 * mean_rank, rtol=1e-6)
    assert_same_bits_on_all_ranks([variable])
    assert optimizer.iterations == 12


def test_a_frozen_layer_stays_and_trains_after_another_compile_with_the_same_optimizer() -> None:
    ours, reference = model(), model()
    start = values(ours.layers[0].weights)
    optimizer, plain = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1)
    optimizer.build(ours.trainable_variables)
    optimizer = hvd.DistributedOptimizer(optimizer)
    plain.build(reference.trainable_variables)
    for trainable in (False, True):
        for made, trainer, eagerly in ((ours, optimizer, False), (reference, plain, True)):
            made.layers[0].trainable = trainable
            made.compile(trainer, "mse", run_eagerly=eagerly)
        ours.train_on_batch(*data(hvd.rank(), BATCH))
        reference.train_on_batch(*joined(BATCH, BATCH))
        assert are_equal(start, values(ours.layers[0].weights)) != trainable
    assert_trained_alike(ours, reference)


def test_an_embedding_equals_training_on_the_joined_batch() -> None:
    def embedding() -> keras.Model:
        layers = keras.layers
        result = keras.Sequential(
            [layers.Input((3,), dtype="int32"), layers.Embedding(40, 4), layers.Flatten(), layers.Dense(TARGETS)]
        )
        fill(result.weights)
        return result

    def words(rank: int) -> np.ndarray:
        return (np.arange(12).reshape(4, 3) * 3 + rank * 4) % 40

    ours, reference = embedding(), embedding()
    ours.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse", run_eagerly=True)
    reference.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", run_eagerly=True)
    every = np.concatenate([words(rank) for rank in range(hvd.size())])
    for salt in range(3):
        ours.train_on_batch(words(hvd.rank()), data(hvd.rank(), 4, salt)[1])
        reference.train_on_batch(every, joined(4, 4, salt)[1])
    assert_trained_alike(ours, reference)


def test_a_step_traced_before_shutdown_says_so_and_a_new_one_goes_on() -> None:
    ours = model()
    ours.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    ours.train_on_batch(*data(hvd.rank(), BATCH))
    settings = runtime.current().options
    hvd.shutdown()
    hvd.init(settings)
    with pytest.raises(tf.errors.AbortedError, match="must be traced again"):
        ours.train_on_batch(*data(hvd.rank(), BATCH))
    ours.make_train_function(force=True)
    ours.train_on_batch(*data(hvd.rank(), BATCH))
    assert_same_bits_on_all_ranks(ours.weights)
    assert ours.optimizer.iterations == 2
