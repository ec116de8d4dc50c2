"""The callbacks in the `fit` of Keras 2 (tf_keras), ours and its own in one list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import InvalidError, MismatchError
from hvd_ext.tensorflow import skipping
from tests.ranks.training import FEATURES, TARGETS, assert_same_bits_on_all_ranks, data

pytestmark = pytest.mark.ranks(1, 2)

keras2 = pytest.importorskip("tf_keras", reason="tf_keras, which is Keras 2, is not installed")


def test_keras_2_trains_with_a_synchronized_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keras2.utils.set_random_seed(hvd.rank())
    ours = keras2.Sequential([keras2.layers.Dense(2)])  # built by its first batch
    optimizer = keras2.optimizers.SGD(0.1 * (1 + hvd.rank()), momentum=0.5)
    f1 = keras2.metrics.F1Score(threshold=0.5, name="f1")
    ours.compile(hvd.DistributedOptimizer(optimizer), "mse", metrics=["mae", f1], run_eagerly=True)
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


def compiled() -> Any:
    keras2.utils.set_random_seed(1)
    made = keras2.Sequential([keras2.layers.Input((FEATURES,)), keras2.layers.Dense(TARGETS)])
    optimizer = hvd.DistributedOptimizer(keras2.optimizers.SGD(0.1, momentum=0.5))
    made.compile(optimizer, "mse", metrics=["mae"], run_eagerly=True)
    return made


@pytest.mark.parametrize("listed", [list, hvd.callbacks.synchronized], ids=["alone", "synchronized"])
def test_every_callback_is_taken_by_its_fit(listed: Any, tmp_path: Path) -> None:
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(),
        hvd.callbacks.AverageStatistics(),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.CacheLogs(),
        hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5**epoch),
        hvd.callbacks.BestModelCheckpoint("mae", filepath=tmp_path / "best.keras"),
        hvd.callbacks.BestModelCheckpoint("loss", filepath=tmp_path / "a.weights.h5", save_weights_only=True),
        hvd.callbacks.BestModelCheckpoint("loss", filepath=tmp_path / "batch.keras", save_freq=1),
        hvd.callbacks.EndTogether(),
        hvd.callbacks.StopTogether(1),
    ]
    made = compiled()
    x, y = data(hvd.rank(), 8)
    history = made.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=listed(callbacks)).history
    assert_same_bits_on_all_ranks(made.weights)
    assert sorted(path.name for path in tmp_path.iterdir()) == (
        ["a.weights.h5", "batch.keras", "best.keras"] if hvd.rank() == 0 else []
    )
    if hvd.rank() == 0 and history["mae"][1] < history["mae"][0]:
        best = keras2.models.load_model(tmp_path / "best.keras")
        np.testing.assert_array_equal(best.get_weights()[0], made.get_weights()[0])


@pytest.mark.parametrize("listed", [list, hvd.callbacks.synchronized], ids=["alone", "synchronized"])
def test_checkpoint_is_refused_in_words_on_all_ranks(listed: Any, tmp_path: Path) -> None:
    checkpoint = hvd.callbacks.Checkpoint(tmp_path)
    with pytest.raises(InvalidError, match="Checkpoint needs a model of Keras 3, and this one is of tf_keras"):
        compiled().fit(*data(hvd.rank(), 4), verbose=0, callbacks=listed([checkpoint]))
    loop = hvd.callbacks.Checkpoint(tmp_path)
    loop.set_model(compiled())
    with pytest.raises(InvalidError, match="Checkpoint needs a model of Keras 3"):
        loop.restore()


@pytest.mark.parametrize("make", [keras2.optimizers.SGD, keras2.optimizers.legacy.SGD])
def test_rates_that_part_raise_at_the_end_of_the_epoch(make: Any) -> None:
    class Sets(keras2.callbacks.Callback):  # type: ignore[name-defined,misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = 0.5 + 0.125 * hvd.rank()

    ours = keras2.Sequential([keras2.layers.Dense(2)])
    ours.compile(hvd.DistributedOptimizer(make(0.1)), "mse", run_eagerly=True)
    x, y = data(hvd.rank(), 4)
    if hvd.size() == 1:
        ours.fit(x, y, verbose=0, callbacks=hvd.callbacks.synchronized(Sets()))
        return
    with pytest.raises(MismatchError, match=r"learning_rate must .* it is 0\.5 on rank 0; 0\.625 on rank 1;"):
        ours.fit(x, y, verbose=0, callbacks=hvd.callbacks.synchronized(Sets()))
    hvd.allgather_object(0)


@pytest.mark.parametrize("make", [keras2.optimizers.SGD, keras2.optimizers.legacy.SGD])
def test_steps_that_are_all_skipped_end_with_an_error(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skipping, "LIMIT", 3)
    optimizer = keras2.mixed_precision.LossScaleOptimizer(make(0.1), initial_scale=4.0)  # two steps search for a scale
    optimizer = hvd.DistributedOptimizer(optimizer)
    variable = tf.Variable([1.0, 2.0])

    @tf.function  # type: ignore[untyped-decorator]
    def step(gradient: tf.Tensor) -> None:
        optimizer.apply_gradients([(gradient, variable)])

    bad = tf.fill([2], float("nan") if hvd.rank() == 0 else 1.0)
    for gradient in (bad, bad, tf.ones(2), bad, bad):
        step(gradient)
    with pytest.raises(tf.errors.InvalidArgumentError, match="all ranks have skipped the last 3 steps"):
        step(bad)
    step(tf.ones(2))
    assert_same_bits_on_all_ranks([variable])
