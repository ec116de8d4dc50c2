"""Checks of the rows of callbacks, load_model and SyncBatchNormalization; callbacks are driven as `fit` does."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import hvd_ext as hvd
from hvd_ext.errors import InvalidError
from hvd_ext.keras.optimizers.optimizer import Distributed
from tests.ranks.compare import assert_equal
from tests.ranks.migration.registry import check, compare, every, mine, named
from tests.ranks.training import assert_same_bits_on_all_ranks, compiled, data, fill, model, values

Schedule = hvd.callbacks.LearningRateScheduleCallback
Warmup = hvd.callbacks.LearningRateWarmupCallback
Broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback
Average = hvd.callbacks.MetricAverageCallback
Best = hvd.callbacks.BestModelCheckpoint


def built() -> keras.Model:
    ours = compiled(keras.optimizers.SGD(0.5))
    ours.optimizer.build(ours.trainable_variables)
    return ours


def driven(callback: keras.callbacks.Callback, ours: keras.Model, steps: int = 2) -> keras.callbacks.CallbackList:
    return keras.callbacks.CallbackList([callback], model=ours, steps=steps, epochs=3, verbose=0)


def rates(callback: keras.callbacks.Callback, steps: int = 2) -> list[float]:
    """Give the learning rate before each of two steps of three epochs."""
    ours = built()
    calls = driven(callback, ours, steps)
    seen = []
    calls.on_train_begin()
    for epoch in range(3):
        calls.on_epoch_begin(epoch)
        for batch in range(2):
            calls.on_train_batch_begin(batch)
            seen.append(float(ours.optimizer.learning_rate))
            calls.on_train_batch_end(batch, {"loss": 0.0})
        calls.on_epoch_end(epoch, {"loss": 0.0})
    calls.on_train_end()
    return seen


def halved(epoch: float) -> float:
    return 0.5**epoch


HALVED = [2.0, 2.0, 1.0, 1.0, 0.5, 0.5]


SMOOTH = [2.0 * halved(epoch + batch / 2) for epoch in range(3) for batch in range(2)]


def warmed(epochs: int = 2) -> list[float]:
    """Horovod's formula: the rate grows by each step's part of an epoch, up to the end of the warm-up, and stays."""
    size = hvd.size()
    steps = [(epoch * 2 + batch + 1) / 2 for epoch in range(epochs) for batch in range(2)]
    return [*(1.0 / size * (step * (size - 1) / epochs + 1) for step in steps), *[1.0] * (6 - 2 * epochs)]


S, W = "callbacks.LearningRateScheduleCallback", "callbacks.LearningRateWarmupCallback"
compare(
    {
        S: lambda: (rates(Schedule(2.0, halved)), HALVED),
        f"{S}(initial_lr)": lambda: (rates(Schedule(initial_lr=2.0, multiplier=halved)), HALVED),
        f"{S}(multiplier)": lambda: (rates(Schedule(2.0, multiplier=0.5)), HALVED),
        f"{S}(start_epoch)": lambda: (rates(Schedule(2.0, halved, start_epoch=1)), [0.5, 0.5, *HALVED[2:]]),
        f"{S}(end_epoch)": lambda: (rates(Schedule(2.0, halved, end_epoch=1)), [2.0] * 6),
        f"{S}(staircase)": lambda: (rates(Schedule(2.0, halved, staircase=False)), SMOOTH),
        f"{S}(momentum_correction)": lambda: (rates(Schedule(2.0, halved, momentum_correction=False)), HALVED),
        f"{S}(steps_per_epoch)": lambda: (
            rates(Schedule(2.0, halved, staircase=False, steps_per_epoch=2), steps=7),
            SMOOTH,
        ),
        W: lambda: (rates(Warmup(1.0, 2)), warmed()),
        f"{W}(initial_lr)": lambda: (rates(Warmup(initial_lr=3.0, warmup_epochs=2)), 3 * np.array(warmed())),
        f"{W}(warmup_epochs)": lambda: (rates(Warmup(1.0, warmup_epochs=1)), warmed(1)),
        f"{W}(momentum_correction)": lambda: (rates(Warmup(1.0, 2, momentum_correction=False)), warmed()),
        f"{W}(steps_per_epoch)": lambda: (rates(Warmup(1.0, 2, steps_per_epoch=2), steps=7), warmed()),
        f"{W}(verbose)": lambda: (rates(Warmup(1.0, 2, verbose=1)), warmed()),
    }
)


def bias_at_the_start(ours_is_local: bool = False, **keywords: Any) -> np.ndarray:
    """Begin training with unequal weights, and give the first layer's bias."""
    ours = built()
    fill(ours.weights, salt=hvd.rank())
    local = {"local_variables": [ours.weights[1]]} if ours_is_local else {}
    driven(Broadcast(**keywords, **local), ours).on_train_begin()
    return values(ours.weights)[1]


def bias_of(rank: int) -> np.ndarray:
    made = model()
    fill(made.weights, salt=rank)
    return values(made.weights)[1]


def averaged(callback: keras.callbacks.Callback) -> tuple[float, float]:
    """End an epoch with a metric that differs."""
    logs = {"loss": float(hvd.rank() + 1)}
    callback.set_model(built())
    callback.on_train_begin()
    callback.on_epoch_end(0, logs)
    return logs["loss"], (hvd.size() + 1) / 2


B, M = "callbacks.BroadcastGlobalVariablesCallback", "callbacks.MetricAverageCallback"
compare(
    {
        B: lambda: (bias_at_the_start(root_rank=0), bias_of(0)),
        f"{B}(root_rank)": lambda: (bias_at_the_start(root_rank=hvd.size() - 1), bias_of(hvd.size() - 1)),
        f"{B}(device)": lambda: (bias_at_the_start(root_rank=0, device="/cpu:0"), bias_of(0)),
        f"{B}(local_variables)": lambda: (bias_at_the_start(True, root_rank=0), bias_of(hvd.rank())),
        M: lambda: averaged(Average()),
        f"{M}(device)": lambda: averaged(Average(device="/cpu:0")),
    }
)


C = "callbacks.BestModelCheckpoint"


@check(*named(C, "monitor verbose save_weights_only mode save_freq"))
def best() -> None:
    """Weights are saved at the best of three values, by rank 0, under the path that was set later."""
    with tempfile.TemporaryDirectory() as folder:
        ours, path = built(), Path(folder) / "best.weights.h5"
        callback = Best(monitor="acc", verbose=0, save_weights_only=True, mode="max", save_freq="epoch")
        with pytest.raises(InvalidError, match="no file to save to"):
            driven(callback, ours).on_train_begin()
        callback.filepath = str(path)
        calls = driven(callback, ours)
        calls.on_train_begin()
        saved = []
        for epoch, value in enumerate((0.25, 0.75, 0.5)):
            path.unlink(missing_ok=True)
            calls.on_epoch_end(epoch, {"acc": value})
            saved.append(path.exists())
        assert saved == ([True, True, False] if hvd.rank() == 0 else [False] * 3)


class OwnSGD(keras.optimizers.SGD):
    """An optimizer that Keras does not know by itself."""


def own_loss(true: Any, predicted: Any) -> Any:
    return keras.ops.mean(keras.ops.square(true - predicted))


@check(*named("load_model", "filepath custom_optimizers custom_objects compression"))
def loaded() -> None:
    """A file of a plain model with an optimizer and a loss of one's own comes back wrapped, and goes on together."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        plain = model()
        plain.compile(OwnSGD(0.125, momentum=0.5), own_loss, run_eagerly=True)
        plain.train_on_batch(*data(0, 4))
        plain.save(path)
        ours = hvd.load_model(
            filepath=path,
            custom_optimizers=[OwnSGD],
            custom_objects={"own_loss": own_loss},
            compression=hvd.Compression.none,
        )
    assert isinstance(ours.optimizer, Distributed)
    assert_equal(ours.optimizer.variables, plain.optimizer.variables)
    ours.train_on_batch(*data(hvd.rank(), 4))
    assert_same_bits_on_all_ranks(ours.weights)


@check("load_model(legacy_opts)")
def no_legacy_optimizers() -> None:
    """There is nothing that True could mean; with tf_keras, whose files say it, any value is taken."""
    with pytest.raises(InvalidError, match="Keras 3 has no legacy optimizers"):
        hvd.load_model("x.keras", legacy_opts=True)


def normalized(**keywords: Any) -> tuple[np.ndarray, np.ndarray]:
    """Normalize rows whose moments are those of all ranks."""
    layer = hvd.SyncBatchNormalization(epsilon=1e-3, **keywords)
    rows = np.concatenate(every(0, (4, 3)))
    expected = (mine(0, (4, 3)) - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-3)
    return np.round(layer(mine(0, (4, 3)), training=True), 4), np.round(expected, 4)


compare({"SyncBatchNormalization": normalized, "SyncBatchNormalization(fused)": lambda: normalized(fused=False)})
