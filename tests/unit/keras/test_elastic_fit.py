"""`Elastic` refuses what it cannot go on with, and does nothing in a job without a supervisor."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import hvd_ext as hvd
from hvd_ext.data.cursor import Again
from hvd_ext.errors import InvalidError
from hvd_ext.keras.callbacks import stopping
from hvd_ext.keras.callbacks.stopping import StopTogether
from hvd_ext.keras.checkpoint.skipping import Skipping
from hvd_ext.keras.elastic_fit import progress as progresses
from hvd_ext.keras.elastic_fit.calls import Calls
from hvd_ext.keras.elastic_fit.carried import Part, _found
from hvd_ext.keras.elastic_fit.progress import Logs, Meeting, Progress

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


def test_ranks_agree_on_nothing_in_batches_that_are_left_out(monkeypatch):
    model, stop, agreed = compiled(), StopTogether(1), []
    exchanged = stopping.allgather_object
    monkeypatch.setattr(
        stopping, "allgather_object", lambda *one, **named: agreed.append(one) or exchanged(*one, **named)
    )
    model.make_train_function()
    stop.set_model(model)
    stop.set_params({"steps": 9, "epochs": 1})
    stop.on_train_begin()
    stop.on_epoch_begin(0)
    skipping = Skipping(model, 2, lambda iterator: None, reads=False)
    del agreed[:]
    for batch in range(3):
        stop.on_train_batch_end(batch)
    assert not agreed
    skipping.drop()
    stop.on_train_batch_end(3)
    assert len(agreed) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps_per_execution": 2}, "needs steps_per_execution=1"),
        ({"delay": 1}, "does not go with delay"),
        ({"sync": "solo"}, "does not go with partial"),
        ({"local_steps": hvd.LocalSteps(every=2)}, "does not go with local_steps"),
        (
            {
                "optimizer": keras.optimizers.LossScaleOptimizer(
                    keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
                )
            },
            "does not go with accumulated gradients and a loss scale",
        ),
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


def test_a_schedule_cannot_be_scaled():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    model = compiled(keras.optimizers.SGD(schedule))
    with pytest.raises(InvalidError, match="which is a schedule here"):
        model.fit(data, callbacks=[hvd.callbacks.Elastic(scale="linear")])
    assert progresses.rates_of(model) == [None]


def test_rates_are_those_of_the_rank_that_is_ahead():
    model = compiled(keras.optimizers.SGD(0.5))
    assert progresses.rates_of(model) == [0.5]
    progresses.set_rates(model, [0.75])
    assert float(model.optimizer.learning_rate) == 0.75


def test_the_number_of_copies_is_0_or_1():
    with pytest.raises(InvalidError, match=r"Elastic, redundancy \(2\): must be 0 or 1"):
        hvd.callbacks.Elastic(redundancy=2)


def test_one_optimizer_says_how_far_a_rank_is():
    model = compiled()
    model.other = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(InvalidError, match="needs one distributed optimizer, given to compile.*it has 2"):
        fit(model)
    model = compiled()
    model.optimizer = None
    with pytest.raises(InvalidError, match="needs one distributed optimizer"):
        fit(model)


def test_divided_data_for_validation_must_be_a_function():
    with pytest.raises(InvalidError, match="divided data must be a function that returns them"):
        fit(compiled(), data, validation_data=data())


def test_batches_of_data_without_an_order_are_left_out_by_their_number():
    at = Progress(fit=0, epoch=1, step=6, updates=30, size=4)
    plain = hvd.shard((X, X[:, :1]), 4)
    assert [progresses.left_out(plain, at, size) for size in (4, 2, 3, 8)] == [6, 12, 8, 3]


def test_data_with_an_order_are_divided_from_their_position_on():
    data_set = data()
    at = Progress(fit=0, epoch=1, step=2, updates=8, size=1, data={"shard": {"parts": 1, "position": 10}})
    assert progresses.left_out(data_set, at, 1) == 2  # 14 samples are left: 4 steps of 6
    (cursor,) = [cursor for _, cursor in progresses._named(data_set)]
    assert cursor.again == Again(1, 2, 10)
    assert progresses.position(data_set, 1, 3) == {"shard": {"parts": 1, "position": 14}}


def history(epochs, **values):
    made = keras.callbacks.History()
    made.epoch, made.history = epochs, values
    return made


def test_the_histories_of_two_worlds_are_joined():
    calls = Calls()
    number = calls.begin()
    calls.add(number, history([0, 1], loss=[3.0, 2.0]))
    calls.add(number, keras.callbacks.History())  # of a world that was lost before its first epoch
    calls.add(number, last := history([2], loss=[np.float32(1.0)], accuracy=[0.5]))
    joined = calls.history(number, last)
    assert joined is last
    assert joined.epoch == [0, 1, 2]
    assert joined.history == {"loss": [3.0, 2.0, 1.0], "accuracy": [0.5]}


def test_a_worker_that_comes_late_has_the_histories_of_the_calls_that_it_passes_over():
    calls = Calls()
    others = [Logs([0], {"loss": [2.0]}), Logs([0, 1], {"loss": [1.0, 0.5]}), Logs([], {})]
    meeting = Meeting([None, (2, 9, 0, 3)], 1, others)
    assert calls.met(meeting, calls.begin())
    assert calls.is_over(0)
    assert calls.history(0).history == {"loss": [2.0]}
    assert calls.is_over(calls.begin())
    assert calls.history(1).epoch == [0, 1]
    number = calls.begin()
    assert not calls.is_over(number)
    assert calls.here(number) is meeting
    assert not calls.met(meeting, number)
    assert calls.here(number) is None


def test_in_between_calls_that_it_passes_over_a_worker_exchanges_nothing():
    calls, model = Calls(), compiled(compression=hvd.TopK(0.5))
    model.train_on_batch(X[:4], X[:4, :1])
    assert calls.met(Meeting([None, (1, 9, 0, 3)], 1, [Logs([0], {}), Logs([], {})]), calls.begin())
    hvd.flush(model.optimizer)  # as the others have done
    with pytest.raises(InvalidError, match="mine: this worker came late, and the others wait"):
        hvd.allreduce(X, name="mine")
    with pytest.raises(InvalidError, match="broadcast_object: this worker came late"):
        hvd.broadcast_object(3)
    calls.begin()
    hvd.flush(model.optimizer)
    np.testing.assert_array_equal(hvd.allreduce(X), X)


def test_who_has_ended_an_epoch_is_further_than_who_has_made_as_many_updates():
    ranks = [Progress(0, 1, 6, 12, 2), Progress(0, 2, 0, 12, 2), Progress(0, 1, 5, 11, 2), Progress(1, 0, 0, 12, 2)]
    assert [rank.key for rank in sorted(ranks, key=lambda rank: rank.key)] == [
        (0, 11, 1, 5),
        (0, 12, 1, 6),
        (0, 12, 2, 0),
        (1, 12, 0, 0),
    ]


def test_copies_stand_for_lost_ranks_only_if_they_are_of_the_last_update():
    def part(rank, updates):
        return Part(rank, 4, updates, {})

    held = [[part(0, 7), part(3, 6)], [part(1, 7), part(0, 7)], [part(2, 7), part(1, 7)], [None]]
    assert [each.rank for each in _found(held, 7)] == [0, 1, 2]
    held[0][1] = part(3, 7)
    assert [each.rank for each in _found(held, 7)] == [0, 1, 2, 3]
    assert _found(held, 7)[3] is held[0][1]


def test_metrics_continue_where_they_were():
    model = compiled()
    model.fit(X, X[:, :1], verbose=0)
    values = progresses.metrics_of(model)
    assert values
    model.reset_metrics()
    progresses.set_metrics(model, values)
    for now, before in zip(progresses.metrics_of(model), values, strict=True):
        np.testing.assert_array_equal(now, before)
    progresses.set_metrics(model, [])  # of a rank that has none yet: nothing changes
    assert len(progresses.metrics_of(model)) == len(values)


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
