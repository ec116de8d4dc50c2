"""The callbacks in the `fit` of Keras 2 (tf_keras), ours and its own in one list."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hvd_ext as hvd
from hvd_ext.errors import InvalidError
from tests.ranks.training import assert_same_bits_on_all_ranks, data

keras2 = pytest.importorskip("tf_keras", reason="tf_keras, which is Keras 2, is not installed")


def test_keras_2_trains_with_a_synchronized_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keras2.utils.set_random_seed(hvd.rank())
    ours = keras2.Sequential([keras2.layers.Dense(2)])  # built by its first batch
    optimizer = keras2.optimizers.SGD(0.1 * (1 + hvd.rank()), momentum=0.5)
    f1 = keras2.metrics.F1Score(threshold=0.5, name="f1")
    ours.compile(hvd.DistributedOptimizer(optimizer), "mse", metrics=["mae", f1])
    callbacks = [
        hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2),
        keras2.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True),
        keras2.callbacks.TerminateOnNaN(),
        keras2.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras")),
    ]
    x, y = data(hvd.rank(), 8)
    capsys.readouterr()
    history = ours.fit(
        x,
        y,
        batch_size=4,
        epochs=3,
        validation_data=data(hvd.rank() + 7, 4 + hvd.rank()),
        callbacks=hvd.callbacks.synchronized(callbacks),
    ).history
    assert (capsys.readouterr().out == "") == (hvd.rank() != 0)
    assert_same_bits_on_all_ranks([*ours.weights, optimizer.learning_rate, *optimizer.momentums])
    assert hvd.allgather_object(repr(history)) == [repr(history)] * hvd.size()
    everything = [
        np.concatenate(parts) for parts in zip(*(data(of + 7, 4 + of) for of in range(hvd.size())), strict=True)
    ]
    last = ours.evaluate(*everything, verbose=0, return_dict=True)
    ours.evaluate(*data(hvd.rank() + 7, 4 + hvd.rank()), verbose=0)
    together = hvd.callbacks.joined_metrics(ours)
    for name in ("loss", "mae", "f1"):
        np.testing.assert_allclose(together[name], last[name], rtol=1e-5)
        assert np.shape(history[f"val_{name}"][-1]) == np.shape(last[name])
    assert history["lr"][-1] == np.float32(0.1)
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == ([f"{epoch + 1}.keras" for epoch in range(len(history["lr"]))] if hvd.rank() == 0 else [])
    with pytest.raises(InvalidError, match="BackupAndRestore of tf_keras"):
        hvd.callbacks.synchronized(keras2.callbacks.BackupAndRestore(str(tmp_path)))


def test_keras_2_with_an_optimizer_that_is_not_wrapped_is_refused() -> None:
    plain = keras2.Sequential([keras2.layers.Dense(2)])
    plain.compile("sgd", "mse")
    callback = hvd.callbacks.MetricAverageCallback()
    if hvd.size() == 1:
        plain.fit(*data(0, 4), verbose=0, callbacks=[callback])
        return
    with pytest.raises(InvalidError, match="it is not wrapped, so each rank would train alone"):
        plain.fit(*data(hvd.rank(), 4), verbose=0, callbacks=[callback])
