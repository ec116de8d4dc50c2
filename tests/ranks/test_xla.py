"""Training steps that XLA compiles in two halves, with the reduction between them; XLA runs on CPUs too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd

BATCH, STEPS = 4, 6


def data(rank: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(rank)
    x = random.normal(size=(BATCH * STEPS, 6)).astype(np.float32)
    return x, (x.sum(1, keepdims=True) > 0).astype(np.float32)


def network() -> list[Any]:
    layers = keras.layers
    return [
        keras.Input((6,)),
        layers.Dense(8, "relu"),
        layers.BatchNormalization(),
        layers.Dense(4, "tanh"),
        layers.Dense(1, "sigmoid"),
    ]


def embedding() -> list[Any]:
    layers = keras.layers
    ids = layers.Lambda(lambda x: tf.cast(tf.abs(x) * 3, tf.int32) % 9)
    return [keras.Input((6,)), ids, layers.Embedding(9, 3), layers.Flatten(), layers.Dense(1, "sigmoid")]


SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam
# what is trained, by an optimizer that is made anew for each model
HOW: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "momentum": (lambda: SGD(0.1, 0.9), {}),
    "global_clipnorm": (lambda: Adam(0.01, global_clipnorm=0.1), {}),
    "weight decay and EMA": (lambda: keras.optimizers.AdamW(0.01, 0.1, use_ema=True), {}),
    "accumulation": (lambda: SGD(0.1, gradient_accumulation_steps=2), {}),
    "backward passes": (lambda: SGD(0.1), {"backward_passes_per_step": 2}),
    "a schedule": (lambda: SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)), {}),
    "fp16": (lambda: SGD(0.1), {"compression": hvd.Compression.fp16}),
    "predivide": (lambda: SGD(0.1), {"gradient_predivide_factor": 2.0}),
    "top-k": (lambda: SGD(0.1), {"compression": hvd.TopK(0.3)}),
    "top-k until": (
        lambda: SGD(0.1, 0.9),
        {"compression": hvd.TopK(0.3, momentum_correction=True, until=3)},
    ),
    "delay": (lambda: SGD(0.1), {"delay": 1}),
    "LARS": (lambda: hvd.optimizers.LARS(0.5, 0.9), {}),
    "LAMB": (lambda: hvd.optimizers.LAMB(0.1), {}),
    "a loss scale": (lambda: keras.optimizers.LossScaleOptimizer(SGD(0.1, 0.9)), {}),
    "top-k with a loss scale": (
        lambda: keras.optimizers.LossScaleOptimizer(SGD(0.1)),
        {"compression": hvd.TopK(0.3)},
    ),
    "sparse gradients": (lambda: SGD(0.1), {}),
}


def trained(how: str, rank: int, jit_compile: bool) -> tuple[keras.Model, list[Any]]:
    """Train a model; give it and the logs of its epochs."""
    keras.utils.set_random_seed(5)
    make, options = HOW[how]
    model = keras.Sequential(embedding() if how == "sparse gradients" else network())
    optimizer = hvd.DistributedOptimizer(make(), **options)
    model.compile(optimizer, "binary_crossentropy", metrics=["accuracy"], jit_compile=jit_compile)
    x, y = data(rank)
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return model, [history.history[name] for name in ("loss", "accuracy")]


@pytest.mark.parametrize("how", HOW)
def test_a_step_in_two_halves_trains_as_one_without_xla(how: str, rank: int) -> None:
    plain, plain_logs = trained(how, rank, False)
    ours, logs = trained(how, rank, True)
    assert ours.jit_compile  # for evaluate and predict
    np.testing.assert_allclose(logs, plain_logs, rtol=1e-3)
    for weight, wanted in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(weight, wanted, rtol=1e-3, atol=1e-4)
    weights = [one.numpy() for one in ours.trainable_variables]
    for theirs in hvd.allgather_object(weights):
        for one, other in zip(weights, theirs, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("how", "halves"),
    [
        ("momentum", ["divided", "update"]),
        ("top-k", ["divided", "update"]),
        ("a loss scale", ["divided", "update"]),
        ("accumulation", ["divided"]),  # the update is Keras' own, in a condition
        ("sparse gradients", ["divided"]),  # rows without a fixed number
    ],
)
def test_both_halves_are_compiled_where_they_can_be(
    how: str, halves: list[str], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, plain = [], tf.function

    def function(*given: Any, **options: Any) -> Any:
        if options.get("jit_compile"):
            asked.append(sys._getframe(1).f_code.co_name)
        return plain(*given, **options)

    monkeypatch.setattr(tf, "function", function)
    trained(how, rank, True)
    assert list(dict.fromkeys(asked)) == halves  # a step may be traced more than once


def test_batches_by_hand_and_several_steps_in_one_call_train_alike(rank: int) -> None:
    x, y = data(rank)
    found = []
    for how in ("fit", "several", "by hand"):
        keras.utils.set_random_seed(5)
        model = keras.Sequential(network())
        model.compile(
            hvd.DistributedOptimizer(SGD(0.1, 0.9)),
            "binary_crossentropy",
            jit_compile=True,
            steps_per_execution=3 if how == "several" else 1,
        )
        if how == "by hand":
            for begin in range(0, len(x), BATCH):
                model.train_on_batch(x[begin : begin + BATCH], y[begin : begin + BATCH])
        else:
            model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        found.append(model.get_weights())
    for other in found[1:]:
        for one, wanted in zip(other, found[0], strict=True):
            np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=1e-6)


def test_a_step_that_fails_while_it_is_traced_leaves_nothing_behind(rank: int) -> None:

    def loss(labels: Any, values: Any) -> Any:
        raise ValueError("no loss")

    optimizer = hvd.DistributedOptimizer(SGD(0.1))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, loss, jit_compile=True)
    with pytest.raises(ValueError, match="no loss"):
        model.train_on_batch(np.ones((2, 2), np.float32), np.ones((2, 1), np.float32))
    assert model.jit_compile and "train_step" not in vars(model)
    kernel, bias = (one.numpy() for one in model.trainable_variables)
    optimizer.apply([tf.fill(one.shape, float(rank + 1)) for one in (kernel, bias)], model.trainable_variables)
    np.testing.assert_allclose(model.get_weights()[0], kernel - 0.1 * np.mean(np.arange(hvd.size()) + 1.0), rtol=1e-5)
