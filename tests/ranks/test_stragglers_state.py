"""What partial rounds and delays carry over to the next step survives in checkpoints, on any number of ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.engine.partial import Partial
from hvd_ext.job import runtime
from hvd_ext.keras.optimizers.optimizer import channels
from hvd_ext.options import Average, Sum
from hvd_ext.options.gradients import GradientOptions
from hvd_ext.planning.tensors import Tensor
from hvd_ext.tensorflow.gradients import registration
from hvd_ext.tensorflow.gradients.carried import Held, rounds
from tests.ranks.conftest import LAUNCHED_SIZE
from tests.ranks.training import fill

pytestmark = [pytest.mark.skipif(LAUNCHED_SIZE > 2, reason="the same on any number of ranks")]
several = pytest.mark.skipif(LAUNCHED_SIZE == 1, reason="nobody is late")


def model(**options: Any) -> keras.Model:
    made = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    fill(made.weights)
    made.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.125), **options), "mse", run_eagerly=True)
    return made


def batch(step: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(100 * step + rank)
    return random.normal(size=(4, 3)), random.normal(size=(4, 2))


def train(made: keras.Model, steps: range) -> None:
    """Train in an order of events that is the same each time: rank 0 one step ahead of the others."""
    engine = runtime.current().engine
    for step in steps:
        if hvd.rank() > 0 and made.optimizer._hvd_ext_reducer.options.partial and channels(made.optimizer):
            handle = channels(made.optimizer)[0].handle
            while engine.progress(handle).over <= engine.progress(handle).step:
                time.sleep(0.001)
        made.train_on_batch(*batch(step, hvd.rank()))
        if step == 0:
            hvd.barrier()


def checkpoint(made: keras.Model, directory: Path) -> hvd.callbacks.Checkpoint:
    found = hvd.callbacks.Checkpoint(directory)
    found.set_model(made)
    return found


def restart() -> None:
    hvd.barrier()
    hvd.shutdown()
    hvd.init()


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """One directory for all ranks."""
    return Path(hvd.broadcast_object(str(tmp_path / "job")))


@pytest.mark.parametrize("options", [{"sync": "solo", "staleness": 2}, {"delay": 1}])
def test_training_goes_on_bit_for_bit(options: dict[str, Any], shared: Path) -> None:
    whole = model(**options)
    train(whole, range(4))
    hvd.barrier()
    if "sync" in options and hvd.rank() > 0:
        assert runtime.current().engine.holds(channels(whole.optimizer)[0].handle)
    checkpoint(whole, shared).save(0, 4)
    train(whole, range(4, 7))
    restart()
    again = model(**options)
    assert checkpoint(again, shared).restore() == (0, 4)
    if "sync" in options:  # the first step of a channel is a meeting, in which all are on time but held ones are added
        hvd.flush(again.optimizer)
    train(again, range(4, 7))
    if "delay" in options:
        for value, wanted in zip(again.get_weights(), whole.get_weights(), strict=True):
            np.testing.assert_array_equal(value, wanted)
    else:
        hvd.barrier()
        total = sum(int(one) for one in hvd.allgather_object(int(again.optimizer.iterations)))
        assert total == 7 * hvd.size()
        partial = channels(again.optimizer)[0].partial
        assert partial is not None
        assert partial.before == 4


@several
def test_a_delay_in_a_process_set_is_restored_on_another_number_of_ranks() -> None:
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    variable = keras.Variable(np.zeros(3), dtype="float32")

    def optimizer() -> Any:
        return hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), delay=1, process_set=sets[hvd.rank()])

    first = optimizer()
    first.apply([tf.fill([3], hvd.rank() + 1.0)], [variable])
    saved = first._hvd_ext_reducer.sets[0].save()
    second = optimizer()
    other = {**saved, "ranks": np.array(7)}
    second._hvd_ext_reducer.restore({0: (other, lambda: [other])})
    if hvd.rank() == 0:  # the others come later, or not at all
        second.apply([tf.zeros(3)], [variable])
        np.testing.assert_array_equal(variable.numpy(), [-1, -1, -1])
    hvd.barrier()
    if hvd.rank() > 0:
        second.apply([tf.zeros(3)], [variable])
        np.testing.assert_array_equal(variable.numpy(), [-1 - hvd.rank()] * 3)
    for one in sets:
        hvd.remove_process_set(one)


@several
def test_what_was_held_is_applied_after_a_restart(shared: Path) -> None:
    variable = keras.Variable(np.zeros(3), dtype="float32")

    def optimizer() -> Any:
        return hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum, sync="solo", staleness=2)

    first = optimizer()
    first.apply([tf.zeros(3)], [variable])
    hvd.barrier()
    if hvd.rank() > 0:
        handle = channels(first)[0].handle
        while runtime.current().engine.progress(handle).over < 2:
            time.sleep(0.001)
    first.apply([tf.constant([1.0, 2.0, 3.0]) * (1 + hvd.rank())], [variable])
    hvd.barrier()
    np.testing.assert_array_equal(variable.numpy(), [-1, -2, -3])
    saved = first._hvd_ext_reducer.sets[0].save()
    restart()
    second = optimizer()
    second._hvd_ext_reducer.restore({0: (saved, lambda: hvd.allgather_object(saved))})
    hvd.flush(second)
    second.apply([tf.zeros(3)], [variable])
    np.testing.assert_array_equal(variable.numpy(), -np.array([1, 2, 3]) * sum(range(1, hvd.size() + 1)))


@pytest.mark.parametrize("op", [Sum, Average])
def test_another_number_of_ranks_holds_the_scaled_sum_on_rank_0(op: Any) -> None:
    job = runtime.current()
    tensors = [Tensor("a", (2,), "float32"), Tensor("b", (3,), "bfloat16")]
    options = job.options.replace(op=op)
    channel = registration.open("held", tensors, options, partial=Partial("solo"))
    states = [
        {"ranks": np.array(4), "rounds": np.array(17), "0/a": np.array([rank, 1.0], np.float32)} for rank in range(4)
    ]
    half = tf.constant([1.0, 2.0, 3.0], tf.bfloat16).numpy()
    states[2]["1/b"] = half.view(np.uint16)
    Held(channel, GradientOptions(op=op, sync="solo"), job).load(None, lambda: states)
    scale = job.engine.size / 4 if op == Average else 1.0
    numbers = {tensor.name: number for number, tensor in enumerate(channel.travelling)}
    a, b = np.empty(2, np.float32), np.empty(3, half.dtype)
    job.engine.read_held(channel.handle, numbers["a"], a)
    job.engine.read_held(channel.handle, numbers["b"], b)
    first = job.engine.rank == 0
    np.testing.assert_array_equal(a, np.array([6.0, 4.0]) * scale if first else np.zeros(2))
    np.testing.assert_array_equal(b.astype(np.float32), np.array([1.0, 2.0, 3.0]) * scale if first else np.zeros(3))
    assert rounds(None, lambda: states) == 17
    channel.close()


def test_files_that_cannot_be_read_are_named(caplog: pytest.LogCaptureFixture) -> None:
    job = runtime.current()
    channel = registration.open("torn", [Tensor("a", (2,), "float32")], job.options, partial=Partial("solo"))
    Held(channel, GradientOptions(sync="solo"), job).load(None, lambda: [{"rounds": np.array(1)}])
    assert ("are dropped" in caplog.text) == (job.engine.rank == 0)
    assert not job.engine.holds(channel.handle)
    channel.close()


@several
def test_the_end_of_a_job_says_who_was_late_and_which_gradients_are_lost(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    made = model(sync="solo", staleness=2)
    train(made, range(4))
    name = channels(made.optimizer)[0].name
    hvd.barrier()
    capfd.readouterr()
    hvd.shutdown()
    hvd.init()
    if hvd.rank() == 0:
        assert f"{name}: 4 rounds with " in capfd.readouterr().err + caplog.text
        assert "are lost" not in caplog.text
    else:
        assert "gradients of step" in caplog.text and "were in no round and are lost" in caplog.text
    hvd.barrier()
