"""Checkpoints of unusual models: two optimizers, no configuration, mixed precision, several batches a call."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import hvd_ext as hvd
from hvd_ext.errors import InvalidError
from hvd_ext.keras.checkpoint.callback import Checkpoint, newest
from tests.ranks import training
from tests.ranks.compare import assert_equal
from tests.ranks.conftest import LAUNCHED_SIZE
from tests.ranks.test_hangs import Adversaries
from tests.ranks.training import FEATURES, TARGETS, assert_same_bits_on_all_ranks, fill, values

# four processes on two cores need a minute for what two show in ten seconds
pytestmark = [pytest.mark.ranks(2), pytest.mark.skipif(LAUNCHED_SIZE > 2, reason="the same on any number of ranks")]


class Stopped(keras.callbacks.Callback):
    """Stops the first job after its first checkpoint."""

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.model.stop_training = batch >= 3


def adversaries(built: bool = True) -> keras.Model:
    """Two parts with an optimizer each, and an argument that Keras cannot write down."""
    made = Adversaries(functools.partial(hvd.DistributedOptimizer))
    made.compile(run_eagerly=True)
    made(np.zeros((1, TARGETS), np.float32))
    if built:
        for part, optimizer in ((made.generator, made.makes), (made.discriminator, made.tells)):
            optimizer.build(part.trainable_variables)
    return made


def mixed() -> keras.Model:
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        layers = [keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(TARGETS, dtype="float32")]
        made = keras.Sequential([keras.layers.Input((FEATURES,)), *layers])
        fill(made.weights)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.02, momentum=0.9))
        made.compile(optimizer, "mse", metrics=["mae"], steps_per_execution=2)
    finally:
        keras.config.set_dtype_policy(policy)
    return made


def everything(model: keras.Model) -> list[np.ndarray]:
    optimizers = [model.makes, model.tells] if isinstance(model, Adversaries) else [model.optimizer]
    return values([*model.variables, *(variable for optimizer in optimizers for variable in optimizer.variables)])


@pytest.mark.parametrize(("make", "file"), [(adversaries, "model.weights.h5"), (mixed, "model.keras")])
def test_it_goes_on_bit_for_bit(make: Any, file: str, tmp_path: Path) -> None:
    fit = functools.partial(training.fit, rows=12, batch=2)
    whole = make()
    expected = fit(whole).history
    first = make()
    fit(first, Checkpoint(tmp_path, every=None, every_steps=4), Stopped())
    if hvd.rank() == 0:
        path = newest(tmp_path)
        # Keras 3.8 writes a model.keras of any model
        assert path is not None and any((path / name).exists() for name in (file, "model.keras"))
    second = make()
    fill(second.trainable_weights, salt=5)
    seen = fit(second, Checkpoint(tmp_path)).history
    assert_equal(everything(second), everything(whole))
    assert seen == expected
    assert_same_bits_on_all_ranks(second.trainable_weights)
    assert not np.array_equal(values(second.weights)[0], values(make().weights)[0])


def test_an_optimizer_whose_variables_nobody_can_guess_must_be_built(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    checkpoint.set_model(adversaries(built=False))
    with pytest.raises(InvalidError, match=r"optimizer 'adam.*call its build\(variables\) before fit"):
        checkpoint.restore()
