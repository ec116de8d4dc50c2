"""Training that was interrupted goes on bit for bit, and a checkpoint that is not whole on all ranks is skipped."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.common import global_state
from tensorflow.python.ops import stateful_random_ops

import hvd_ext as hvd
from hvd_ext import state
from hvd_ext.errors import CheckpointError, InvalidError, MismatchError
from hvd_ext.keras import pace
from hvd_ext.keras.checkpoint import model_state
from hvd_ext.keras.checkpoint.callback import Checkpoint, newest
from hvd_ext.state import arrays, folder, manifest
from tests.ranks import training
from tests.ranks.compare import assert_close, assert_equal
from tests.ranks.training import (
    FEATURES,
    TARGETS,
    assert_same_bits_on_all_ranks,
    compiled,
    data,
    everything,
    fill,
    values,
)

pytestmark = pytest.mark.ranks(2)

BATCH, STEPS = 2, 3


class CrashError(Exception):
    """Ends training as a crash does."""


class Crash(keras.callbacks.Callback):
    """Raises after so many batches."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.left = batches

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.left -= 1
        if not self.left:
            raise CrashError(random.random(), np.random.random())


class Stop(keras.callbacks.Callback):
    """Sends the last rank a signal in a batch of an epoch, or ends the program there."""

    def __init__(self, epoch: int, batch: int, *, crash: bool = False) -> None:
        super().__init__()
        self.at, self.crash, self._epoch = (epoch, batch), crash, 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if (self._epoch, batch) == self.at:
            if self.crash:
                raise CrashError
            if hvd.rank() == hvd.size() - 1:
                os.kill(os.getpid(), signal.SIGTERM)


class Draw(keras.callbacks.Callback):
    """Draws random numbers when the first epoch begins."""

    drawn: tuple[float, float] | None = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.drawn = self.drawn or (random.random(), np.random.random())


def own_model(seed: int = 0) -> keras.Model:
    """A model with much that is each rank's own: moving statistics, seeds, and gradients that it adds up."""
    made = keras.Sequential(
        [
            keras.layers.Input((FEATURES,)),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5, seed=3 + hvd.rank() + seed),
            keras.layers.Dense(TARGETS),
        ]
    )
    fill(made.trainable_weights)
    return compiled(keras.optimizers.Adam(0.02, gradient_accumulation_steps=2), made, metrics=["mae"])


def fit(model: keras.Model, *callbacks: keras.callbacks.Callback, epochs: int = 2) -> dict[str, list[float]]:
    return training.fit(model, *callbacks, rows=BATCH * STEPS, batch=BATCH, epochs=epochs).history


def batches(model: keras.Model) -> int:
    """How many batches the model has been trained on."""
    return int(model.optimizer._iterations.numpy())


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """One directory for all ranks."""
    return Path(hvd.broadcast_object(str(tmp_path / "job")))


def test_interrupted_in_the_middle_of_an_epoch_training_goes_on_bit_for_bit(
    shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = own_model()
    expected = fit(whole, hvd.callbacks.BroadcastGlobalVariablesCallback(), epochs=3)
    residual = np.arange(3) + hvd.rank()
    state.register("residual", lambda: {"r": residual.copy()}, lambda saved: residual.__setitem__(..., saved["r"]))
    state.register("gone", lambda: {"x": np.ones(2)}, print)
    try:
        first = own_model()
        random.seed(hvd.rank())
        np.random.seed(hvd.rank())
        with pytest.raises(CrashError) as crash:
            fit(first, Checkpoint(shared, every_steps=2), Crash(STEPS + 2), epochs=3)
        state.unregister("gone")
        residual[:] = -1
        random.seed(100)
        np.random.seed(100)
        second = own_model(seed=50)
        fill(second.trainable_weights, salt=4 + hvd.rank())
        # the broadcast comes last: it must not take away what each rank has for itself
        draw = Draw()
        later = Checkpoint(shared), draw, hvd.callbacks.BroadcastGlobalVariablesCallback()
        seen = fit(second, *later, epochs=3)  # an epoch after the interrupted one, which goes on from its end
    finally:
        state.unregister("residual")
        state.unregister("gone")
    if hvd.rank() == 0:
        assert "state in the checkpoint that no owner has claimed is dropped: gone (x)" in caplog.text
    assert state.unclaimed() == {}
    assert_equal(everything(second), everything(whole))
    assert seen == {name: each[1:] for name, each in expected.items()}
    assert residual.tolist() == [hvd.rank(), hvd.rank() + 1, hvd.rank() + 2]
    assert draw.drawn == crash.value.args
    assert_same_bits_on_all_ranks(second.trainable_weights)
    moving = hvd.allgather_object(second.layers[0].moving_mean.numpy().tolist())
    assert len({str(each) for each in moving}) == hvd.size()
    hvd.barrier()
    path = newest(shared)
    assert path is not None
    found = manifest.read(path)
    assert (found.epoch, found.step, found.ranks, found.reason) == (3, 0, hvd.size(), "end of epoch")
    assert len(folder.serials(shared)) == 3
    assert [entry.name for entry in found.files] == ["model.keras", *map(manifest.rank_file, range(hvd.size()))]
    assert second._initial_epoch is None
    plain = keras.models.load_model(path / found.model)
    np.testing.assert_array_equal(plain.trainable_weights[0].numpy(), second.trainable_weights[0].numpy())


class Drawn(keras.utils.PyDataset):
    """Batches that are drawn from Python's and NumPy's generators, each rank's its own."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        x = np.float32(np.random.rand(BATCH, FEATURES) + random.random())
        return x, x[:, :TARGETS]


class Restless(keras.callbacks.Callback):
    """Gives the other callbacks a loss that gets better and worse, equal on all ranks."""

    LOSSES = (4.0, 2.0, 3.0, 3.0, 3.0)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs["wanted"] = self.LOSSES[epoch]


def drawn(*more: keras.callbacks.Callback, seed: int = 1) -> tuple[Any, ...]:
    """Train on drawn batches until it is stopped early: the model, the stopping, and the learning rates seen."""
    keras.utils.set_random_seed(seed + hvd.rank())
    model = own_model()
    stopping = keras.callbacks.EarlyStopping("wanted", patience=2, mode="min", restore_best_weights=True)
    slower = keras.callbacks.ReduceLROnPlateau("wanted", factor=0.5, patience=1, mode="min")
    callbacks = [Restless(), stopping, slower, *more]
    history = model.fit(Drawn(), epochs=len(Restless.LOSSES), shuffle=False, verbose=0, callbacks=callbacks)
    return model, stopping, history.history.get("learning_rate", [])


@pytest.fixture(scope="module")
def undisturbed() -> tuple[Any, ...]:
    """What `drawn` gives without a crash."""
    return drawn()


@pytest.mark.parametrize(
    ("after", "often"), [(STEPS + 2, {"every": None, "every_steps": STEPS + 2}), (3 * STEPS, {"every": 3})]
)
def test_data_from_random_and_what_callbacks_know_go_on_as_if_nothing_had_happened(
    shared: Path,
    caplog: pytest.LogCaptureFixture,
    undisturbed: tuple[Any, ...],
    after: int,
    often: dict[str, int | None],
) -> None:
    whole, stopped, rates = undisturbed
    assert (stopped.stopped_epoch, len(rates)) == (3, 4)
    assert rates[-1] < rates[0]
    with pytest.raises(CrashError):
        drawn(Checkpoint(shared, **often), Crash(after + 1))
    resumed, stopping, later = drawn(Checkpoint(shared, every=4), seed=90)
    assert (stopping.stopped_epoch, stopping.best, stopping.best_epoch) == (3, stopped.best, stopped.best_epoch)
    assert later == rates[-len(later) :]
    assert_equal(everything(resumed), everything(whole))
    if after == STEPS + 2:
        return
    # the job has come to its end: once more there is nothing to train, and the model is that of the best epoch again
    again, stopping, rates = drawn(Checkpoint(shared, every=4), seed=90)
    assert (stopping.stopped_epoch, rates) == (3, [])
    assert_equal(again.weights, whole.weights)
    if hvd.rank() == 0:
        assert "a callback had ended training after epoch 4: there is nothing left to train" in caplog.text


def test_a_checkpoint_of_the_version_before_and_one_of_other_callbacks_can_be_gone_on_from(
    shared: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = arrays.write

    def older(file: Any, sections: dict[str, Any]) -> None:
        kept = ("weights", "seeds", "metrics", "random", "state:")
        write(file, {name: each for name, each in sections.items() if name in kept or name.startswith("state:")})

    monkeypatch.setattr(arrays, "write", older)
    with pytest.raises(CrashError):
        drawn(Checkpoint(shared / "older", every_steps=2, every=None), Crash(STEPS + 2))
    monkeypatch.undo()
    model, stopping, _ = drawn(Checkpoint(shared / "older", every=None))
    assert stopping.stopped_epoch == 3  # it has begun to count anew: in the second epoch, which is the best
    assert batches(model) == 4 * STEPS
    with pytest.raises(CrashError):
        drawn(Checkpoint(shared / "others", every_steps=STEPS + 2, every=None), Crash(STEPS + 3))
    fit(own_model(), Checkpoint(shared / "others", every=None), epochs=2)
    if hvd.rank() == 0:
        words = "the checkpoint has the state of callbacks that this fit does not have; dropped: "
        assert words + "EarlyStopping 0, ReduceLROnPlateau 0" in caplog.text


def test_looking_at_random_generators_makes_none_and_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # as in a process in which neither TensorFlow nor Keras has drawn a number yet
    monkeypatch.setattr(stateful_random_ops, "global_generator", None)
    monkeypatch.setattr(global_state.GLOBAL_STATE_TRACKER, "global_seed_generator", None, raising=False)
    random.seed(3)
    expected = random.Random(3).random()
    assert sorted(model_state.random_state()) == ["numpy", "numpy keys", "python"]
    assert random.random() == expected

    def numbers() -> tuple[float, ...]:
        of_tensorflow = tf.random.get_global_generator().uniform(())
        return random.random(), float(keras.random.uniform(())), float(of_tensorflow)

    numbers()
    state = model_state.random_state()
    assert {"keras", "tensorflow"} <= set(state)
    wanted = numbers()
    model_state.set_random_state(state)
    assert numbers() == wanted


def test_a_signal_to_one_rank_stops_all_after_the_same_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "ASK_S", 0.0)
    before = signal.getsignal(signal.SIGTERM)
    # every rank has a directory of its own
    stopping = Checkpoint(tmp_path / "job", keep=1)
    model = own_model()
    # its wish to stop is not held back until the epoch ends: it comes last, wherever it is handed over
    listed = hvd.callbacks.synchronized([stopping, Stop(1, 1)])
    assert listed[-1] is stopping
    fit(model, *listed, epochs=5)
    assert (stopping.stopped_by, stopping.exit_status) == ("SIGTERM", 143)
    assert signal.getsignal(signal.SIGTERM) is before
    assert hvd.allgather_object(batches(model)) == [STEPS + 2] * hvd.size()
    [serial] = folder.serials(tmp_path / "job")
    names = {path.name for path in folder.path_of(tmp_path / "job", serial).iterdir()}
    assert manifest.rank_file(hvd.rank()) in names
    assert ("model.keras" in names) == (hvd.rank() == 0)

    leaving = Checkpoint(tmp_path / "job", on_signal="exit", every=None)
    again = own_model(seed=9)
    with pytest.raises(SystemExit) as ended:
        fit(again, leaving, Stop(1, 1), epochs=5)
    # it goes on after two batches of the second epoch, and the signal comes while they are left out
    assert ended.value.code == 143
    assert hvd.allgather_object(batches(again)) == [STEPS + 3] * hvd.size()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_checkpoint_that_one_rank_lacks_is_named_and_passed_over_by_all(
    tmp_path: Path, shared: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "hvd_ext")
    last, directory = hvd.size() - 1, tmp_path / "own"
    model = own_model()
    saving = Checkpoint(directory)
    saving.set_model(model)
    assert saving.restore() == (0, 0)
    weights = []
    for epoch in (1, 2, 3):
        model.train_on_batch(*data(hvd.rank(), BATCH))
        saving.save(epoch)
        weights.append(values(model.weights))
    if hvd.rank() == last:
        torn = folder.path_of(directory, 3) / manifest.rank_file(last)
        torn.write_bytes(torn.read_bytes()[:100])
    if hvd.rank() == 0:
        whole = folder.path_of(directory, 2) / "model.keras"
        whole.write_bytes(whole.read_bytes()[::-1])
    caplog.clear()
    again = Checkpoint(directory, resume=True)
    again.set_model(own_model(seed=1))
    assert again.restore() == (1, 0)
    assert_equal(values(again.model.weights), weights[0])
    if hvd.rank() == 0:
        words = [record.getMessage() for record in caplog.records]
        assert f"skipped: rank {last}: checkpoint-000003: rank-0000{last}.npz is torn" in words[0]
        assert "skipped: checkpoint-000002: model.keras is damaged" in words[1]
        assert words[2].endswith("checkpoint-000001: restored: epoch 1, batch 0")

    # a disk that is full on one rank: an error on all, what was there stays
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    before = sorted(path.name for path in directory.iterdir())
    if hvd.rank() == last:
        monkeypatch.setattr(arrays, "write", full)
    with pytest.raises(CheckpointError, match="No space left on device") as failed:
        again.save(4)
    assert hvd.size() == 1 or f"rank {last}: " in str(failed.value)
    assert sorted(path.name for path in directory.iterdir()) == before
    monkeypatch.undo()
    again.save(4)
    assert folder.serials(directory)[0] == 5

    # other numbers of ranks, and other models
    if hvd.rank() == 0:
        path = folder.path_of(directory, 5) / manifest.FILE
        path.write_text(json.dumps(json.loads(path.read_text()) | {"ranks": hvd.size() + 1}), encoding="utf-8")
    caplog.clear()
    more = Checkpoint(directory)
    more.set_model(own_model())
    assert more.restore() == (4, 0)
    np.testing.assert_array_equal(more.model.weights[0].numpy(), weights[0][0])
    if hvd.rank() == 0:
        words = caplog.records[-1].getMessage()
        assert f"saved by {hvd.size() + 1} ranks, restored on {hvd.size()}: all ranks get rank 0's model" in words
        assert hvd.size() == 1 or "moving_mean" in words
    other = keras.Sequential([keras.layers.Input((FEATURES,)), keras.layers.Dense(7)])
    other.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    more.set_model(other)
    with pytest.raises(CheckpointError, match=r"checkpoint-000005: saved from another model: variable 0 was .*kernel"):
        more.restore()


def test_what_cannot_work_is_refused_on_all_ranks(tmp_path: Path) -> None:
    model = own_model()
    last = hvd.size() - 1
    (tmp_path / "file").touch()

    def refused(words: str, kind: type[Exception], callback: Checkpoint, of: keras.Model = model) -> None:
        callback.set_model(of)
        with pytest.raises(kind, match=words):
            callback.restore()

    directory = tmp_path / ("file" if hvd.rank() == last else "job") / "x"
    refused("must be writable: Not a directory", InvalidError, Checkpoint(directory))
    resuming = Checkpoint(tmp_path / "job", resume=True)
    refused("no checkpoint is complete, but resume=True needs one", CheckpointError, resuming)
    if hvd.size() > 1:
        uneven = Checkpoint(tmp_path / "job", keep=1 + (hvd.rank() == last))
        refused(f"keep must be the same on all ranks; rank {last} has '2'", MismatchError, uneven)
        place = Checkpoint(tmp_path / "job")
        place.set_model(model)
        with pytest.raises(MismatchError, match="step must be the same on all ranks"):
            place.save(1, hvd.rank())
    unbuilt = keras.Sequential([keras.layers.Dense(2)])
    refused("its variables do not exist yet; give it an Input", InvalidError, Checkpoint(tmp_path / "job"), unbuilt)
    for wrong in ({"every": 0}, {"every_steps": True}, {"keep": None}, {"resume": "yes"}, {"on_signal": "die"}):
        with pytest.raises(InvalidError, match=f"Checkpoint, {next(iter(wrong))} "):
            Checkpoint(tmp_path, **wrong)


def averaged() -> keras.Model:
    """Make a model whose optimizer averages its weights."""
    made = keras.Sequential([keras.layers.Input((FEATURES,)), keras.layers.Dense(TARGETS)])
    fill(made.weights)
    return compiled(keras.optimizers.SGD(0.1, momentum=0.5, use_ema=True, ema_momentum=0.5), made)


@pytest.mark.parametrize("how", ["loop", "local", "backup"])
def test_weights_that_have_changed_places_with_their_averages_change_back(how: str, tmp_path: Path) -> None:
    validation = data(hvd.rank(), 2 * BATCH)

    def trained(epochs: int, *others: Any) -> keras.Model:
        made = averaged()
        if how == "local":
            made.optimizer.register_local_var(made.weights[0])
        callbacks = hvd.callbacks.synchronized([keras.callbacks.SwapEMAWeights(swap_on_epoch=True), *others])
        training.fit(made, *callbacks, rows=2 * BATCH, batch=BATCH, epochs=epochs, validation_data=validation)
        return made

    def saving() -> Any:
        if how == "backup":
            return keras.callbacks.BackupAndRestore(str(tmp_path / "backup"), delete_checkpoint=False)
        return hvd.callbacks.Checkpoint(tmp_path)

    with pytest.raises(CrashError):
        trained(3, saving(), Crash(5))
    if how == "loop":
        restored, checkpoint = averaged(), saving()
        checkpoint.set_model(restored)
        assert checkpoint.restore() == (2, 0)
        averages = values(restored.optimizer._model_variables_moving_average)
        assert not np.array_equal(restored.get_weights()[0], averages[0])
        assert_close(averages, trained(2).get_weights(), rtol=1e-5, atol=1e-6)
        return
    assert_equal(trained(3, saving()).get_weights(), trained(3).get_weights())
