"""`Elastic` refuses what it cannot go on with, and does nothing in a job without a supervisor."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import hvd_ext as hvd
from hvd_ext.data.cursor import Again
from hvd_ext.errors import InvalidError
from hvd_ext.keras.elastic_fit import progress as progresses
from hvd_ext.keras.elastic_fit.callback import _joined, _scale
from hvd_ext.keras.elastic_fit.progress import Progress

X = np.zeros((24, 2), np.float32)


@pytest.fixture(autouse=True)
def job():
    hvd.init()
    yield
    hvd.shutdown()


def compiled(optimizer=None, **options):
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    compile_options = {name: options.pop(name) for name in ("steps_per_execution",) if name in options}
    model.compile(hvd.DistributedOptimizer(optimizer or keras.optimizers.SGD(0.1), **options), "mse", **compile_options)
    return model


def data():
    return hvd.shard((X, X[:, :1]), 4, shuffle=True)


def fit(model, x=data, **options):
    return model.fit(x, verbose=0, callbacks=hvd.callbacks.synchronized([], elastic=True), **options)


def test_without_a_supervisor_it_is_an_ordinary_fit():
    model = compiled()
    assert fit(model, epochs=2).epoch == [0, 1]
    assert int(model.optimizer.iterations) == 12
    assert fit(model, lambda: (X, X[:, :1]), epochs=1, batch_size=8, validation_data=data).epoch == [0]
    assert int(model.optimizer.iterations) == 15


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps_per_execution": 2}, "needs steps_per_execution=1"),
        ({"delay": 1}, "does not go with delay"),
        ({"sync": "solo"}, "does not go with partial"),
        ({"local_steps": hvd.LocalSteps(every=2)}, "does not go with local_steps"),
        ({"backward_passes_per_step": 2}, "does not go with accumulated gradients"),
    ],
)
def test_what_it_cannot_go_on_with_is_refused(options, words):
    with pytest.raises(InvalidError, match=words):
        fit(compiled(**options))


@pytest.mark.parametrize("x", [X, None])
def test_data_that_cannot_be_divided_again_are_refused(x):
    with pytest.raises(InvalidError, match=r"with elastic=True it must be a function that returns the data"):
        fit(compiled(), x)
    with pytest.raises(InvalidError, match=r"fit, x \(.*Dataset\)"):
        fit(compiled(), data())


def test_the_length_of_an_epoch_is_that_of_the_data():
    with pytest.raises(InvalidError, match=r"fit, steps_per_epoch \(3\): with elastic=True the data say"):
        fit(compiled(), steps_per_epoch=3)


def test_the_scale_is_one_of_two():
    with pytest.raises(InvalidError, match=r"Elastic, scale \('square'\): must be 'none' or 'linear'"):
        hvd.callbacks.Elastic(scale="square")


def test_a_rate_is_scaled_and_a_schedule_is_refused():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
    _scale(optimizer, 1.5)
    assert float(optimizer.learning_rate) == 0.75
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    with pytest.raises(InvalidError, match="which is a schedule here"):
        _scale(hvd.DistributedOptimizer(keras.optimizers.SGD(schedule)), 2.0)


def test_batches_of_data_without_an_order_are_left_out_by_their_number():
    at = Progress(fit=0, epoch=1, step=6, updates=30, size=4, data={}, callbacks={})
    plain = hvd.shard((X, X[:, :1]), 4)
    assert [progresses.left_out(plain, at, size) for size in (4, 2, 3, 8)] == [6, 12, 8, 3]


def test_data_with_an_order_are_divided_from_their_position_on():
    data_set = data()
    at = Progress(fit=0, epoch=1, step=2, updates=8, size=1, data={"shard": {"parts": 1, "position": 10}}, callbacks={})
    assert progresses.left_out(data_set, at, 1) == 2  # 14 samples are left: 4 steps of 6
    (cursor,) = [cursor for _, cursor in progresses._named(data_set)]
    assert cursor.again == Again(1, 2, 10)
    assert progresses.position(data_set, 1, 3) == {"shard": {"parts": 1, "position": 14}}


def test_the_histories_of_two_worlds_are_joined():
    first, second = keras.callbacks.History(), keras.callbacks.History()
    first.epoch, first.history = [0, 1], {"loss": [3.0, 2.0]}
    second.epoch, second.history = [2], {"loss": [1.0], "accuracy": [0.5]}
    joined = _joined(first, second)
    assert joined.epoch == [0, 1, 2]
    assert joined.history == {"loss": [3.0, 2.0, 1.0], "accuracy": [0.5]}
    assert _joined(None, second) is second


class Writer(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.heard = []

    def on_train_begin(self, logs=None):
        self.heard.append("begin")

    def on_epoch_end(self, epoch, logs=None):
        self.heard.append(epoch)


def test_callbacks_that_write_work_on_the_rank_that_is_the_first(monkeypatch, tmp_path):
    writer, csv = Writer(), keras.callbacks.CSVLogger(tmp_path / "log.csv")
    listed = hvd.callbacks.synchronized([writer, csv], only_on_root=[Writer], elastic=True)
    assert writer not in listed
    model = compiled()
    model.fit(data, epochs=2, verbose=0, callbacks=listed)
    assert writer.heard == ["begin", 0, 1]
    monkeypatch.setattr("hvd_ext.keras.elastic_fit.first_rank.rank", lambda: 1)
    model.fit(data, epochs=2, verbose=0, callbacks=listed)
    assert writer.heard == ["begin", 0, 1]
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 3


def test_a_backup_is_refused_and_a_checkpoint_leaves_sigterm_alone(tmp_path):
    with pytest.raises(InvalidError, match="BackupAndRestore: with elastic=True it would go back"):
        hvd.callbacks.synchronized(keras.callbacks.BackupAndRestore(tmp_path), elastic=True)
    checkpoint = hvd.callbacks.Checkpoint(tmp_path / "checkpoints")
    checkpoint.leave_signal("SIGTERM")
    assert checkpoint.signals == ("SIGUSR1",)
