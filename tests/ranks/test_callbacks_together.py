"""`synchronized`: Keras' own callbacks in a job of several ranks decide alike, write once, and stop together."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import hvd_ext as hvd
from hvd_ext.errors import InvalidError, MismatchError
from tests.ranks import training
from tests.ranks.compare import assert_equal
from tests.ranks.training import FEATURES, TARGETS, Spy, assert_same_bits_on_all_ranks, data, fill, values

pytestmark = pytest.mark.ranks(2)

ROWS, BATCH = 8, 2
STEPS = ROWS // BATCH


fit = functools.partial(training.fit, batch=BATCH, epochs=4)


def compiled(rate: float = 0.05, metrics: Any = ("mae",), **more: Any) -> keras.Model:
    return training.compiled(keras.optimizers.SGD(rate), metrics=metrics, **more)


def test_a_rank_that_sees_no_number_stops_all_after_the_same_step() -> None:
    ours, spy = compiled(traced=True), Spy()
    x, y = data(hvd.rank(), ROWS)
    if hvd.rank() == hvd.size() - 1:
        y[2 * BATCH :] = np.nan  # in the third of four steps
    callbacks = hvd.callbacks.synchronized([keras.callbacks.TerminateOnNaN(), spy])
    history = ours.fit(x, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
    assert (len(spy.rates), len(history.epoch)) == (3, 1)


@pytest.mark.parametrize(("every", "steps"), [("auto", 2), (3, 3), (None, STEPS)])
def test_one_rank_that_wants_to_stop_within_an_epoch_stops_all(every: Any, steps: int) -> None:
    ours, spy = compiled(), Spy(stop_in=2 if hvd.rank() == hvd.size() - 1 else None)
    fit(ours, *hvd.callbacks.synchronized(spy, stop_every=every))
    assert len(spy.rates) == steps
    assert_same_bits_on_all_ranks(ours.weights)


def test_deciders_decide_alike_where_only_one_rank_validates() -> None:
    ours, spy = compiled(rate=0.5), Spy()
    validation = {"validation_data": data(90, ROWS)} if hvd.rank() == 0 else {}
    stop = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True, verbose=1)
    slower = keras.callbacks.ReduceLROnPlateau("val_mae", factor=0.5, patience=1, min_delta=10.0)
    history = fit(ours, *hvd.callbacks.synchronized([stop, slower, spy]), epochs=8, **validation)
    assert set(history.history) == {"loss", "mae", "val_loss", "val_mae", "learning_rate"}
    assert hvd.allgather_object(history.history) == [history.history] * hvd.size()
    assert history.history["learning_rate"][-1] < 0.5
    assert_same_bits_on_all_ranks(ours.weights)
    assert stop.verbose == (1 if hvd.rank() == 0 else 0)


class Largest(keras.metrics.Metric):
    """A metric that does not add up over ranks: the largest error."""

    def __init__(self, name: str = "largest") -> None:
        super().__init__(name=name)
        self.value = self.add_weight(initializer="zeros", name="value")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(keras.ops.abs(y_true - y_pred))))

    def result(self) -> Any:
        return self.value


def test_a_metric_that_does_not_add_up_is_averaged_and_named(caplog: pytest.LogCaptureFixture) -> None:
    ours = compiled(0.0, [Largest()])
    before, after = Spy(), Spy()
    average = hvd.callbacks.MetricAverageCallback(exact=True)
    fit(ours, before, *hvd.callbacks.synchronized([average, after]), epochs=1)
    every = hvd.allgather_object(before.epochs[0])
    assert after.epochs[0]["largest"] == pytest.approx(sum(logs["largest"] for logs in every) / hvd.size())
    assert after.epochs[0]["loss"] == pytest.approx(sum(logs["loss"] for logs in every) / hvd.size(), rel=1e-5)
    ours.evaluate(*data(hvd.rank(), 2), verbose=0)
    assert set(hvd.callbacks.joined_metrics(ours)) == {"loss", "largest"}
    if hvd.size() > 1:
        said = [record.getMessage() for record in caplog.records if "log 'largest'" in record.getMessage()]
        assert len(said) == (hvd.rank() == 0)
        assert all("Largest.update_state does more than add to its variables" in text for text in said)
        fresh = compiled(0.0, ["mae"])
        if hvd.rank() == 0:
            fresh.evaluate(*data(0, 2), verbose=0)
        with pytest.raises(MismatchError, match="joined_metrics: the ranks' models must have the same metrics"):
            hvd.callbacks.joined_metrics(fresh)


class Counts(keras.metrics.Metric):
    """Counters whose result is a dictionary with a variable in it."""

    def __init__(self) -> None:
        super().__init__(name="counts")
        self.hits = self.add_weight(name="hits", initializer="zeros")
        self.rows = self.add_weight(name="rows", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.hits.assign_add(keras.ops.sum(keras.ops.cast(y_pred > 0.5, "float32") * y_true))
        self.rows.assign_add(keras.ops.sum(keras.ops.ones_like(y_true)))

    def result(self) -> Any:
        return {"share": self.hits / self.rows, "rows": self.rows}


class Rounded(keras.metrics.MeanAbsoluteError):
    """A class of Keras' with a changed update."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(y_true, keras.ops.round(y_pred), sample_weight)


def two_outputs(optimizer: Any) -> keras.Model:
    """A model with two outputs and metrics of every kind: scalars, vectors, dictionaries, with names that resemble."""
    inputs = keras.layers.Input((FEATURES,))
    outputs = {name: keras.layers.Dense(TARGETS, activation="sigmoid", name=name)(inputs) for name in ("one", "two")}
    ours = keras.Model(inputs, outputs)
    fill(ours.weights)
    first = [
        keras.metrics.AUC(name="auc"),
        keras.metrics.RootMeanSquaredError(name="rmse"),
        keras.metrics.F1Score(name="f1"),
        keras.metrics.R2Score(class_aggregation=None, name="r2"),
        keras.metrics.TruePositives(thresholds=[0.3, 0.5], name="hits"),  # its result is its variable
        Rounded(name="rounded"),
        Counts(),
        Largest("e"),  # the names of others end with it
        keras.metrics.MeanSquaredError(name="mse"),
    ]
    losses = {"one": "mse", "two": "mae"}
    ours.compile(optimizer, losses, metrics={"one": first, "two": ["mae"]}, run_eagerly=True)
    return ours


def binary(rank: int, rows: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Give data whose targets are 0 or 1."""
    x, y = data(rank, rows)
    targets = (y > 0).astype(np.float32)
    return x, {"one": targets, "two": targets}


def test_metrics_are_exactly_those_of_the_data_of_all_ranks() -> None:
    size, rank = hvd.size(), hvd.rank()

    def of_all(salt: int) -> dict[str, Any]:
        parts = [binary(of + salt, 4 + 2 * of) for of in range(size)]
        x = np.concatenate([x for x, _ in parts])
        y = {name: np.concatenate([y[name] for _, y in parts]) for name in ("one", "two")}
        return two_outputs("sgd").evaluate(x, y, batch_size=len(x), verbose=0, return_dict=True)

    ours, spy = two_outputs(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0))), Spy()
    x, y = binary(rank, 4 + 2 * rank)
    history = ours.fit(
        *binary(rank + 7, 4 + 2 * rank),
        batch_size=4 + 2 * rank,
        epochs=2,
        verbose=0,
        validation_data=(x, y),
        validation_freq=2,
        validation_batch_size=2 + rank,
        callbacks=hvd.callbacks.synchronized(spy),
    ).history
    ours.evaluate(x, y, batch_size=3 + rank, verbose=0)  # the last batch is smaller
    together = hvd.callbacks.joined_metrics(ours)
    expected, trained = of_all(0), of_all(7)
    assert together.keys() == expected.keys() == trained.keys()
    for name in expected.keys() - {"one_e", "e"}:  # the largest error does not add up
        if name not in ("one_loss", "two_loss"):  # where batches are uneven, Keras itself may take their plain mean
            np.testing.assert_allclose(together[name], expected[name], rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(spy.epochs[1][f"val_{name}"], expected[name], rtol=1e-5, err_msg=name)
        for epoch in spy.epochs:
            np.testing.assert_allclose(epoch[name], trained[name], rtol=1e-5, err_msg=name)
    (auc,) = (name for name in expected if name.endswith("auc"))
    assert history[f"val_{auc}"] == [spy.epochs[1][f"val_{auc}"]]
    every = hvd.allgather_object((together, *spy.epochs))
    for other in every:
        for got, wanted in zip(other, every[0], strict=True):
            assert all(np.array_equal(got[name], wanted[name]) for name in wanted)


class Adds(keras.callbacks.Callback):
    """Writes this rank's numbers into the logs."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        assert logs is not None
        logs["mine"] = float(hvd.rank() * epoch)
        logs["loss"] += hvd.rank()
        if hvd.rank() == 0:
            logs["alone"] = 1.0


def test_logs_that_callbacks_add_are_averaged_before_others_decide_by_them(caplog: pytest.LogCaptureFixture) -> None:
    ours = compiled()
    plateau = keras.callbacks.ReduceLROnPlateau("mine", mode="min", patience=2, factor=0.5, verbose=0)
    deciders = [plateau, keras.callbacks.EarlyStopping("mine", mode="min", patience=3)]
    more = [keras.callbacks.EarlyStopping("loss")] if hvd.rank() == 0 and hvd.size() > 1 else []
    for callbacks in ([Adds(), *deciders], [Adds(), *deciders, *more]):
        fill(ours.weights)
        history = fit(ours, *hvd.callbacks.synchronized(callbacks), epochs=2).history
        shared = {name: values for name, values in history.items() if name != "alone"}
        assert hvd.allgather_object(shared) == [shared] * hvd.size()
        assert history["mine"] == [0.0, (hvd.size() - 1) / 2]
        assert ("alone" in history) == (hvd.rank() == 0)
    said = [record.getMessage() for record in caplog.records if "'alone'" in record.getMessage()]
    assert len(said) == (1 if hvd.rank() == 0 and hvd.size() > 1 else 0)
    assert_same_bits_on_all_ranks([*ours.weights, ours.optimizer.learning_rate])


def with_statistics() -> keras.Model:
    """A model whose ranks gather statistics of their own, of all ranks, and in a local layer; with frozen weights."""
    own, everyones, local = (
        keras.layers.BatchNormalization(),
        hvd.SyncBatchNormalization(),
        keras.layers.BatchNormalization(),
    )
    frozen = keras.layers.Dense(3, trainable=False)
    parts = [own, everyones, local, frozen, keras.layers.Dropout(0.5, seed=hvd.rank()), keras.layers.Dense(TARGETS)]
    ours = keras.Sequential([keras.layers.Input((FEATURES,)), *parts])
    fill(ours.trainable_weights)
    frozen.kernel.assign(np.full(frozen.kernel.shape, 0.1))  # a third of three times this is another number
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.05), local_layers=[local])
    ours.compile(optimizer, "mse", run_eagerly=True)
    return ours


def test_statistics_are_averaged_before_validation_and_saving_and_only_those_that_differ(tmp_path: Path) -> None:
    apart, together = with_statistics(), with_statistics()
    x, y = data(hvd.rank(), ROWS)
    fit(apart, *hvd.callbacks.synchronized(), epochs=1)
    best = hvd.callbacks.BestModelCheckpoint("val_loss", filepath=tmp_path / "best.keras")
    callbacks = hvd.callbacks.synchronized([best, hvd.callbacks.AverageStatistics()])
    validation = {"validation_data": (x, y)} if hvd.rank() == 0 else {}
    history = fit(together, *callbacks, epochs=1, **validation).history
    before, after = (values(model.layers[0].non_trainable_weights) for model in (apart, together))
    ranks = hvd.allgather_object(before)
    assert hvd.size() == 1 or not np.array_equal(ranks[0][0], ranks[1][0])
    for got, each in zip(after, zip(*ranks, strict=True), strict=True):
        np.testing.assert_allclose(got, np.mean(each, 0), rtol=1e-6)
    assert_same_bits_on_all_ranks(together.layers[0].non_trainable_weights)
    for one, other in zip(apart.layers[1:], together.layers[1:], strict=True):
        assert_equal(other.variables, one.variables)
    if hvd.rank() == 0:
        assert history["val_loss"] == [pytest.approx(together.evaluate(x, y, verbose=0), rel=1e-6)]
        saved = keras.models.load_model(tmp_path / "best.keras")
        assert_equal(values(saved.layers[0].weights), values(together.layers[0].weights))
    with pytest.raises(InvalidError, match="AverageStatistics: must stand in front of BestModelCheckpoint"):
        fit(together, best, hvd.callbacks.AverageStatistics(), epochs=1)


def test_files_are_written_on_rank_0_only_and_training_goes_on_where_it_was_left(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [
            keras.callbacks.EarlyStopping("loss", patience=9),
            keras.callbacks.BackupAndRestore(str(tmp_path / "backup"), delete_checkpoint=False),
            keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras")),
            keras.callbacks.CSVLogger(str(tmp_path / "log.csv")),
        ]

    first = compiled()
    fill(first.weights, salt=hvd.rank())
    fit(first, *hvd.callbacks.synchronized(callbacks()), epochs=2)
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == (["1.keras", "2.keras", "backup", "log.csv"] if hvd.rank() == 0 else [])
    second, spy = compiled(), Spy()
    fill(second.weights, salt=50 + hvd.rank())
    second.optimizer.learning_rate = 0.5
    fit(second, *hvd.callbacks.synchronized([*callbacks(), spy]), epochs=3)
    assert len(spy.epochs) == 1
    straight = compiled()
    fit(straight, *hvd.callbacks.synchronized([]), epochs=3)
    assert_same_bits_on_all_ranks(second.weights)
    assert_equal(second.weights, straight.weights)
    if hvd.size() > 1:
        with pytest.raises(InvalidError, match="must be 0 with BackupAndRestore"):
            hvd.callbacks.synchronized(callbacks(), root_rank=1)


def test_the_list_has_each_of_ours_once_and_callbacks_of_the_users_own_where_they_say() -> None:
    start, average = hvd.callbacks.BroadcastGlobalVariablesCallback(), hvd.callbacks.MetricAverageCallback()
    stop, spy, history = hvd.callbacks.StopTogether(), Spy(), keras.callbacks.History()
    made = hvd.callbacks.synchronized([[spy, stop], (average,), start, history, None], only_on_root=[Spy])
    rest = [spy, history] if hvd.rank() == 0 else [history]
    end, *others = made
    (logs,) = [one for one in others if type(one).__name__ == "CacheLogs"]
    (same,) = [one for one in others if type(one).__name__ == "SameHyperparameters"]
    assert type(end).__name__ == "EndTogether"
    (added,) = [one for one in others if type(one).__name__ == "AverageAdded"]
    assert others == [start, average, logs, *rest, added, same, stop]
    for when, every in (("on_epoch_end", None), ("on_train_batch_end", 1)):
        listed = hvd.callbacks.synchronized(keras.callbacks.LambdaCallback(**{when: print}))
        names = [type(callback).__name__ for callback in listed]
        assert [*names[:2], names[-1]] == ["EndTogether", "BroadcastGlobalVariablesCallback", "StopTogether"]
        assert listed[-1].every == every


def test_there_is_one_bar(capsys: pytest.CaptureFixture[str]) -> None:
    ours = compiled()
    capsys.readouterr()
    fit(ours, hvd.callbacks.BroadcastGlobalVariablesCallback(), epochs=2, verbose="auto")
    printed = capsys.readouterr().out
    assert ("Epoch 2/2" in printed) == (hvd.rank() == 0)
    assert printed == "" or hvd.rank() == 0
    fit(ours, hvd.callbacks.BroadcastGlobalVariablesCallback(), epochs=2, verbose=2)
    assert "Epoch 2/2" in capsys.readouterr().out
    levels = [hvd.callbacks.verbose(), hvd.callbacks.verbose(2)]
    assert levels == (["auto", 2] if hvd.rank() == 0 else [0, 0])


def test_unequal_steps_and_epochs_are_refused_before_they_hang() -> None:
    ours = compiled()
    if hvd.size() == 1:
        fit(ours, *hvd.callbacks.synchronized([]), epochs=1)
        return
    odd = hvd.rank() == hvd.size() - 1
    for callbacks in (hvd.callbacks.synchronized([]), [hvd.callbacks.BroadcastGlobalVariablesCallback()]):
        with pytest.raises(InvalidError, match=f"rank {hvd.size() - 1} has 5, rank 0 has 4; hvd_ext.shard"):
            fit(ours, *callbacks, rows=10 if odd else 8)
    with pytest.raises(InvalidError, match=f"epochs must be the same .* rank {hvd.size() - 1} has 3, rank 0 has 2"):
        fit(ours, *hvd.callbacks.synchronized([]), epochs=3 if odd else 2)
    with pytest.raises(InvalidError, match="every"):
        hvd.callbacks.StopTogether(0)


def test_ranks_that_agree_after_different_steps_are_told_so() -> None:
    stop = hvd.callbacks.StopTogether()
    stop.set_model(compiled())
    stop.on_epoch_begin(2)
    odd = hvd.rank() == hvd.size() - 1
    for _ in range(3 if odd else 2):
        stop.on_train_batch_end(0)
    if hvd.size() == 1:
        stop.on_epoch_end(2)
        return
    words = f"rank {hvd.size() - 1} has ended with step 3 of epoch 3, rank 0 has ended with step 2 of epoch 3"
    with pytest.raises(MismatchError, match=words):
        stop.on_epoch_end(2)


def test_tensorboard_writes_on_rank_0_only(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="not installed")
    fit(compiled(), *hvd.callbacks.synchronized([keras.callbacks.TensorBoard(tmp_path / "board")]), epochs=1)
    assert bool(list(tmp_path.rglob("events.*"))) == (hvd.rank() == 0)
