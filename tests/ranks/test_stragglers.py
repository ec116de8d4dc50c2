"""Optimizers and tapes whose steps do not wait for all ranks, or return their results one step late."""

from __future__ import annotations

import hashlib
import itertools
import logging
import re
import time
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import HvdExtError, InvalidError
from hvd_ext.job import runtime
from hvd_ext.keras.optimizers.optimizer import channels
from tests.ranks.conftest import LAUNCHED_SIZE
from tests.ranks.training import policy_of

# a majority or a quorum of two ranks is one or both
pytestmark = [pytest.mark.slow, pytest.mark.ranks(1, 3)]

several = pytest.mark.skipif(LAUNCHED_SIZE == 1, reason="nobody is late")


def digest(values: list[Any]) -> str:
    return hashlib.sha256(b"".join(np.asarray(value).tobytes() for value in values)).hexdigest()


def gradient(rank: int, step: int, size: int = 3) -> tf.Tensor:
    """Whole numbers, so that sums are exact."""
    return tf.constant([float((rank + 1) * (step + 3 * one) % 17) for one in range(size)])


def total(steps: Iterable[int], ranks: Iterable[int] | None = None) -> np.ndarray:
    """Give the sum of the gradients of ranks, of all unless told otherwise, in some steps."""
    ranks = range(hvd.size()) if ranks is None else ranks
    return sum((gradient(rank, step).numpy() for rank, step in itertools.product(ranks, steps)), np.zeros(3))


def equal_on_all_ranks(value: Any) -> bool:
    return len(set(hvd.allgather_object(value))) == 1


def over(optimizer: Any, round_number: int) -> None:
    """Wait until a round is over, whose step this rank has not begun."""
    engine, handle = runtime.current().engine, channels(optimizer)[0].handle
    while engine.progress(handle).over < round_number:
        time.sleep(0.001)


def linear(width: int) -> keras.Model:
    """A model with equal weights on all ranks."""
    return keras.Sequential([keras.layers.Input((width,)), keras.layers.Dense(1, kernel_initializer="ones")])


def opened(sync: str, **options: Any) -> tuple[Any, keras.Variable]:
    """An optimizer that subtracts what it is given, after its first step, which is zero and waits for nobody else."""
    variable = keras.Variable(np.zeros(3), dtype="float32")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum, sync=sync, **options)
    optimizer.apply([tf.zeros(3)], [variable])
    hvd.barrier()
    return optimizer, variable


@several
def test_a_late_gradient_enters_a_later_step_and_nothing_is_lost() -> None:
    optimizer, variable = opened("solo", staleness=3)
    for step in range(1, 7):
        if hvd.rank() == 0:
            optimizer.apply([gradient(0, step)], [variable])
            continue
        over(optimizer, 1 + min(6, step + step % 3))  # rank 0 goes ahead, by three steps at most
        optimizer.apply([gradient(hvd.rank(), step)], [variable])
    assert equal_on_all_ranks(digest([variable]))
    hvd.flush(optimizer)
    optimizer.apply([tf.zeros(3)], [variable])
    assert equal_on_all_ranks(digest([variable]))
    np.testing.assert_array_equal(variable.numpy(), -total(range(1, 7)))
    assert not runtime.current().engine.holds(channels(optimizer)[0].handle)


@several
def test_a_rank_catches_up_without_gradients() -> None:
    optimizer, variable = opened("solo", staleness=4)
    if hvd.rank() == 0:
        for step in range(1, 4):
            optimizer.apply([gradient(0, step)], [variable])
    else:
        over(optimizer, 4)
        assert hvd.catch_up(optimizer) == 3
        assert hvd.catch_up(optimizer) == 0
    hvd.barrier()
    np.testing.assert_array_equal(variable.numpy(), -total(range(1, 4), [0]))
    assert int(optimizer.iterations) == 4
    optimizer.apply([gradient(hvd.rank(), 4)], [variable])
    hvd.flush(optimizer)
    optimizer.apply([tf.zeros(3)], [variable])
    np.testing.assert_array_equal(variable.numpy(), -total(range(1, 4), [0]) - total([4]))


@several
@pytest.mark.parametrize("updates", [1, 2])  # before: passes since the last update are not counted by updates
def test_what_was_accumulated_is_the_gradient_of_a_step_that_is_caught_up(updates: int) -> None:
    variable = keras.Variable(np.zeros(3), dtype="float32")
    plain = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    optimizer = hvd.DistributedOptimizer(plain, op=hvd.Sum, sync="solo", staleness=4)
    for _ in range(2 * updates):
        optimizer.apply([tf.zeros(3)], [variable])
    hvd.barrier()
    if hvd.rank() == 0:
        for step in range(1, 5):
            optimizer.apply([gradient(0, step)], [variable])
    else:
        optimizer.apply([gradient(hvd.rank(), 1)], [variable])
        over(optimizer, updates + 2)
        assert hvd.catch_up(optimizer) == 2
        assert hvd.catch_up(optimizer) == 0
    assert int(optimizer._iterations) == 2 * (updates + 2)
    hvd.barrier()
    hvd.flush(optimizer)
    for _ in range(2):
        optimizer.apply([tf.zeros(3)], [variable])
    given = total(range(1, 5), [0]) + total([1], range(1, hvd.size()))
    np.testing.assert_array_equal(variable.numpy(), -given / 2)


@pytest.mark.parametrize(("make", "sync"), [("SGD", "solo"), ("Adam", "majority"), ("Lamb", "quorum")])
def test_weights_have_the_same_bits_on_all_ranks_after_every_round(make: str, sync: str) -> None:
    model = linear(6)
    settings = {"momentum": 0.9} if make == "SGD" else {}
    plain = getattr(keras.optimizers, make)(0.01, **settings)
    quorum = (hvd.size() + 1) // 2 if sync == "quorum" else None
    model.compile(hvd.DistributedOptimizer(plain, sync=sync, quorum=quorum, staleness=2), loss="mse")
    random = np.random.default_rng(hvd.rank())
    digests: list[str] = []

    class Late(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            time.sleep(random.uniform(0, 0.004))

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            digests.append(digest(self.model.get_weights()))

    x = random.normal(size=(64, 6))
    model.fit(x, x.sum(1), batch_size=8, epochs=2, verbose=0, callbacks=hvd.callbacks.synchronized([Late()]))
    assert len(digests) == 16
    assert equal_on_all_ranks(tuple(digests))
    assert not runtime.current().engine.holds(channels(model.optimizer)[0].handle)


@several
def test_auto_chooses_a_quorum_from_the_times_of_100_rounds_and_says_why_on_rank_0(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "hvd_ext")
    optimizer, variable = opened("auto")
    for step in range(105):
        if step % hvd.size() == hvd.rank():  # each in turn is slow: full steps have the time of all delays
            time.sleep(0.01)
        optimizer.apply([gradient(hvd.rank(), step)], [variable])
    said = [record.getMessage() for record in caplog.records if "gradients, " in record.getMessage()]
    if hvd.rank() == 0:
        assert len(said) == 1
        quorum = re.search(rf"after round 100: a step waits for (\d) of {hvd.size()} gradients, ", said[0])
        assert quorum and int(quorum[1]) < hvd.size()
    else:
        assert said == []
    hvd.flush(optimizer)
    optimizer.apply([tf.zeros(3)], [variable])
    assert equal_on_all_ranks(digest([variable]))
    np.testing.assert_array_equal(variable.numpy(), -total(range(105)))


@several
@pytest.mark.parametrize("known", [True, False])
def test_ranks_with_unequal_numbers_of_batches_end_an_epoch_together(known: bool) -> None:
    model = linear(4)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), sync="solo", staleness=2), loss="mse")
    batches = 4 + 3 * hvd.rank()
    x = np.random.default_rng(hvd.rank()).normal(size=(batches * 8, 4)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x.sum(1))).batch(8)
    if not known:
        data = data.filter(lambda *_: True)  # of unknown length
    digests: list[str] = []

    class Ends(keras.callbacks.Callback):
        def on_test_end(self, logs: Any = None) -> None:
            digests.append(digest(self.model.get_weights()))

    validation, callbacks = (x[:8], x[:8].sum(1)), hvd.callbacks.synchronized([Ends()])
    model.fit(data, epochs=2, verbose=0, validation_data=validation, callbacks=callbacks)
    assert len(digests) == 2
    assert equal_on_all_ranks(tuple(digests))
    assert equal_on_all_ranks(int(model.optimizer.iterations))


@several
def test_all_ranks_stop_after_the_same_round_without_a_meeting() -> None:
    model = linear(4)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), sync="solo"), loss="mse")
    x = np.ones((800, 4), np.float32)
    if hvd.rank() == hvd.size() - 1:
        x[40:] = np.nan
    seen: list[int] = []
    counts = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    prepared = hvd.callbacks.synchronized([keras.callbacks.TerminateOnNaN(), counts])
    model.fit(x, x.sum(1), batch_size=8, verbose=0, shuffle=False, callbacks=prepared)
    assert equal_on_all_ranks(len(seen))
    assert 5 < len(seen) < 100


@several
def test_a_round_that_is_not_finite_changes_nothing_and_finite_gradients_are_held_again() -> None:
    variable = keras.Variable(np.zeros(3), dtype="float32")
    plain = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
    optimizer = hvd.DistributedOptimizer(plain, op=hvd.Sum, sync="quorum", quorum=hvd.size())
    optimizer.apply([tf.zeros(3)], [variable])
    bad = hvd.rank() == hvd.size() - 1
    optimizer.apply([gradient(hvd.rank(), 1) * (float("inf") if bad else 8.0)], [variable])
    np.testing.assert_array_equal(variable.numpy(), np.zeros(3))
    assert float(optimizer.dynamic_scale) == 4.0
    optimizer.apply([gradient(hvd.rank(), 2) * 4.0], [variable])
    np.testing.assert_array_equal(variable.numpy(), -total([2]) - total([1], range(hvd.size() - 1)))


def test_a_delay_applies_each_result_one_step_late() -> None:
    optimizer, variable = opened("full", delay=1)
    assert int(optimizer.iterations) == 0
    for step in range(1, 5):
        optimizer.apply([gradient(hvd.rank(), step)], [variable])
        np.testing.assert_array_equal(variable.numpy(), -total(range(1, step)))
    assert hvd.catch_up(optimizer) == 1
    np.testing.assert_array_equal(variable.numpy(), -total(range(1, 5)))
    assert hvd.catch_up(optimizer) == 0
    optimizer.apply([gradient(hvd.rank(), 5)], [variable])
    np.testing.assert_array_equal(variable.numpy(), -total(range(1, 5)))


@several
def test_a_delay_catches_up_with_a_step_that_is_under_way() -> None:
    optimizer, variable = opened("full", delay=1)
    optimizer.apply([gradient(hvd.rank(), 1)], [variable])
    if hvd.rank() == hvd.size() - 1:
        time.sleep(1)  # the others save and catch up meanwhile
    optimizer.apply([gradient(hvd.rank(), 2)], [variable])
    np.testing.assert_array_equal(variable.numpy(), -total([1]))
    assert policy_of(optimizer).save()
    assert hvd.catch_up(optimizer) == 1
    np.testing.assert_array_equal(variable.numpy(), -total([1, 2]))


@pytest.mark.parametrize("updates", [1, 2])
def test_a_delay_with_accumulation_applies_the_last_result_too(updates: int) -> None:
    variable = keras.Variable(np.zeros(3), dtype="float32")
    plain = keras.optimizers.SGD(1.0)
    optimizer = hvd.DistributedOptimizer(plain, op=hvd.Sum, delay=1, backward_passes_per_step=2)
    for step in range(2 * updates):
        optimizer.apply([gradient(hvd.rank(), step)], [variable])
    assert hvd.catch_up(optimizer) == 1
    np.testing.assert_allclose(variable.numpy(), -total(range(2 * updates)), rtol=1e-6)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_fit_with_a_delay_applies_the_last_result_too(stopped: bool) -> None:
    model = linear(6)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0), delay=1), loss="mse")
    seen: list[int] = []

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(batch)
            self.model.stop_training = stopped and batch == 2

    x = np.random.default_rng(hvd.rank()).normal(size=(64, 6))
    ends = [*hvd.callbacks.synchronized(), Stops()]
    model.fit(x, x.sum(1), batch_size=8, epochs=2, verbose=0, callbacks=ends)
    assert int(model.optimizer.iterations) == len(seen)
    assert len(seen) < 8 if stopped else len(seen) == 16


@pytest.mark.parametrize("options", [{"sync": "solo"}, {"delay": 1}])
def test_a_tape_in_a_function_reduces_so_too(options: dict[str, Any]) -> None:
    variable = tf.Variable([1.0, 2.0])
    plain = keras.optimizers.SGD(0.1)
    plain.build([variable])

    @tf.function
    def step(scale: tf.Tensor) -> None:
        with hvd.DistributedGradientTape(tf.GradientTape(), staleness=0, **options) as tape:
            loss = scale * tf.reduce_sum(variable * variable)
        plain.apply([tape.gradient(loss, variable)], [variable])

    for number in range(3):
        step(tf.constant(float(hvd.rank() + number + 1)))
    assert equal_on_all_ranks(digest([variable]))
    expected, mean = np.array([1.0, 2.0], np.float32), (hvd.size() + 1) / 2
    late = np.zeros(2)
    for number in range(3):
        own = 2 * (mean + number) * expected
        late, own = (own, late) if "delay" in options else (late, own)
        expected = expected - 0.1 * own
    # on 3 ranks the weights of some step are 0, but for rounding
    np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_a_gradient_that_was_not_there_in_the_first_step_is_refused() -> None:
    first, second = (keras.Variable(np.zeros(2), dtype="float32", name=name) for name in ("first", "second"))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), sync="solo", staleness=0)
    optimizer.apply([tf.ones(2), None], [first, second])
    with pytest.raises(InvalidError, match="no rank had a gradient of 'second' in the first step"):
        optimizer.apply([tf.ones(2), tf.ones(2)], [first, second])
    optimizer.apply([tf.ones(2), None], [first, second])
    assert equal_on_all_ranks(digest([first, second]))


def test_a_quorum_of_more_ranks_than_there_are_is_refused() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(), sync="quorum", quorum=hvd.size() + 1)
    with pytest.raises(HvdExtError, match=rf"quorum \({hvd.size() + 1}\) must be in \[1, {hvd.size()}\]"):
        optimizer.apply([tf.ones(2)], [keras.Variable(np.zeros(2))])


def test_catch_up_and_flush_say_what_they_are_for() -> None:
    plain = hvd.DistributedOptimizer(keras.optimizers.SGD())
    with pytest.raises(InvalidError, match="catch_up .*must be an optimizer .* with sync= or delay=1"):
        hvd.catch_up(plain)
    with pytest.raises(InvalidError, match="flush .*must be an optimizer .* sync= or local_steps="):
        hvd.flush(plain)
    late = hvd.DistributedOptimizer(keras.optimizers.SGD(), sync="solo")
    assert hvd.catch_up(late) == 0
    with pytest.raises(InvalidError, match="outside of a tf.function"):
        tf.function(lambda: hvd.catch_up(late))()
