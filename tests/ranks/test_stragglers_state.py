"""What partial rounds and delays carry over to the next step survives in checkpoints, on any number of ranks."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
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
from hvd_ext.tensorflow.gradients.channel import Channel
from hvd_ext.tensorflow.gradients.policies.late import Late
from tests.ranks.compare import assert_equal
from tests.ranks.conftest import LAUNCHED_SIZE
from tests.ranks.training import checkpoint, data, model, policy_of, shared

pytestmark = [pytest.mark.ranks(2), pytest.mark.skipif(LAUNCHED_SIZE > 2, reason="the same on any number of ranks")]

several = pytest.mark.skipif(LAUNCHED_SIZE == 1, reason="nobody is late")


def compiled(**options: Any) -> keras.Model:
    made = model()
    made.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.125), **options), "mse", run_eagerly=True)
    return made


def train(made: keras.Model, steps: range) -> None:
    """Train in an order of events that is the same each time: rank 0 one step ahead of the others."""
    engine = runtime.current().engine
    for step in steps:
        if hvd.rank() > 0 and made.optimizer._hvd_ext.reducer.options.partial and channels(made.optimizer):
            handle = channels(made.optimizer)[0].handle
            while engine.progress(handle).over <= engine.progress(handle).step:
                time.sleep(0.001)
        made.train_on_batch(*data(hvd.rank(), 4, step))
        if step == 0:
            hvd.barrier()


def restart() -> None:
    hvd.barrier()
    hvd.shutdown()
    hvd.init()


@pytest.mark.parametrize("options", [{"sync": "solo", "staleness": 2}, {"delay": 1}])
def test_training_goes_on_bit_for_bit(options: dict[str, Any], tmp_path: Path) -> None:
    directory, whole = shared(tmp_path), compiled(**options)
    train(whole, range(4))
    hvd.barrier()
    if "sync" in options and hvd.rank() > 0:
        assert runtime.current().engine.holds(channels(whole.optimizer)[0].handle)
    checkpoint(whole, directory).save(0, 4)
    train(whole, range(4, 7))
    restart()
    again = compiled(**options)
    assert checkpoint(again, directory).restore() == (0, 4)
    if "sync" in options:  # the first step of a channel is a meeting, in which all are on time but held ones are added
        hvd.flush(again.optimizer)
    train(again, range(4, 7))
    if "delay" in options:
        assert_equal(again.weights, whole.weights)
    else:
        hvd.barrier()
        assert sum(hvd.allgather_object(int(again.optimizer.iterations))) == 7 * hvd.size()
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
    saved = policy_of(first).save()
    second = optimizer()
    other = {**saved, "ranks": np.array(7)}
    second._hvd_ext.reducer.restore({0: (other, lambda: [other])})
    for turn in range(2):  # rank 0 comes first: the others come later, or not at all
        if turn == min(hvd.rank(), 1):
            second.apply([tf.zeros(3)], [variable])
            np.testing.assert_array_equal(variable.numpy(), [-1 - hvd.rank()] * 3)
        hvd.barrier()
    for one in sets:
        hvd.remove_process_set(one)


@several
def test_what_was_held_is_applied_after_a_restart() -> None:
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
    saved = policy_of(first).save()
    restart()
    second = optimizer()
    second._hvd_ext.reducer.restore({0: (saved, lambda: hvd.allgather_object(saved))})
    hvd.flush(second)
    second.apply([tf.zeros(3)], [variable])
    np.testing.assert_array_equal(variable.numpy(), -np.array([1, 2, 3]) * sum(range(1, hvd.size() + 1)))


def late_on(channel: Channel, **options: Any) -> Late:
    """The policy of a list of gradients that has only its channel."""
    given = GradientOptions(sync="solo", **options)
    return Late(SimpleNamespace(options=given, job=runtime.current(), channels=[channel]))


@pytest.mark.parametrize("op", [Sum, Average])
def test_another_number_of_ranks_holds_the_scaled_sum_on_rank_0(op: Any) -> None:
    job = runtime.current()
    tensors = [Tensor("a", (2,), "float32"), Tensor("b", (3,), "bfloat16")]
    channel = registration.open_channel(
        "held", tensors, job.options.replace(op=op), partial=Partial(GradientOptions(sync="solo"))
    )
    states = [
        {"ranks": np.array(4), "rounds": np.array(17), "0/a": np.array([rank, 1.0], np.float32)} for rank in range(4)
    ]
    half = tf.constant([1.0, 2.0, 3.0], tf.bfloat16).numpy()
    states[2]["1/b"] = half.view(np.uint16)
    late_on(channel, op=op).load(None, lambda: states)
    scale = (job.engine.size / 4 if op == Average else 1.0) * (job.engine.rank == 0)
    held = {"a": np.empty(2, np.float32), "b": np.empty(3, half.dtype)}
    for number, tensor in enumerate(channel.layout.engine_tensors):
        job.engine.read_held(channel.handle, number, held[tensor.name])
    assert_equal([held["a"], held["b"].astype(np.float32)], [[6 * scale, 4 * scale], [scale, 2 * scale, 3 * scale]])
    assert Late.steps_before(None, lambda: states) == 17
    channel.close()


def test_files_that_cannot_be_read_are_named(caplog: pytest.LogCaptureFixture) -> None:
    job = runtime.current()
    channel = registration.open_channel(
        "torn", [Tensor("a", (2,), "float32")], job.options, partial=Partial(GradientOptions(sync="solo"))
    )
    late_on(channel).load(None, lambda: [{"rounds": np.array(1)}])
    assert ("are dropped" in caplog.text) == (job.engine.rank == 0)
    assert not job.engine.holds(channel.handle)
    channel.close()


@several
def test_the_end_of_a_job_says_who_was_late_and_which_gradients_are_lost(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    made = compiled(sync="solo", staleness=2)
    train(made, range(4))
    name = channels(made.optimizer)[0].name
    hvd.barrier()
    capfd.readouterr()
    restart()
    if hvd.rank() == 0:
        assert f"{name}: 4 rounds with " in capfd.readouterr().err + caplog.text
        assert "are lost" not in caplog.text
    else:
        assert "gradients of step" in caplog.text and "were in no round and are lost" in caplog.text
    hvd.barrier()
