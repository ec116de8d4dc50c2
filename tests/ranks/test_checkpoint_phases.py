"""A training of several calls of `fit` with one directory goes on bit for bit, wherever it was stopped."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import hvd_ext as hvd
from hvd_ext.keras import pace
from hvd_ext.keras.checkpoint import callback as module
from hvd_ext.keras.checkpoint.callback import Checkpoint, newest
from hvd_ext.state import manifest
from tests.ranks.compare import assert_equal
from tests.ranks.test_checkpoint import CrashError, Stop, fit, own_model
from tests.ranks.topk_jobs import OPTIONS, as_launched, hosts_of, restart
from tests.ranks.training import FEATURES, TARGETS, assert_same_bits_on_all_ranks, data, fill, values

pytestmark = pytest.mark.ranks(2)

# Of each phase: its first epoch, its end, the length of a series, and the series in a batch. The first two phases have
# one optimizer, with `TopK` and a momentum; the third has weights and an optimizer of its own, without `TopK`.
PHASES = ((0, 2, 3, 2), (2, 4, 4, 3), (4, 6, 4, 3))
ROWS = 6


def layers(salt: int) -> list[keras.layers.Layer]:
    return [
        keras.layers.Dense(8, activation="tanh"),
        keras.layers.BatchNormalization(),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dropout(0.3, seed=salt + hvd.rank()),
        keras.layers.Dense(2),
    ]


def wrapped(**options: Any) -> keras.optimizers.Optimizer:
    return hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), **options)


class Program:
    """A user's program, from its begin.

    Attributes:
        state: the variables at its end.
        epochs: those that each phase has trained.
        status: what it ends with.
    """

    def __init__(self, directory: Path | None, *more: keras.callbacks.Callback, **often: Any) -> None:
        module._here.clear()  # it is another process
        restart(hosts_of(hvd.size()))
        self.epochs: list[list[int]] = []
        self.status = 0
        parts, optimizer = layers(5), wrapped(compression=hvd.TopK(**OPTIONS, until=8, momentum_correction=True))
        model = None
        for number, (first, end, length, batch) in enumerate(PHASES):
            before, inputs = model, keras.layers.Input((length, 2))
            if number == 2:
                parts, optimizer = layers(9), wrapped()
            outputs = inputs
            for layer in parts:
                outputs = layer(outputs)
            model = keras.Model(inputs, outputs)
            if before is None:
                fill(model.trainable_weights)
            elif number == 2:
                model.set_weights(before.get_weights())
            model.compile(optimizer, "mse", run_eagerly=True)
            x, y = data(0, ROWS * hvd.size(), salt=number)
            series = np.stack([np.resize(row, (length, 2)) for row in x])
            callbacks = [
                hvd.callbacks.LearningRateWarmupCallback(0.05 + 0.01 * number, warmup_epochs=end),
                hvd.callbacks.LearningRateScheduleCallback(0.08, 0.9, start_epoch=end - 1, staircase=False),
                keras.callbacks.EarlyStopping("loss", patience=2, mode="min"),
                *more,
            ]
            if directory is not None:
                checkpoint = Checkpoint(directory, **often)
                callbacks.append(checkpoint)
            history = model.fit(
                hvd.shard((series, y), batch, shuffle=True, seed=number),
                initial_epoch=first,
                epochs=end,
                shuffle=False,
                verbose=0,
                callbacks=hvd.callbacks.synchronized(callbacks),
            )
            self.epochs.append(history.epoch)
            self.status = 0 if directory is None else checkpoint.exit_status
        self.state = values([*model.variables, *model.optimizer.variables])
        assert_same_bits_on_all_ranks(model.trainable_weights)


def position(directory: Path) -> tuple[int, int]:
    """Read how far training was when the newest checkpoint was saved."""
    hvd.barrier()
    found = manifest.read(newest(directory)).position
    hvd.barrier()
    return found


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One directory for all ranks, which ask each other for signals after each batch."""
    monkeypatch.setattr(pace, "ASK_S", 0.0)
    yield Path(hvd.broadcast_object(str(tmp_path / "job")))
    as_launched()


def test_a_training_in_phases_goes_on_bit_for_bit_wherever_it_was_stopped(
    shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = Program(None)
    assert whole.epochs == [[0, 1], [2, 3], [4, 5]]

    # in the last batch of a phase: its end comes when the program is started again
    stopped = Program(shared, Stop(1, 2), every=None)
    assert (stopped.epochs, stopped.status, position(shared)) == ([[0, 1], [], []], 143, (1, 3))
    # exactly at a change of phase
    with pytest.raises(CrashError):
        Program(shared, Stop(2, 0, crash=True), every=2)
    assert position(shared) == (2, 0)
    # in the middle of a phase
    stopped = Program(shared, Stop(3, 0), every=3)
    assert (stopped.epochs, stopped.status, position(shared)) == ([[], [2, 3], []], 143, (3, 1))
    caplog.clear()
    resumed = Program(shared)
    assert (resumed.epochs, resumed.status, position(shared)) == ([[], [3], [4, 5]], 0, (6, 0))
    assert_equal(resumed.state, whole.state)
    # all is done: the model of the last phase is as it was at its end
    done = Program(shared)
    assert (done.epochs, done.status) == ([[], [], []], 0)
    assert_equal(done.state, whole.state)
    if hvd.rank() == 0:
        words = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        # one rank hears that TopK changes nothing there
        assert all("is of a later fit" in text or "TopK changes nothing" in text for text in words), words


def test_calls_of_fit_that_do_not_count_their_epochs_through_are_told_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = Path(hvd.broadcast_object(str(tmp_path / "job")))
    model, checkpoint = own_model(), Checkpoint(directory)
    assert len(fit(model, checkpoint, epochs=2)["loss"]) == 2
    before = values(model.weights)
    assert fit(model, checkpoint, epochs=2) == {}
    other = keras.Sequential([keras.layers.Input((FEATURES,)), keras.layers.Dense(TARGETS)])
    fill(other.weights)
    other.compile(wrapped(), "mse")
    assert fit(other, Checkpoint(directory), epochs=1) == {}
    assert_equal(values(model.weights), before)
    if hvd.rank() == 0:
        words = [record.getMessage() for record in caplog.records]
        assert "the epochs of this fit, 0 to 1, are done: it trains nothing" in words[0]
        assert "checkpoint-000002 is of a later fit with another model: the model of this one stays" in words[-1]


class AtTheEnd(keras.callbacks.Callback):
    """Sends the last rank a signal when `fit` has saved for the last time."""

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if hvd.rank() == hvd.size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_that_comes_when_a_fit_can_not_stop_any_more_stops_the_next_one(shared: Path) -> None:
    module._here.clear()
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile(wrapped(), "mse")
    more: list[Any] = [AtTheEnd()]
    trained = []
    for epoch in range(3):
        callbacks = hvd.callbacks.synchronized([*more, Checkpoint(shared)])
        x = np.ones((6, 3), np.float32)
        more = []
        trained.append(
            model.fit(x, x[:, :1], 2, initial_epoch=epoch, epochs=epoch + 1, verbose=0, callbacks=callbacks).epoch
        )
    assert trained == [[0], [1], []]
    assert position(shared) == (1, 1)
