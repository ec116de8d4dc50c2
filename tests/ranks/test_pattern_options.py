"""Horovod's options of the optimizer in `fit`'s training step: each equals what it means in one process."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from tests.ranks.training import (
    FEATURES,
    TARGETS,
    assert_same_bits_on_all_ranks,
    assert_trained_alike,
    data,
    fill,
    joined,
    model,
    values,
)

BATCH = 4


def by_layer(ours: keras.Model) -> list[list[keras.Variable]]:
    return [layer.trainable_variables for layer in ours.layers]


# keywords of the wrapper; the factor by which the update is larger than that of the average
OPTIONS: dict[str, tuple[Callable[[keras.Model], dict[str, Any]], Callable[[], float]]] = {
    "op=Sum": (lambda ours: {"op": hvd.Sum}, lambda: hvd.size()),
    "gradient_predivide_factor": (lambda ours: {"gradient_predivide_factor": 4.0}, lambda: 1),
    "groups of variables, fp16": (
        lambda ours: {"groups": by_layer(ours), "compression": hvd.Compression.fp16},
        lambda: 1,
    ),
    "two groups": (lambda ours: {"groups": 2, "sparse_as_dense": True}, lambda: 1),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_equals_its_meaning_on_the_joined_batch(name: str) -> None:
    keywords, factor = OPTIONS[name]
    ours, reference = model(), model()
    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.02, momentum=0.5), **keywords(ours))
    ours.compile(wrapped, "mse", run_eagerly=True)
    reference.compile(keras.optimizers.SGD(0.02 * factor(), momentum=0.5), "mse", run_eagerly=True)
    for salt in range(2):
        ours.train_on_batch(*data(hvd.rank(), BATCH, salt))
        reference.train_on_batch(*joined(BATCH, BATCH, salt))
    rough = "fp16" in name
    assert_trained_alike(ours, reference, rtol=2e-3 if rough else 2e-5, atol=2e-3 if rough else 2e-6)


@pytest.mark.parametrize("average", [True, False], ids=["averaged", "summed"])
def test_backward_passes_are_one_step_on_all_their_batches(average: bool) -> None:
    ours, reference = model(), model()
    wrapped = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.02, momentum=0.5),
        backward_passes_per_step=2,
        average_aggregated_gradients=average,
    )
    ours.compile(wrapped, "mse", run_eagerly=True)
    reference.compile(keras.optimizers.SGD(0.02 if average else 0.04, momentum=0.5), "mse", run_eagerly=True)
    for salt in range(4):
        ours.train_on_batch(*data(hvd.rank(), BATCH, salt))
    for salt in (0, 2):
        parts = [joined(BATCH, BATCH, salt), joined(BATCH, BATCH, salt + 1)]
        reference.train_on_batch(*(np.concatenate(part) for part in zip(*parts, strict=True)))
    assert_trained_alike(ours, reference)


def test_local_layers_stay_on_their_rank_and_the_others_are_shared() -> None:
    """All ranks are played in one process: each its own first layer, whose gradient is divided by their number."""
    ours = model()
    fill(ours.layers[0].weights, salt=hvd.rank())
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=[ours.layers[0]])
    ours.compile(optimizer, "mse", run_eagerly=True)
    played = [model() for _ in range(hvd.size())]
    for rank, network in enumerate(played):
        fill(network.layers[0].weights, salt=rank)
    for salt in range(2):
        ours.train_on_batch(*data(hvd.rank(), BATCH, salt))
        each = []
        for rank, network in enumerate(played):
            x, y = data(rank, BATCH, salt)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(network(x) - y))
            each.append(tape.gradient(loss, [weight.value for weight in network.weights]))
        shared = [tf.add_n([own[index] for own in each]) / hvd.size() for index in (2, 3)]
        for network, own in zip(played, each, strict=True):
            gradients = [own[0] / hvd.size(), own[1] / hvd.size(), *shared]
            for weight, gradient in zip(network.weights, gradients, strict=True):
                weight.assign_sub(0.1 * gradient)
    for got, expected in zip(values(ours.weights), values(played[hvd.rank()].weights), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)
    assert_same_bits_on_all_ranks(ours.layers[1].weights)
    if hvd.size() > 1:
        prints = hvd.allgather_object(values(ours.layers[0].weights)[0].tobytes())
        assert len(set(prints)) == hvd.size()


@pytest.mark.skipif(importlib.util.find_spec("tf_keras") is None, reason="needs tf_keras: pip install tf_keras")
def test_a_script_on_keras_2_trains_on_the_joined_batch() -> None:
    import tf_keras

    def small() -> Any:
        network = tf_keras.Sequential(
            [tf_keras.layers.Dense(5, activation="tanh", input_shape=(FEATURES,)), tf_keras.layers.Dense(TARGETS)]
        )
        fill(network.weights)
        return network

    ours, reference = small(), small()
    fill(ours.weights, salt=hvd.rank())
    ours.compile(hvd.DistributedOptimizer(tf_keras.optimizers.SGD(0.05, momentum=0.5)), "mse")
    reference.compile(tf_keras.optimizers.SGD(0.05, momentum=0.5), "mse", run_eagerly=True)
    first = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    kept = ours.fit(*data(hvd.rank(), 8), batch_size=BATCH, epochs=2, shuffle=False, callbacks=first, verbose=0)
    reference.fit(*joined(8, BATCH), batch_size=BATCH * hvd.size(), epochs=2, shuffle=False, verbose=0)
    for got, expected in zip(values(ours.weights), values(reference.weights), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)
    assert_same_bits_on_all_ranks(ours.weights)
    assert len(set(hvd.allgather_object(kept.history["loss"][-1]))) == 1
