"""The callbacks on Keras 3: equal variables from the first step on, equal metrics at the end of each epoch."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import hvd_ext as hvd
from hvd_ext.errors import InvalidError
from tests.ranks.compare import assert_equal
from tests.ranks.training import (
    FEATURES,
    TARGETS,
    Spy,
    assert_same_bits_on_all_ranks,
    assert_trained_alike,
    compiled,
    data,
    fill,
    fit,
    joined,
    model,
    values,
)

pytestmark = pytest.mark.ranks(1, 2)

ROWS, BATCH = 8, 4


def test_the_roots_weights_and_optimizer_state_reach_all_before_the_first_step() -> None:
    root = hvd.size() - 1
    ours, reference = model(), model()
    fill(ours.weights, salt=hvd.rank())
    fill(reference.weights, salt=root)
    optimizer = keras.optimizers.SGD(0.125 if hvd.rank() == root else 0.5, momentum=0.9)
    plain = keras.optimizers.SGD(0.125, momentum=0.9)
    for each, target, salt in ((optimizer, ours, hvd.rank()), (plain, reference, root)):
        each.build(target.trainable_variables)
        fill(each.variables[2:], salt)
    optimizer.iterations.assign(100 + hvd.rank())
    ours.compile(hvd.DistributedOptimizer(optimizer), "mse")
    reference.compile(plain, "mse", run_eagerly=True)
    spy = Spy()
    start = values(reference.weights)
    fit(ours, hvd.BroadcastGlobalVariablesCallback(root), spy)
    reference.fit(*joined(ROWS, BATCH), batch_size=BATCH * hvd.size(), shuffle=False, verbose=0)
    assert_equal(spy.weights, start)
    assert_trained_alike(ours, reference)
    assert_same_bits_on_all_ranks(optimizer.variables)
    assert int(optimizer.iterations) == 100 + root + 2


def test_an_optimizer_that_only_the_root_has_built_is_built_and_filled_elsewhere() -> None:
    ours, optimizer = model(), keras.optimizers.Adam(0.1)
    if hvd.rank() == 0:
        optimizer.build(ours.trainable_variables)
        fill([variable for variable in optimizer.variables if "velocity" not in variable.path][2:])
    fit(compiled(optimizer, ours), hvd.BroadcastGlobalVariablesCallback(0))
    assert_same_bits_on_all_ranks([*ours.weights, *optimizer.variables])


@pytest.mark.parametrize("builds", ["no rank", "the root"])
def test_a_model_that_its_first_batch_builds_is_equal_after_that_batch(builds: str) -> None:
    keras.utils.set_random_seed(hvd.rank())
    ours = keras.Sequential([keras.layers.Dense(5, name="a"), keras.layers.Dense(TARGETS, name="b")], name="late")
    if builds == "the root" and hvd.rank() == 0:
        ours.build((None, FEATURES))
    eager = builds == "the root"  # a traced step takes long to make
    ours.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), "mse", run_eagerly=eager)
    fit(ours, hvd.BroadcastGlobalVariablesCallback())
    assert len(ours.weights) == 4
    assert_same_bits_on_all_ranks([*ours.weights, *ours.optimizer.variables])


def test_seed_generators_keep_their_own_state_so_that_dropout_differs() -> None:
    layers = [keras.layers.Dropout(0.5, seed=hvd.rank()), keras.layers.Dense(TARGETS)]
    ours = compiled(made=keras.Sequential([keras.layers.Input((FEATURES,)), *layers]))
    fit(ours, hvd.BroadcastGlobalVariablesCallback())
    (state,) = (variable for variable in ours.variables if "seed_generator" in variable.path)
    states = hvd.allgather_object(state.numpy().tolist())
    assert len({tuple(each) for each in states}) == hvd.size()
    assert_same_bits_on_all_ranks(ours.weights)


def test_it_sends_once_for_each_model_and_a_later_fit_keeps_what_was_trained() -> None:
    callback = hvd.BroadcastGlobalVariablesCallback(0)
    for salt in (1, 20):
        ours, spy, root = compiled(), Spy(), model()
        fill(ours.weights, salt + hvd.rank())
        fill(root.weights, salt)
        fit(ours, callback, spy)
        assert_equal(spy.weights, values(root.weights))
    ours.optimizer.learning_rate = 0.1 + hvd.rank()
    fit(ours, callback)
    assert float(ours.optimizer.learning_rate) == pytest.approx(0.1 + hvd.rank())


@pytest.mark.parametrize("root", [-1, True, "0", 10_000])
def test_a_root_that_is_no_rank_is_refused(root: object) -> None:
    with pytest.raises(InvalidError, match="root_rank"):
        fit(compiled(), hvd.BroadcastGlobalVariablesCallback(root))


def test_metrics_of_training_and_validation_are_averaged_over_the_ranks() -> None:
    vector = keras.metrics.F1Score(name="f1")
    ours, before, after = compiled(metrics=["mae", vector]), Spy(), Spy()
    validation = data(hvd.rank() + 50, ROWS)
    history = fit(ours, before, hvd.MetricAverageCallback(), after, epochs=2, validation_data=validation)
    assert set(after.epochs[0]) == {"loss", "mae", "f1", "val_loss", "val_mae", "val_f1"}
    every = hvd.allgather_object(before.epochs)
    for epoch in range(2):
        for name, value in after.epochs[epoch].items():
            mean = np.mean([logs[epoch][name] for logs in every], axis=0, dtype=np.float64)
            np.testing.assert_allclose(value, mean, rtol=1e-9)
            assert np.array_equal(history.history[name][epoch], value)
    assert hvd.allgather_object(repr(after.epochs)) == [repr(after.epochs)] * hvd.size()
    if hvd.size() > 1:
        assert after.epochs[0]["val_loss"] != before.epochs[0]["val_loss"]


def test_a_metric_that_only_some_ranks_have_is_left_alone() -> None:
    before, after = Spy(), Spy()
    validation = {"validation_data": data(9, ROWS)} if hvd.rank() == 0 else {}
    fit(compiled(), before, hvd.MetricAverageCallback(), after, **validation)
    if hvd.rank() == 0:
        assert after.epochs[0]["val_loss"] == before.epochs[0]["val_loss"]
    losses = hvd.allgather_object(before.epochs[0]["loss"])
    assert after.epochs[0]["loss"] == pytest.approx(sum(losses) / hvd.size(), rel=1e-9)


def test_logs_that_are_no_numbers_are_left_alone() -> None:
    logs = {"loss": np.float32(hvd.rank()), "lr": 1, "text": "words", "parts": [1.0, 2.0], "nothing": None}
    hvd.MetricAverageCallback().on_epoch_end(0, logs)
    mean = (hvd.size() - 1) / 2
    assert logs == {"loss": mean, "lr": 1.0, "text": "words", "parts": [1.0, 2.0], "nothing": None}
    hvd.MetricAverageCallback().on_epoch_end(0, None)
