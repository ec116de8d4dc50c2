"""What is saved, copied or loaded is plain Keras; wrapped again, training goes on as if it had not stopped."""

from __future__ import annotations

import copy
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from tests.ranks.training import assert_same_bits_on_all_ranks, assert_trained_alike, data, joined, model, values

ROWS, BATCH = 8, 4


def trained() -> keras.Model:
    ours = model()
    ours.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.02)), keras.losses.MeanSquaredError())
    fit(ours)
    return ours


def fit(ours: keras.Model) -> None:
    ours.fit(*data(hvd.rank(), ROWS), batch_size=BATCH, shuffle=False, verbose=0)


@pytest.mark.parametrize("ending", ["keras", pytest.param("h5", marks=pytest.mark.slow)])
def test_a_saved_model_loads_plain_and_goes_on_under_the_wrapper_without_losing_state(
    tmp_path: Path, ending: str
) -> None:
    ours = trained()
    path = tmp_path / f"model.{ending}"
    ours.save(path)
    loaded = keras.models.load_model(path)
    assert type(loaded.optimizer) is keras.optimizers.Adam
    for got, expected in zip(values(loaded.weights), values(ours.weights), strict=True):
        np.testing.assert_array_equal(got, expected)
    if ending == "h5":
        return  # this format drops the slots, and Keras loads an optimizer from it that cannot train, wrapped or not
    again = hvd.DistributedOptimizer(loaded.optimizer)
    assert again is loaded.optimizer
    for got, expected in zip(values(again.variables), values(ours.optimizer.variables), strict=True):
        np.testing.assert_array_equal(got, expected)
    fit(ours)
    fit(loaded)
    for got, expected in zip(values(loaded.weights), values(ours.weights), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert_same_bits_on_all_ranks(loaded.weights)


@pytest.mark.slow
def test_training_saved_and_resumed_equals_training_on_the_joined_batch(tmp_path: Path) -> None:
    trained().save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    hvd.DistributedOptimizer(loaded.optimizer)
    fit(loaded)
    reference = model()
    reference.compile(keras.optimizers.Adam(0.02), "mse", run_eagerly=True)
    reference.fit(*joined(ROWS, BATCH), batch_size=BATCH * hvd.size(), epochs=2, shuffle=False, verbose=0)
    assert_trained_alike(loaded, reference)


def test_a_plain_model_trains_unsynchronised_until_it_is_wrapped_and_synchronised_from_then_on() -> None:
    ours = model()
    ours.compile(keras.optimizers.SGD(0.1), "mse")
    start = values(ours.weights)
    fit(ours)
    hvd.DistributedOptimizer(ours.optimizer)
    for variable, value in zip(ours.weights, start, strict=True):
        variable.assign(value)
    fit(ours)
    assert_same_bits_on_all_ranks(ours.weights)
    assert not np.array_equal(start[0], values(ours.weights)[0])


@pytest.mark.slow
def test_a_checkpoint_of_tensorflow_holds_the_wrapped_optimizers_state(tmp_path: Path) -> None:
    ours = trained()
    checkpoint = tf.train.Checkpoint(model=ours, optimizer=ours.optimizer)
    path = checkpoint.save(str(tmp_path / f"checkpoint-{hvd.rank()}"))
    saved = values(ours.optimizer.variables)
    fit(ours)
    assert not np.array_equal(saved[-1], values(ours.optimizer.variables)[-1])
    checkpoint.restore(path)
    for got, expected in zip(values(ours.optimizer.variables), saved, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.slow
def test_copies_are_plain_and_the_original_stays_wrapped() -> None:
    ours = trained()
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        copied = copy.deepcopy(ours.optimizer)
    assert type(copied) is keras.optimizers.Adam
    before = values(ours.weights)
    fit(ours)
    assert not np.array_equal(before[0], values(ours.weights)[0])
    assert_same_bits_on_all_ranks(ours.weights)
