"""Mixed precision in float16: all ranks take or skip a step together, and their scales are one.

test_pairs.py has it with every other feature, eagerly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import HvdExtError, InvalidError
from hvd_ext.keras.optimizers.optimizer import Distributed, channels
from hvd_ext.tensorflow import skipping
from tests.ranks.compare import assert_close, assert_equal
from tests.ranks.steps import averaged, gradients, variables
from tests.ranks.training import assert_same_bits_on_all_ranks, data, joined, model, values

pytestmark = pytest.mark.ranks(2)

SCALE = 2.0**10


@pytest.fixture
def _float16() -> Iterator[None]:
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


def last() -> bool:
    return hvd.rank() == hvd.size() - 1


def scaling(optimizer: keras.optimizers.Optimizer, **keywords: object) -> keras.optimizers.Optimizer:
    return hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=SCALE), **keywords)


@contextlib.contextmanager
def run_eagerly(eager: bool) -> Iterator[None]:
    tf.config.run_functions_eagerly(eager)
    yield
    tf.config.run_functions_eagerly(False)


def scale_of(optimizer: keras.optimizers.Optimizer) -> float:
    scale = float(optimizer.dynamic_scale)
    assert hvd.allgather_object(scale) == [scale] * hvd.size()
    return scale


@pytest.mark.usefixtures("_float16")
def test_under_the_policy_fit_skips_steps_on_all_ranks_when_one_overflows_and_goes_on() -> None:
    ours, reference = model(), model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=1.0))
    assert type(optimizer).__name__ == "LossScaleOptimizer"
    assert isinstance(optimizer, Distributed)
    ours.compile(optimizer, "mse")
    assert ours.optimizer is optimizer
    reference.compile(keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=1.0), "mse", run_eagerly=True)
    for salt in range(2):
        ours.train_on_batch(*data(hvd.rank(), 4, salt))
        reference.train_on_batch(*joined(4, 4, salt))
    before, scale, steps = values(ours.weights), scale_of(optimizer), int(optimizer.inner_optimizer.iterations)
    x, y = data(hvd.rank(), 4, 2)
    ours.train_on_batch(x, y * (1e30 if last() else 1.0))
    assert_equal(before, values(ours.weights))
    assert scale_of(optimizer) == scale / 2
    assert int(optimizer.inner_optimizer.iterations) == steps
    ours.train_on_batch(x, y)
    reference.train_on_batch(*joined(4, 4, 2))
    assert int(optimizer.inner_optimizer.iterations) == steps + 1
    assert_same_bits_on_all_ranks([*ours.weights, *optimizer.variables])
    assert_close(ours.weights, reference.weights, rtol=0.02, atol=0.005)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_steps_equal_plain_training_and_the_scale_grows_alike(traced: bool) -> None:
    ours, reference = variables(), variables()
    inner = keras.optimizers.Adam(0.1, clipvalue=0.5, use_ema=True, weight_decay=0.01)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(inner, initial_scale=SCALE, dynamic_growth_steps=2),
        gradient_predivide_factor=2.0,
        groups=2,
    )
    plain = keras.optimizers.Adam(0.1, clipvalue=0.5, use_ema=True, weight_decay=0.01)

    def step(parts: list[tf.Tensor], bad: tf.Tensor) -> None:
        scaled = [optimizer.scale_loss(part) for part in parts]
        optimizer.apply([scaled[0] * bad, *scaled[1:]], ours)

    step = tf.function(step) if traced else step
    for number in range(4):
        step(gradients(hvd.rank(), number), tf.constant(np.inf if last() and number == 2 else 1.0))
        if number != 2:
            plain.apply(averaged(number), reference)
    assert scale_of(optimizer) == SCALE * 2 / 2
    assert_close(ours, reference)
    assert_same_bits_on_all_ranks([*ours, *optimizer.variables])
    assert len(channels(optimizer)) == 1


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_embeddings_local_variables_and_missing_gradients() -> None:
    table = keras.Variable(np.zeros((5, 2)), dtype="float32", name="table")
    own = keras.Variable(np.zeros(hvd.rank() + 1), dtype="float32", name=f"own{hvd.rank()}")
    unused = keras.Variable(np.ones(2), dtype="float32", name="unused")
    optimizer = scaling(keras.optimizers.SGD(1.0), op=hvd.Sum)
    optimizer.register_local_var(own)
    rows = tf.constant([hvd.rank() % 5, 4, 4])
    for bad in (1.0, np.nan, 1.0):  # not finite in a local gradient of one rank only
        scale = float(optimizer.dynamic_scale) if optimizer.built else SCALE
        parts = tf.IndexedSlices(tf.ones((3, 2)) * scale, rows, tf.constant([5, 2]))
        local = tf.ones(hvd.rank() + 1) * scale * (bad if last() else 1.0)
        optimizer.apply([parts, local, None], [table, own, unused])
    assert scale_of(optimizer) == SCALE / 2
    expected = np.zeros((5, 2))
    for rank in range(hvd.size()):
        expected[rank % 5] -= 2
        expected[4] -= 4
    np.testing.assert_array_equal(table.numpy(), expected)
    np.testing.assert_allclose(own.numpy(), np.full(hvd.rank() + 1, -2.0 / hvd.size()), rtol=1e-6)
    np.testing.assert_array_equal(unused.numpy(), np.ones(2))


def test_it_is_saved_as_keras_own_and_refused_inside_out() -> None:
    plain = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5, name="inner"), name="outer")
    saved = keras.saving.serialize_keras_object(plain)
    assert keras.saving.serialize_keras_object(hvd.DistributedOptimizer(plain)) == saved
    assert type(keras.saving.deserialize_keras_object(saved)) is keras.optimizers.LossScaleOptimizer
    inside_out = keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)))
    with pytest.raises(InvalidError, match="wrap the outer one only"):
        hvd.DistributedOptimizer(inside_out)


@pytest.mark.usefixtures("_float16")
def test_a_fixed_scale_is_left_as_it_is() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, loss_scale_factor=8.0))
    assert type(optimizer).__name__ == "SGD"


HALF = hvd.TopK(0.5, min_elements=1, momentum_correction=False)


@pytest.mark.parametrize(
    ("optimizer", "topk", "eager"),
    [
        ("scaled", None, True),
        ("scaled", HALF, False),
        ("adam", HALF, True),
        ("adam", HALF, False),
    ],
)
def test_steps_that_are_all_skipped_end_with_an_error_but_a_search_for_a_scale_does_not(
    optimizer: str, topk: hvd.TopK | None, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skipping, "LIMIT", 3)
    inner = keras.optimizers.Adam(0.1) if optimizer == "adam" else keras.optimizers.SGD(0.1)
    if optimizer == "scaled":
        inner = keras.optimizers.LossScaleOptimizer(inner, initial_scale=16.0)
    ours = hvd.DistributedOptimizer(inner, compression=topk)
    variable = keras.Variable(np.array([1.0, 2.0], np.float32))
    ours.build([variable])
    step = tf.function(lambda gradient: ours.apply([gradient], [variable]))
    bad, good = tf.fill([2], float("nan") if last() else 1.0), tf.ones(2)
    error = HvdExtError if eager else tf.errors.InvalidArgumentError
    with run_eagerly(eager):
        # the first three search for a scale: 16, 8, 4, 2; without a scale a good one begins the count anew
        for gradient in (bad, bad, bad) if optimizer == "scaled" else (bad, bad, good, bad, bad):
            step(gradient)
        with pytest.raises(error, match="all ranks have skipped the last 3 steps"):
            step(bad)
        step(good)
        step(bad)
    if optimizer == "scaled":
        assert scale_of(ours) <= 2.0
    else:
        assert int(ours.iterations) == 2
    assert_same_bits_on_all_ranks([variable])
