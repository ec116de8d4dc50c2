"""Training on several ranks is training on the joined batch, in every way in which Keras 3 can train."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
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


@pytest.mark.parametrize("how", [{}, {"run_eagerly": True}, {"steps_per_execution": 2}], ids=str)
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
    from hvd_ext.keras.optimizers.optimizer import channels

    (channel,) = channels(wrapped)
    assert len(channel.layout.buckets) > 1
    assert buckets_sent() - before == 2 * len(channel.layout.buckets)
    assert_trained_alike(ours, trained_on_joined_batches(optimizer()))


@pytest.mark.slow
def test_gradient_accumulation_works_eagerly() -> None:
    def optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(0.05, gradient_accumulation_steps=2)

    ours = model()
    ours.compile(hvd.DistributedOptimizer(optimizer()), "mse", run_eagerly=True)
    fit(ours)
    assert_trained_alike(ours, trained_on_joined_batches(optimizer()))


def test_train_on_batch_follows_batches_of_new_shapes() -> None:
    ours, reference = model(), model()
    ours.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)), "mse")
    reference.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", run_eagerly=True)
    for salt, rows in enumerate((4, 4, 2, 3, 4)):
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


def step_of(ours: keras.Model, optimizer: keras.optimizers.Optimizer, by_apply: bool) -> object:
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(ours(x, training=True) - y))
        gradients = tape.gradient(loss, ours.trainable_variables)
        if by_apply:
            optimizer.apply(gradients, ours.trainable_variables)
        else:
            optimizer.apply_gradients(zip(gradients, ours.trainable_variables, strict=True))

    return step


@pytest.mark.parametrize(
    ("traced", "by_apply"),
    [
        pytest.param(False, False, id="eager, apply_gradients", marks=pytest.mark.slow),
        pytest.param(False, True, id="eager, apply"),
        pytest.param(True, False, id="tf.function, apply_gradients"),
        pytest.param(True, True, id="tf.function, apply", marks=pytest.mark.slow),
    ],
)
def test_a_loop_of_ones_own_equals_training_on_the_joined_batch(traced: bool, by_apply: bool) -> None:
    ours, reference = model(), model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.02))
    step = step_of(ours, optimizer, by_apply)
    step = tf.function(step) if traced else step
    plain = step_of(reference, keras.optimizers.Adam(0.02), by_apply)
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


def test_a_frozen_layer_stays_and_the_others_train() -> None:
    def frozen() -> keras.Model:
        result = model()
        result.layers[0].trainable = False
        return result

    ours, reference = frozen(), frozen()
    start = values(ours.layers[0].weights)
    ours.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    reference.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    fit(ours)
    x, y = joined(ROWS, BATCH)
    reference.fit(x, y, batch_size=BATCH * hvd.size(), epochs=2, shuffle=False, verbose=0)
    for before, after in zip(start, values(ours.layers[0].weights), strict=True):
        np.testing.assert_array_equal(before, after)
    for got, expected in zip(values(ours.weights), values(reference.weights), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)
    assert_same_bits_on_all_ranks(ours.weights)


@pytest.mark.slow
def test_unfreezing_a_layer_and_compiling_again_keeps_the_optimizer() -> None:
    ours = model()
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(ours.trainable_variables)
    optimizer = hvd.DistributedOptimizer(optimizer)
    for trainable in (False, True):
        ours.layers[0].trainable = trainable
        ours.compile(optimizer, "mse")
        start = values(ours.layers[0].weights)
        fit(ours, epochs=1)
        assert trainable != np.array_equal(start[0], values(ours.layers[0].weights)[0])
    assert_same_bits_on_all_ranks(ours.weights)


@pytest.mark.parametrize(
    "eagerly", [pytest.param(False, id="graph"), pytest.param(True, id="eager", marks=pytest.mark.slow)]
)
def test_an_embedding_equals_training_on_the_joined_batch(eagerly: bool) -> None:
    def embedding() -> keras.Model:
        result = keras.Sequential(
            [keras.layers.Input((3,), dtype="int32"), keras.layers.Embedding(40, 4), keras.layers.Flatten()]
            + [keras.layers.Dense(TARGETS)]
        )
        fill(result.weights)
        return result

    def words(rank: int) -> np.ndarray:
        return (np.arange(12).reshape(4, 3) * 3 + rank * 4) % 40

    ours, reference = embedding(), embedding()
    ours.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse", run_eagerly=eagerly)
    reference.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", run_eagerly=True)
    for salt in range(3):
        ours.train_on_batch(words(hvd.rank()), data(hvd.rank(), 4, salt)[1])
        every = np.concatenate([words(rank) for rank in range(hvd.size())])
        reference.train_on_batch(every, joined(4, 4, salt)[1])
    assert_trained_alike(ours, reference)


def test_two_optimizers_in_one_step_equal_training_on_the_joined_batch() -> None:
    """As in a generative adversarial network: each has its own variables, and their steps meet in one graph."""
    pairs = [[keras.Variable(np.full(n, 0.5, np.float32), name=f"v{n}") for n in (7, 70)] for _ in range(2)]
    ours = [hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))]
    plain = [keras.optimizers.Adam(0.1), keras.optimizers.SGD(0.1)]

    def step(variables: list[keras.Variable], optimizers: list[keras.optimizers.Optimizer], x: tf.Tensor) -> None:
        with tf.GradientTape(persistent=True) as tape:
            a, b = (tf.reduce_sum(variable * variable) for variable in variables)
            first, second = a * tf.reduce_mean(x) - b, b * tf.reduce_mean(x * x) - a
        gradients = [tape.gradient(first, variables[:1]), tape.gradient(second, variables[1:])]
        optimizers[0].apply(gradients[0], variables[:1])
        optimizers[1].apply(gradients[1], variables[1:])

    traced = tf.function(lambda x: step(pairs[0], ours, x))
    for salt in range(4):
        traced(tf.constant(data(hvd.rank(), 4, salt)[0]))
        step(pairs[1], plain, tf.constant(joined(4, 4, salt)[0]))
    assert_same_bits_on_all_ranks(pairs[0])
    for got, expected in zip(values(pairs[0]), values(pairs[1]), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5)


def test_a_gradient_that_is_not_a_number_on_one_rank_reaches_all() -> None:
    ours = model()
    ours.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x, y = data(hvd.rank(), BATCH)
    ours.train_on_batch(x, y * (np.nan if hvd.rank() == hvd.size() - 1 else 1))
    assert all(np.isnan(value).all() for value in values(ours.layers[-1].weights))


@pytest.mark.slow
def test_bfloat16_mixed_precision_trains_alike_on_all_ranks() -> None:
    ours = model(dtype="mixed_bfloat16")
    start = values(ours.weights)
    ours.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.02)), "mse")
    fit(ours)
    assert_same_bits_on_all_ranks(ours.weights)
    assert not np.array_equal(start[0], values(ours.weights)[0])


def test_a_step_traced_before_shutdown_says_so_and_a_new_one_goes_on() -> None:
    from hvd_ext.job import runtime

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
