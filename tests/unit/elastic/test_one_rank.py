"""`fit` with elastic=True on one rank, whose worlds end in all places: nothing that it computes changes."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import hvd_ext as hvd
from hvd_ext.errors import CommunicationError
from hvd_ext.job import membership
from hvd_ext.keras import pace
from hvd_ext.keras.elastic_fit import callback as elastic_fit, calls

X = np.random.default_rng(2).random((40, 3), np.float32)
Y = X.sum(axis=1, keepdims=True) ** 2
EPOCHS = 6
PLACES = ("train_begin", "epoch_begin", "batch_begin", "batch_end", "test_begin", "test_end", "epoch_end", "train_end")


class Loses(keras.callbacks.Callback):
    """Raises what a lost peer raises, the first time that `fit` comes to each of some places."""

    def __init__(self, *places: tuple[str, int]) -> None:
        super().__init__()
        self.left = set(places)
        self.epoch = 0

    def _at(self, place: str, number: int) -> None:
        if (place, number) in self.left:
            self.left.discard((place, number))
            raise CommunicationError(f"lost at {place} {number}")

    def on_train_begin(self, logs: Any = None) -> None:
        self._at("train_begin", 0)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch
        self._at("epoch_begin", epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._at("batch_begin", 10 * self.epoch + batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._at("batch_end", 10 * self.epoch + batch)

    def on_test_begin(self, logs: Any = None) -> None:
        self._at("test_begin", self.epoch)

    def on_test_end(self, logs: Any = None) -> None:
        self._at("test_end", self.epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._at("epoch_end", epoch)

    def on_train_end(self, logs: Any = None) -> None:
        self._at("train_end", 0)


class Heard(keras.callbacks.Callback):
    """Notes the logs of the last time that each epoch has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: dict[int, dict[str, float]] = {}

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Note them."""
        self.logs[epoch] = dict(logs or {})


@pytest.fixture(autouse=True)
def counts_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the calls of `fit` be counted from this test on."""
    monkeypatch.setattr(elastic_fit, "calls", calls.Calls())


def trained(
    losses: Loses, *others: Any, epochs: int = EPOCHS, patience: int = 2, passes: int = 1, **options: Any
) -> tuple[Any, ...]:
    """Trains; returns the weights, the history, what a callback has heard, and the state of others."""
    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.05), backward_passes_per_step=passes)
    model.compile(optimizer, "mse", metrics=["mae"])
    heard = Heard()
    early = keras.callbacks.EarlyStopping("loss", patience=patience, min_delta=options.pop("min_delta", 0.0))
    plateau = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0.2)
    history = model.fit(
        lambda: hvd.shard((X, Y), 8, shuffle=True),
        epochs=epochs,
        validation_data=(X[:16], Y[:16]),
        verbose=0,
        callbacks=hvd.callbacks.synchronized([early, losses, plateau, heard, *others], elastic=True),
        **options,
    )
    assert not losses.left
    rate = float(model.optimizer.learning_rate)
    return model.get_weights(), history.epoch, history.history, heard.logs, (early.wait, early.best, rate)


@functools.cache
def undisturbed(**options: Any) -> tuple[Any, ...]:
    """Trains in one world."""
    return trained(Loses(), **options)


def check(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    """Checks that two trainings have come to the same."""
    for weight, expected in zip(one[0], other[0], strict=True):
        np.testing.assert_array_equal(weight, expected)
    assert one[1] == other[1]
    for mine, expected in ((one[2], other[2]), *((one[3][epoch], other[3][epoch]) for epoch in other[1])):
        assert set(mine) == set(expected)
        for name, values in expected.items():
            np.testing.assert_allclose(mine[name], values, rtol=1e-5)
    assert one[4] == pytest.approx(other[4])


@pytest.mark.parametrize("place", PLACES)
def test_a_world_that_ends_in_any_place_changes_nothing(session: Any, place: str) -> None:
    number = {"batch_begin": 23, "batch_end": 24, "train_begin": 0, "train_end": 0}.get(place, 2)
    check(trained(Loses((place, number))), undisturbed())


def test_worlds_that_end_at_random_change_nothing(session: Any) -> None:
    expected = undisturbed()
    draw = random.Random(8)
    for _ in range(3):
        places = []
        for place in draw.sample(PLACES, 6):
            number = draw.choice(expected[1])
            places.append((place, number * 10 + draw.randrange(5) if place.startswith("batch") else number))
        check(
            trained(Loses(*((place, 0 if place.startswith("train") else number) for place, number in places))), expected
        )


@pytest.mark.parametrize("place", [("batch_begin", 23), ("batch_end", 22), ("batch_end", 24), ("epoch_end", 2)])
def test_steps_whose_gradients_were_accumulated_are_repeated(session: Any, place: tuple[str, int]) -> None:
    expected = undisturbed(passes=5)  # an epoch is one update
    check(trained(Loses(place), passes=5), expected)


def test_a_world_ends_between_two_updates(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Waits(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            session.changed = session.changed or (session.world < 0 and batch == 1)

    monkeypatch.setattr(pace, "ASK_S", 0.0)
    check(trained(Loses(), Waits(), passes=5), undisturbed(passes=5))
    assert session.world == 0


def test_a_training_that_has_been_stopped_stays_so(session: Any) -> None:
    expected = undisturbed(patience=0, min_delta=10.0)
    assert len(expected[1]) == 2
    for place in ("epoch_end", "train_end", "test_end"):
        losses = Loses((place, 0 if place == "train_end" else 1))
        check(trained(losses, patience=0, min_delta=10.0), expected)


def test_worlds_that_end_before_a_step_are_not_repeated_for_ever(session: Any) -> None:
    class Fails(keras.callbacks.Callback):
        times = 0

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.times += 1
            raise CommunicationError("always")

    fails = Fails()
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
    with pytest.raises(CommunicationError, match="always"):
        model.fit(lambda: (X, Y), verbose=0, callbacks=hvd.callbacks.synchronized([fails], elastic=True))
    assert fails.times == elastic_fit._MOST + 1


def test_workers_join_between_epochs_of_one_step(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Waits(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            session.changed = session.changed or epoch == 1

    monkeypatch.setattr(pace, "ASK_S", 0.0)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
    callbacks = hvd.callbacks.synchronized([Waits()], elastic=True)
    history = model.fit(lambda: (X, Y), batch_size=40, epochs=12, verbose=0, callbacks=callbacks)
    assert session.world == 0
    assert not session.changed
    assert history.epoch == list(range(12))
    assert int(model.optimizer.iterations) == 12


def test_the_last_world_saves_a_checkpoint_from_which_another_job_continues(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.ends_with = "too few workers"
    with pytest.raises(SystemExit, match="1"):
        trained(Loses(("batch_begin", 23)), hvd.callbacks.Checkpoint(tmp_path))
    monkeypatch.setattr(membership, "session", lambda: None)
    resumed = trained(Loses(), hvd.callbacks.Checkpoint(tmp_path))
    expected = undisturbed()
    assert resumed[1] == expected[1][2:]
    for weight, value in zip(resumed[0], expected[0], strict=True):
        np.testing.assert_array_equal(weight, value)
    assert resumed[4] == pytest.approx(expected[4])


def test_a_last_world_without_a_checkpoint_says_what_is_lost(session: Any, caplog: pytest.LogCaptureFixture) -> None:
    session.ends_with = "too few workers"
    with pytest.raises(SystemExit, match="1"):
        trained(Loses(("batch_begin", 3)))
    assert "no Checkpoint is in the callbacks of fit, and what was trained is lost" in caplog.text
