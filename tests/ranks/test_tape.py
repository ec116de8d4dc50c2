"""Loops of one's own: a distributed tape and a plain optimizer train as one process on the joined batch."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext import state
from hvd_ext.tensorflow.gradients import tape_reducers
from tests.ranks.compare import assert_close
from tests.ranks.training import assert_trained_alike, data, joined, model

pytestmark = pytest.mark.ranks(1, 2)

ROWS, BATCH = 12, 4
FUNCTIONS = pytest.mark.parametrize("traced", [False, True], ids=["eager", "tf.function"])


def trained(x: np.ndarray, y: np.ndarray, batch: int, tape_of: Callable[[], tf.GradientTape], traced: bool) -> Any:
    """Train a model in a loop; the tape records before or after it is wrapped."""
    network = model()
    optimizer = keras.optimizers.Adam(0.05, global_clipnorm=0.25, use_ema=True, ema_overwrite_frequency=2)
    optimizer.build(network.trainable_variables)

    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tape_of() as tape:
            loss = tf.reduce_mean(tf.square(network(x) - y))
        gradients = tape.gradient(loss, network.trainable_variables)
        optimizer.apply_gradients(zip(gradients, network.trainable_variables, strict=True))

    run = in_way(step, traced)
    for start in range(0, len(x), batch):
        run(tf.constant(x[start : start + batch]), tf.constant(y[start : start + batch]))
    return network


@FUNCTIONS
def test_a_loop_with_a_plain_optimizer_equals_one_process_on_the_joined_batch(traced: bool) -> None:
    ours = trained(*data(hvd.rank(), ROWS), BATCH, lambda: hvd.DistributedGradientTape(tf.GradientTape()), traced)
    reference = trained(*joined(ROWS, BATCH), BATCH * hvd.size(), tf.GradientTape, False)
    assert_trained_alike(ours, reference)


def scalars(count: int) -> list[tf.Variable]:
    return [tf.Variable([1.0, 2.0], name=f"v{number}") for number in range(count)]


def mean_rank() -> float:
    return (hvd.size() - 1) / 2


def in_way(step: Callable[..., Any], traced: bool) -> Callable[..., Any]:
    return tf.function(step) if traced else step


@FUNCTIONS
def test_wrapped_afterwards_nested_sources_and_a_sum(traced: bool) -> None:
    first, second = scalars(2)
    third = keras.Variable([4.0], name="third")

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(first * (hvd.rank() + 1.0)) + 3.0 * tf.reduce_sum(third) * hvd.rank()
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, bucket_nbytes=4)
        return tape.gradient(loss, {"a": first, "b": [second, (third, first)]})

    gradients = in_way(step, traced)()
    total = hvd.size() * mean_rank()
    assert gradients["a"].numpy().tolist() == [total + hvd.size()] * 2
    assert gradients["b"][0] is None
    assert gradients["b"][1][0].numpy().tolist() == [3 * total]
    assert gradients["b"][1][1].numpy().tolist() == [total + hvd.size()] * 2


@FUNCTIONS
def test_gradients_that_only_some_ranks_have_count_as_zeros(traced: bool) -> None:
    first, second = scalars(2)

    def step() -> Any:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(first * 8.0) if hvd.rank() == 0 else tf.constant(0.0)
        return tape.gradient(loss, [first, second])

    one, none = in_way(step, traced)()
    np.testing.assert_allclose(one.numpy(), [8 / hvd.size()] * 2, rtol=1e-6)
    assert none is None
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(first)
    assert tape.gradient(loss, [first, second], unconnected_gradients="zero")[1].numpy().tolist() == [0.0, 0.0]


def test_a_persistent_tape_gives_gradients_of_other_sources_and_keeps_what_it_opened() -> None:
    first, second = scalars(2)
    gc.collect()
    before = len(tape_reducers._reducers)
    for step in range(3):
        with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
            loss = tf.reduce_sum(first * second * (hvd.rank() + step + 0.0))
        both = tape.gradient(loss, [first, second])
        alone = tape.gradient(loss, second)
        assert np.allclose(both[1], first * (mean_rank() + step))
        assert np.array_equal(alone, both[1])
        generic = tape.gradient(loss, [second], None, True)
        assert np.array_equal(generic[0], alone)
        # jacobians are this rank's own
        assert np.allclose(tape.jacobian(loss, second), first * (hvd.rank() + step + 0.0))
        assert len(tape.watched_variables()) == 2
    assert len(tape_reducers._reducers) - before == 3
    channels = [channel for one in list(tape_reducers._reducers.values())[before:] for channel in one.reducer.channels]
    assert len(channels) == 3
    del first, second, both, alone, generic, tape, loss
    gc.collect()
    assert len(tape_reducers._reducers) == before
    assert not any(channel.is_open for channel in channels)


def test_local_sources_may_be_variables_of_keras_or_those_of_tensorflow_inside_of_them() -> None:
    variables = [keras.Variable([1.0, 2.0], name=f"v{number}") for number in range(3)]
    tape = hvd.DistributedGradientTape(tf.GradientTape())
    tape.register_local_source(variables[0])
    tape.register_local_source(variables[1].value)
    with tape:
        loss = tf.add_n([tf.reduce_sum(variable * variable) for variable in variables]) * (hvd.rank() + 1.0)
    gradients = tape.gradient(loss, [variable.value for variable in variables])
    own, mean = (hvd.rank() + 1.0) / hvd.size(), mean_rank() + 1
    assert_close(gradients, [[2 * factor, 4 * factor] for factor in (own, own, mean)])


@pytest.mark.parametrize("as_dense", [False, True])
def test_embeddings_in_a_function_are_reduced_as_slices_or_made_dense(as_dense: bool) -> None:
    table, bias = tf.Variable(tf.zeros((7, 2)), name="table"), tf.Variable([0.0, 0.0], name="bias")
    rows = tf.constant([hvd.rank() % 7, 3, 3])

    @tf.function
    def step() -> Any:
        with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum, sparse_as_dense=as_dense) as tape:
            loss = tf.reduce_sum(tf.gather(table, rows) * [[1.0], [2.0], [4.0]]) + tf.reduce_sum(bias)
        return tape.gradient(loss, [table, bias])

    expected = np.zeros((7, 2))
    for rank in range(hvd.size()):
        expected[rank % 7] += 1
        expected[3] += 6
    slices, dense = step()
    assert isinstance(slices, tf.IndexedSlices) != as_dense
    np.testing.assert_array_equal(tf.convert_to_tensor(slices), expected)
    assert dense.numpy().tolist() == [hvd.size()] * 2


@FUNCTIONS
def test_a_reduced_gradient_may_be_differentiated_again(traced: bool) -> None:
    (variable,) = scalars(1)
    table = tf.Variable(tf.ones((3, 1)), name="table")

    def step() -> Any:
        with tf.GradientTape() as outer:
            with hvd.DistributedGradientTape(tf.GradientTape()) as inner:
                loss = (hvd.rank() + 1.0) * tf.reduce_sum(variable**3) + tf.reduce_sum(tf.gather(table, [1]))
            gradient, _ = inner.gradient(loss, [variable, table])
            penalty = tf.reduce_sum(gradient) * (hvd.rank() + 2.0)
        return gradient, outer.gradient(penalty, variable)

    gradient, second = in_way(step, traced)()
    np.testing.assert_allclose(gradient, 3 * variable.numpy() ** 2 * (mean_rank() + 1), rtol=1e-6)
    np.testing.assert_allclose(second, 6 * variable.numpy() * (hvd.rank() + 1) * (mean_rank() + 2), rtol=1e-6)


def test_steps_of_a_loop_in_a_function_keep_their_order() -> None:
    (variable,) = scalars(1)

    @tf.function
    def loop() -> None:
        for step in tf.range(5):
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = tf.reduce_sum(variable * tf.cast(step, tf.float32) * (hvd.rank() + 1.0))
            variable.assign_sub(tape.gradient(loss, variable))

    loop()
    np.testing.assert_allclose(variable.numpy(), np.array([1.0, 2.0]) - 10 * (mean_rank() + 1), rtol=1e-6)


def test_a_tensor_and_an_argument_of_a_function_may_be_sources() -> None:
    @tf.function
    def step(variable: tf.Variable, x: tf.Tensor) -> Any:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            tape.watch(x)
            loss = tf.reduce_sum(variable * x)
        return tape.gradient(loss, [variable, x])

    (variable,) = scalars(1)
    for number in range(3):
        x = tf.constant([hvd.rank() + 1.0 + number, 2.0])
        to_variable, to_x = step(variable, x)
        np.testing.assert_allclose(to_variable.numpy(), [mean_rank() + 1.0 + number, 2.0], rtol=1e-6)
        np.testing.assert_allclose(to_x.numpy(), [1.0, 2.0], rtol=1e-6)
        if number == 0:
            gc.collect()


def test_a_process_set_reduces_among_itself_and_outsiders_keep_their_own() -> None:
    if hvd.size() == 1:
        pytest.skip("needs two ranks")
    inside = hvd.add_process_set(range(1, hvd.size()))
    table, bias = tf.Variable(tf.zeros((3, 1)), name="table"), tf.Variable([1.0], name="bias")
    with hvd.DistributedGradientTape(tf.GradientTape(), process_set=inside) as tape:
        loss = tf.reduce_sum((tf.gather(table, [1, 1]) + bias) * (hvd.rank() + 1.0))
    slices, dense = tape.gradient(loss, [table, bias])
    assert hasattr(dense, "_hvd_ext") == bool(hvd.rank())
    mean = (hvd.size() + 2) / 2 if hvd.rank() else 1.0
    assert_close([dense, tf.convert_to_tensor(slices)], [[2 * mean], [[0], [2 * mean], [0]]])
    hvd.remove_process_set(inside)


def test_training_goes_on_after_shutdown_and_init() -> None:
    (variable,) = scalars(1)
    for _ in range(2):
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(variable * float(hvd.rank()))
        np.testing.assert_allclose(tape.gradient(loss, variable).numpy(), [mean_rank()] * 2)
        saved = {owner: own for owner, own in state.collect().items() if "tape" in owner}
        assert saved or hvd.size() == 1  # one rank plans nothing
        hvd.shutdown()
        hvd.init()
        state.restore(saved)  # the tape's channel is closed: its layout waits for the next one
