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
from tests.ranks.compare import assert_close
from tests.ranks.conftest import LAUNCHED_SIZE
from tests.ranks.training import assert_same_bits_on_all_ranks

pytestmark = pytest.mark.ranks(2)

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
        layers.Dense(1, "sigmoid"),
    ]


def embedding() -> list[Any]:
    layers = keras.layers
    ids = layers.Lambda(lambda x: tf.cast(tf.abs(x) * 3, tf.int32) % 9)
    return [keras.Input((6,)), ids, layers.Embedding(9, 3), layers.Flatten(), layers.Dense(1, "sigmoid")]


def scaled_too_much() -> Any:
    return keras.optimizers.LossScaleOptimizer(SGD(0.1), initial_scale=1e36, dynamic_growth_steps=2)


TOO_LARGE = "a loss scale too large, then one that grows"
SGD, AdamW = keras.optimizers.SGD, keras.optimizers.AdamW
# what is trained, by an optimizer that is made anew for each model
HOW: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "momentum": (lambda: SGD(0.1, 0.9), {}),
    "clipping, decay and EMA": (lambda: AdamW(0.01, 0.1, use_ema=True, global_clipnorm=0.1), {}),
    "accumulation": (lambda: SGD(0.1, gradient_accumulation_steps=2), {}),
    "top-k until, with a loss scale": (
        lambda: keras.optimizers.LossScaleOptimizer(SGD(0.1, 0.9)),
        {"compression": hvd.TopK(0.3, momentum_correction=True, until=3)},
    ),
    "LARS with a delay": (lambda: hvd.optimizers.LARS(0.5, 0.9), {"delay": 1}),
    "LAMB": (lambda: hvd.optimizers.LAMB(0.05, weight_decay=0.01, exclude_from_trust=()), {}),
    TOO_LARGE: (scaled_too_much, {}),
    "a fixed loss scale, in partial rounds": (
        lambda: SGD(0.1, loss_scale_factor=1e6),
        {"compression": hvd.Compression.fp16, "sync": "quorum", "quorum": LAUNCHED_SIZE},
    ),
    "sparse gradients": (lambda: SGD(0.1), {}),
}
# the functions that XLA compiles, where not both halves
HALVES = {
    "accumulation": ["divided"],  # the update is Keras' own, in a condition
    "LARS with a delay": ["divided"],  # the update is an op
    "LAMB": ["divided"],
    "sparse gradients": ["divided"],  # rows without a fixed number
}


def compiled(how: str, built: bool = True, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(5)
    make, keywords = HOW[how]
    model = keras.Sequential(embedding() if how == "sparse gradients" else network()[not built :])
    optimizer = hvd.DistributedOptimizer(make(), **keywords)
    model.compile(optimizer, "binary_crossentropy", metrics=["accuracy"], **options)
    return model


def fit(model: keras.Model, rank: int, first: float = 1.0) -> list[float]:
    """Train, with the first batch multiplied by a factor; give what is logged."""
    x, y = data(rank)
    x[:BATCH] *= first
    history = model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0).history
    return [*history["loss"], *history["accuracy"]]


@pytest.mark.parametrize("how", [how for how in HOW if how != "momentum"])
def test_a_step_in_two_halves_trains_as_one_without_xla(how: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, traces = [], tf.function

    def function(*given: Any, **options: Any) -> Any:
        if options.get("jit_compile"):
            asked.append(sys._getframe(1).f_code.co_name)
        return traces(*given, **options)

    # XLA adds in another order: the scale must be far too large for the first batch, and far from it for the others
    first = 1e6 if how == TOO_LARGE else 1.0
    plain = compiled(how, run_eagerly=True)
    expected = fit(plain, rank, first)
    monkeypatch.setattr(tf, "function", function)
    ours = compiled(how, built=False, jit_compile=True)
    np.testing.assert_allclose(fit(ours, rank, first), expected, rtol=1e-3)
    assert ours.jit_compile  # for evaluate and predict
    # a step may be traced more than once
    assert list(dict.fromkeys(asked)) == HALVES.get(how, ["divided", "update"])
    assert_close(ours.weights, plain.weights, rtol=1e-3, atol=1e-4)
    assert_same_bits_on_all_ranks(ours.trainable_variables)


@pytest.mark.parametrize("several", [False, True])
def test_batches_by_hand_and_several_steps_in_one_call_train_alike(several: bool, rank: int) -> None:
    plain = compiled("momentum", run_eagerly=True)
    fit(plain, rank)
    ours = compiled("momentum", jit_compile=True, steps_per_execution=3 if several else 1)
    if several:
        fit(ours, rank)
    else:
        x, y = data(rank)
        for begin in range(0, len(x), BATCH):
            ours.train_on_batch(x[begin : begin + BATCH], y[begin : begin + BATCH])
    assert_close(ours.weights, plain.weights, rtol=1e-3, atol=1e-4)


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


def test_a_rank_without_xla_is_a_mismatch(rank: int, size: int) -> None:
    if size == 1:
        pytest.skip("one rank has no other rank to differ from")
    model = keras.Sequential(network())
    model.compile(hvd.DistributedOptimizer(SGD(0.1)), "mse", jit_compile=rank == 0)
    x, y = data(rank)
    with pytest.raises(hvd.errors.MismatchError, match="jit_compile"):
        model.train_on_batch(x, y)


class Noisy(SGD):
    """An optimizer that changes gradients before they are reduced."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Add something of this rank."""
        super().apply([one + float(hvd.rank()) for one in grads], trainable_variables)


class Counted(SGD):
    """An optimizer that does something after the update."""

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """Update the weights."""
        return super().apply_gradients(grads_and_vars)


class OtherResults(keras.Sequential):
    """A model whose results are of its weights."""

    def get_metrics_result(self) -> dict[str, Any]:
        """Give the results."""
        return {**super().get_metrics_result(), "norm": keras.ops.norm(self.trainable_variables[0])}


@pytest.mark.parametrize(
    ("kind", "make"), [(keras.Sequential, Noisy), (keras.Sequential, Counted), (OtherResults, SGD)]
)
def test_what_is_not_keras_own_is_not_divided(kind: type, make: type, rank: int) -> None:
    model = kind(network())
    model.compile(hvd.DistributedOptimizer(make(0.1)), "mse", jit_compile=True)
    model.train_on_batch(*data(rank))
    assert not model.jit_compile
    assert_same_bits_on_all_ranks(model.trainable_variables)


def test_a_model_whose_layers_are_frozen_leaves_its_optimizer_unbuilt(rank: int) -> None:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.trainable = False
    model.compile(hvd.DistributedOptimizer(SGD(0.1)), "mse", jit_compile=True)
    model.train_on_batch(*data(rank))
    assert not model.optimizer.built


def test_a_collective_in_the_forward_pass_is_refused_in_words(rank: int) -> None:
    inner = keras.layers.Lambda(lambda x: hvd.allreduce(x, name="inner"))
    model = keras.Sequential([keras.Input((6,)), inner, keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(SGD(0.1)), "mse", jit_compile=True)
    with pytest.raises(hvd.errors.InvalidError, match="allreduce: .*XLA cannot communicate"):
        model.train_on_batch(*data(rank))
