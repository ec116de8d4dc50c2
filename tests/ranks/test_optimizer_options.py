"""Horovod's options of the optimizer: each does what it says, and equals training on the joined batch."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import InvalidError
from hvd_ext.keras.optimizers.optimizer import channels
from tests.ranks.steps import assert_equals_plain_training, averaged, gradients, variables
from tests.ranks.training import assert_same_bits_on_all_ranks, data, fill, values


@pytest.mark.parametrize("keywords", [{}, {"compression": hvd.Compression.fp16, "groups": 2}], ids=str)
def test_a_predivided_average_is_the_average(keywords: dict[str, object]) -> None:
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.5, momentum=0.5), gradient_predivide_factor=4.0, **keywords
    )
    rtol = 2e-3 if keywords else 2e-5  # halves have 11 bits
    assert_equals_plain_training(optimizer, keras.optimizers.SGD(0.5, momentum=0.5), rtol=rtol)


def test_groups_are_buckets_one_for_each_of_their_dtypes_and_names_may_repeat() -> None:
    def weights() -> list[keras.Variable]:
        dtypes = ("float32", "float64", "float32", "float32")
        found = [keras.Variable(np.zeros(4), dtype=dtype, name="kernel") for dtype in dtypes]
        fill(found)
        return found

    gradient = tf.range(4.0) - hvd.rank()
    expected = [value - np.arange(4) + (hvd.size() - 1) / 2 for value in values(weights())]
    for groups, buckets in (
        (2, {(0,), (1,), (3, 2)}),  # equal bytes: v1 is of float64
        (lambda own: [[own[3], own[1].value, own[0]]], {(3, 0), (1,), (2,)}),
        (lambda own: [[own[2]], [variables()[0]]], {(2,), (3, 0), (1,)}),
    ):
        ours = weights()
        given = groups(ours) if callable(groups) else groups
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), groups=given)
        optimizer.apply([tf.cast(gradient, variable.dtype) for variable in ours], ours)
        (channel,) = channels(optimizer)
        assert {tuple(sorted(bucket.tensors, reverse=True)) for bucket in channel.layout.buckets} == buckets
        for got, wanted in zip(values(ours), expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-6)


@pytest.mark.parametrize("scaled", [True, False])
def test_local_variables_keep_their_gradients_and_may_differ_from_rank_to_rank(scaled: bool) -> None:
    ours = variables()
    own = keras.Variable(np.zeros((hvd.rank() + 1, 2)), dtype="float32", name=f"own{hvd.rank()}")
    start = values(ours)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, clipvalue=100.0), scale_local_gradients=scaled)
    optimizer.register_local_var(own)
    optimizer.register_local_var(ours[1].value)
    mine, missing = gradients(hvd.rank(), 0), keras.Variable(np.ones(3), name="missing")
    optimizer.register_local_var(missing)
    rows = tf.IndexedSlices(tf.ones((1, 2)) * 8.0, [hvd.rank()], [hvd.rank() + 1, 2])
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([mine[0], mine[1], mine[2], rows, None], [*ours, own, missing])
    divisor = hvd.size() if scaled else 1
    for index in (0, 2):
        np.testing.assert_allclose(values(ours)[index], start[index] - averaged(0)[index], rtol=1e-6)
    np.testing.assert_allclose(values(ours)[1], start[1] - mine[1] / divisor, rtol=1e-6)
    expected = np.zeros((hvd.rank() + 1, 2))
    expected[-1] = -8.0 / divisor
    np.testing.assert_allclose(own.numpy(), expected, rtol=1e-6)
    np.testing.assert_array_equal(missing.numpy(), np.ones(3))


def test_a_global_norm_and_local_variables_are_refused_together() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, global_clipnorm=1.0))
    with pytest.raises(InvalidError, match="local variables count in the norm"):
        optimizer.register_local_var(variables()[0])
    layer = keras.layers.Dense(2)
    plain = keras.optimizers.SGD(1.0, global_clipnorm=1.0)
    with pytest.raises(InvalidError, match="local variables count in the norm"):
        hvd.PartialDistributedOptimizer(plain, local_layers=[layer])
    assert type(plain) is keras.optimizers.SGD


def test_a_partial_optimizer_leaves_its_layers_alone_and_trains_the_others_on_the_joined_batch() -> None:
    """The head is of another width on each rank; the body sees the sum of what the heads send back."""

    def split(rank: int) -> tuple[keras.Sequential, keras.layers.Layer]:
        head = keras.layers.Dense(rank + 1)
        whole = keras.Sequential(
            [keras.layers.Input((6,)), keras.layers.Dense(3, activation="tanh", name="body"), head]
        )
        fill(whole.weights)
        return whole, head

    ours, head = split(hvd.rank())
    late = keras.layers.Dense(2)  # not built: it has no weights yet, and none are looked for before the first step
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), local_layers=[head, late])
    ours.compile(optimizer, "mse")
    everyone = [split(rank)[0] for rank in range(hvd.size())]
    plain = [keras.optimizers.SGD(0.1, momentum=0.9) for _ in everyone]
    for salt in range(3):
        x = data(hvd.rank(), 4, salt)[0]
        ours.train_on_batch(x, x[:, : hvd.rank() + 1])
        found = []
        for rank, other in enumerate(everyone):
            own = data(rank, 4, salt)[0]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(other(own) - own[:, : rank + 1]))
            found.append(tape.gradient(loss, other.trainable_variables))
        body = [sum(parts) / hvd.size() for parts in zip(*(every[:2] for every in found), strict=True)]
        for every, other, single in zip(found, everyone, plain, strict=True):
            single.apply([*body, *(part / hvd.size() for part in every[2:])], other.trainable_variables)
    for got, expected in zip(values(ours.weights), values(everyone[hvd.rank()].weights), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)
    assert_same_bits_on_all_ranks(ours.layers[0].weights)


@pytest.mark.parametrize("layers", ["head", [keras.layers.Dense], [3]])
def test_what_is_no_layer_is_refused(layers: object) -> None:
    with pytest.raises(InvalidError, match="must be a layer of Keras"):
        hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=layers)
