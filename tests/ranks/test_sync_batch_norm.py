"""SyncBatchNormalization: outputs, gradients and moving statistics of one process with the joined batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import InvalidError
from tests.ranks.compare import assert_close, assert_equal
from tests.ranks.training import assert_same_bits_on_all_ranks, values

pytestmark = pytest.mark.ranks(2)

STEPS, CHANNELS = 3, 4


def inputs(rank: int, shape: tuple[int, ...], dtype: str = "float32", salt: int = 0) -> np.ndarray:
    """Give one rank's inputs: eighths, with a mean that is large beside the deviation."""
    count = int(np.prod(shape))
    whole = (np.arange(count) * 7 + rank * 5 + salt * 3 + rank * rank) % 23
    return (whole / 8 + 4).reshape(shape).astype(tf.as_dtype(dtype).as_numpy_dtype)


def rows(rank: int) -> int:
    """Give the ranks batches of unequal size."""
    return 2 + rank % 3


def run(
    layer: keras.layers.Layer, x: Any, weights: Any, *, compiled: bool, mask: Any = None
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Give the output in training, and the gradients of a weighted sum of its squares for inputs and variables."""
    x, weights = tf.convert_to_tensor(x), tf.convert_to_tensor(weights)

    def step(x: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True, mask=mask)
            loss = tf.reduce_sum(tf.cast(weights, tf.float32) * tf.square(tf.cast(y, tf.float32)))
        return y, tape.gradient(loss, [x, *(variable.value for variable in layer.trainable_variables)])

    return (tf.function(step) if compiled else step)(x)


@pytest.mark.parametrize(
    ("dtype", "shape", "masked", "compiled", "options"),
    [
        ("float32", (3, CHANNELS), False, True, {}),
        ("float32", (CHANNELS,), False, False, {"renorm": True}),
        ("bfloat16", (CHANNELS,), False, False, {}),
        ("float16", (3, CHANNELS), True, True, {}),
        ("float32", (CHANNELS, 2, 2), False, False, {"axis": 1, "center": False}),
    ],
)
def test_it_is_batch_normalization_of_the_joined_batch(
    dtype: str, shape: tuple[int, ...], masked: bool, compiled: bool, options: dict[str, Any]
) -> None:
    if "renorm" in options and "renorm" not in keras.layers.BatchNormalization.__init__.__code__.co_varnames:
        pytest.skip("this Keras has no renorm")
    mine, everyone = hvd.rank(), range(hvd.size())
    policy = dtype if dtype == "float32" else f"mixed_{dtype}"
    ours = hvd.SyncBatchNormalization(momentum=0.75, dtype=policy, **options)
    plain = keras.layers.BatchNormalization(momentum=0.75, dtype=policy, **options)
    parts = [inputs(rank, (rows(rank), *shape), dtype) for rank in everyone]
    factors = [inputs(rank, (rows(rank), *shape), "float32", salt=1) for rank in everyone]
    masks = [inputs(rank, (rows(rank), *shape[:-1]), "float32", salt=2) > 5 for rank in everyone] if masked else None
    y, (dx, *gradients) = run(ours, parts[mine], factors[mine], compiled=compiled, mask=masks and masks[mine])
    expected, (dx_all, *expected_gradients) = run(
        plain,
        np.concatenate(parts),
        np.concatenate(factors),
        compiled=False,
        mask=np.concatenate(masks) if masks else None,
    )
    start = sum(rows(rank) for rank in range(mine))
    near = {"rtol": 2e-5, "atol": 2e-4} if dtype == "float32" else {"rtol": 2e-2, "atol": 2e-1}
    for got, wanted in ((y, expected), (dx, dx_all)):
        wanted = wanted[start : start + rows(mine)]
        assert got.dtype == wanted.dtype
        np.testing.assert_allclose(tf.cast(got, tf.float32), tf.cast(wanted, tf.float32), **near)
    for got, wanted in zip(gradients, expected_gradients, strict=True):
        total = sum(hvd.allgather_object(got.numpy()))  # the sum of all ranks' losses is the joined batch's
        np.testing.assert_allclose(total, wanted, rtol=1e-4, atol=1e-2 if dtype != "float32" else 1e-3)
    assert_close(ours.non_trainable_variables, plain.non_trainable_variables, rtol=1e-5, atol=1e-6)
    assert_same_bits_on_all_ranks(ours.non_trainable_variables)
    before = values(ours.variables)
    np.testing.assert_allclose(
        tf.cast(ours(parts[mine], training=False), tf.float32),
        tf.cast(plain(parts[mine], training=False), tf.float32),
        **near,
    )
    assert_equal(ours.variables, before)


def network(layer: type[keras.layers.Layer]) -> keras.Model:
    """Make a model in which one normalization is used twice."""
    x = inner = keras.layers.Input((6,))
    twice = layer(momentum=0.5, name="norm")
    for number in range(2):
        inner = twice(keras.layers.Dense(5, kernel_initializer=keras.initializers.GlorotUniform(number))(inner))
    return keras.Model(x, keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(3))(inner))


def test_a_model_trains_as_on_the_joined_batch_and_is_saved_for_plain_keras(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, plain = network(hvd.SyncBatchNormalization), network(keras.layers.BatchNormalization)
    plain.set_weights(ours.get_weights())
    ours.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.5)), "mse", run_eagerly=True)
    plain.compile(keras.optimizers.SGD(0.05, momentum=0.5), "mse", run_eagerly=True)
    for step in range(STEPS):
        parts = [inputs(rank, (4, 7), salt=step) - 5 for rank in range(hvd.size())]
        mine, joined = parts[hvd.rank()], np.concatenate(parts)
        ours.train_on_batch(mine[:, :6], mine[:, 6:])
        plain.train_on_batch(joined[:, :6], joined[:, 6:])
    assert_same_bits_on_all_ranks(ours.variables)
    assert_close(ours.weights, plain.weights, rtol=2e-4, atol=2e-5)

    file = tmp_path / "model.keras"
    ours.save(file)
    again = keras.models.load_model(file, compile=False)
    assert type(again.get_layer("norm")) is hvd.SyncBatchNormalization
    stand_in = type("SyncBatchNormalization", (keras.layers.BatchNormalization,), {})
    monkeypatch.delitem(keras.saving.get_custom_objects(), "hvd_ext>SyncBatchNormalization")
    names = {"hvd_ext>SyncBatchNormalization": stand_in}
    without_us = keras.models.load_model(file, custom_objects=names, compile=False)
    assert type(without_us.get_layer("norm")) is stand_in
    for loaded in (again, without_us):
        np.testing.assert_array_equal(loaded(mine[:, :6]), ours(mine[:, :6]))


def assert_moved_to(layer: keras.layers.Layer, batch: np.ndarray) -> None:
    moving = [layer.moving_mean, layer.moving_variance]
    assert_close(moving, [batch.mean(0), batch.var(0)], rtol=1e-5, atol=1e-7)


def test_a_rank_with_an_empty_batch_takes_part() -> None:
    layer = hvd.SyncBatchNormalization(momentum=0.0)
    x = inputs(hvd.rank(), (0 if hvd.rank() else 3, CHANNELS))
    y, (dx, *_) = run(layer, x, np.ones_like(x), compiled=False)
    assert y.shape == dx.shape == x.shape
    assert_moved_to(layer, inputs(0, (3, CHANNELS)))


def test_the_ranks_of_a_process_set_normalize_together() -> None:
    inside = list(range(max(1, hvd.size() - 1)))
    group = hvd.global_process_set if hvd.size() == 1 else hvd.add_process_set(inside)
    try:
        layer = hvd.SyncBatchNormalization(momentum=0.0, process_set=group)
        again = hvd.SyncBatchNormalization.from_config(layer.get_config())
        parts = [inputs(rank, (rows(rank), CHANNELS)) for rank in inside]
        for each in (layer, again):
            x = inputs(hvd.rank(), (rows(hvd.rank()), CHANNELS))
            if hvd.rank() not in inside:
                with pytest.raises(InvalidError, match=f"SyncBatchNormalization: rank {hvd.rank()} is not in"):
                    each(x, training=True)
                continue
            run(each, x, np.ones_like(x), compiled=False)
            assert_moved_to(each, np.concatenate(parts))
    finally:
        hvd.remove_process_set(group)


def test_its_configuration_makes_it_again() -> None:
    layer = hvd.SyncBatchNormalization(momentum=0.5, epsilon=0.25, scale=False)
    config = layer.get_config()
    assert "process_set" not in config
    assert hvd.SyncBatchNormalization.from_config(config).get_config() == config
    some = hvd.SyncBatchNormalization(process_set=[0])
    assert some.get_config()["process_set"] == [0]
    assert hvd.SyncBatchNormalization.from_config(some.get_config()).get_config() == some.get_config()


@pytest.mark.parametrize("options", [{"fused": True}, {"fused": None}, {"synchronized": True}])
def test_what_it_cannot_do_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidError, match=f"SyncBatchNormalization: {next(iter(options))}"):
        hvd.SyncBatchNormalization(**options)
