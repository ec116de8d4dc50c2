"""What becomes of a momentum where one job has taken it over from the optimizer and the next one has not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.keras.checkpoint import optimizer_states
from hvd_ext.state import folder, manifest
from tests.ranks.conftest import LAUNCHED_SIZE
from tests.ranks.topk_jobs import OPTIONS, gradients, variables
from tests.ranks.training import checkpoint, data, model, shared

pytestmark = [
    pytest.mark.ranks(2),
    pytest.mark.skipif(LAUNCHED_SIZE > 2, reason="the same on any number of ranks"),
    pytest.mark.usefixtures("apart"),
]

WITHOUT, WITH = (
    f"trained {word} momentum_correction until now: momentum restarts from zero" for word in ("without", "with")
)
CORRECTED = hvd.TopK(**OPTIONS, momentum_correction=True)
PLAIN = hvd.TopK(**OPTIONS, momentum_correction=False)
LOST = "it was saved with TopK, and its residuals are lost; call hvd_ext.flush() before saving"


def job_of(compression: Any, directory: Path, *, scaled: bool = False) -> tuple[keras.Model, Any]:
    made, optimizer = model(), keras.optimizers.SGD(0.125, momentum=0.5, name="ours")
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)
    wrapped = hvd.DistributedOptimizer(optimizer, name="ours", compression=compression)
    made.compile(wrapped, "mse", run_eagerly=True)
    return made, checkpoint(made, directory)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What rank 0 was told of momentum and of what waited; another rank is told nothing."""
    words = [record.getMessage().removeprefix("[rank 0] ") for record in caplog.records]
    found = [one for one in words if "it was saved" in one or "momentum restarts from zero" in one]
    told = hvd.broadcast_object(found)
    assert found == (told if hvd.rank() == 0 else [])
    return told


CHANGES = {
    "dense, corrected": (None, CORRECTED, [WITHOUT], False),
    "plain, corrected, loss scale": (PLAIN, CORRECTED, [WITHOUT], True),
    "corrected, plain": (CORRECTED, PLAIN, [WITH], False),
    "corrected, dense": (CORRECTED, None, [LOST, WITH], False),
    "corrected, dense, loss scale": (CORRECTED, None, [LOST, WITH], True),
    "plain, dense": (PLAIN, None, [LOST], False),
    "dense, plain": (None, PLAIN, [], False),
    "corrected, loss scale": (CORRECTED, CORRECTED, [], True),
}


@pytest.mark.parametrize(("first", "second", "words", "scaled"), CHANGES.values(), ids=CHANGES)
def test_what_a_checkpoint_of_another_way_to_send_cannot_go_on_with_is_said_aloud(
    first: Any, second: Any, words: list[str], scaled: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = shared(tmp_path)
    made, callback = job_of(first, directory, scaled=scaled)
    assert callback.restore() == (0, 0)
    made.train_on_batch(*data(hvd.rank(), 4))
    callback.save(1)
    made, callback = job_of(second, directory, scaled=scaled)
    with caplog.at_level(logging.WARNING, "hvd_ext"):
        assert callback.restore() == (1, 0)
        made.train_on_batch(*data(hvd.rank(), 4, 1))
    if hvd.size() == 1:  # on one host all is sent
        words = [word for word in words if word != LOST]
    assert warnings_of(caplog) == [f"ours: {word}" for word in words]


def test_a_momentum_that_began_anew_is_not_said_so_twice_and_does_not_come_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = shared(tmp_path)
    for epoch, compression in enumerate((None, CORRECTED, CORRECTED, None)):
        caplog.clear()
        made, callback = job_of(compression, directory)
        with caplog.at_level(logging.WARNING, "hvd_ext"):
            assert callback.restore() == (epoch, 0)
            slots = [np.any(slot) for slot in made.optimizer.momentums]
            made.train_on_batch(*data(hvd.rank(), 4, epoch))
        callback.save(epoch + 1)
        told = [one for one in warnings_of(caplog) if not one.endswith(LOST)]
        assert told == ([], [f"ours: {WITHOUT}"], [], [f"ours: {WITH}"])[epoch]
        assert any(slots) == (epoch == 1)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_slots_that_no_step_reads_are_emptied_and_those_of_other_dtypes_go_on(
    traced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    weights = [*variables()[:1], keras.Variable(np.zeros(3), dtype="float64")]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.5), compression=CORRECTED)
    optimizer.build(weights)
    own = [tf.constant(gradients(hvd.rank(), 0)[0]), tf.zeros(3, tf.float64)]

    def step() -> None:
        optimizer.apply(own, weights)

    apply = tf.function(step, autograph=False) if traced else step
    ours, keras_own = optimizer.momentums
    for number, told in enumerate((True, False, True)):
        caplog.clear()
        if told:
            ours.assign(np.ones(ours.shape))
        keras_own.assign([8.0, 0.0, 0.0])
        with caplog.at_level(logging.WARNING, "hvd_ext"):
            if number == 2:  # as a checkpoint does that has assigned them
                optimizer.end_momentum()
            apply()
        assert warnings_of(caplog) == [f"SGD: {WITHOUT}"] * told
        assert not np.any(ours)
        assert np.asarray(keras_own).tolist() == [4.0, 0.0, 0.0]


def test_where_the_number_of_ranks_was_another_a_momentum_that_ends_is_read_from_their_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = shared(tmp_path)
    made, callback = job_of(CORRECTED, directory)
    assert callback.restore() == (0, 0)
    made.train_on_batch(*data(hvd.rank(), 4))
    callback.save(1)
    path = folder.path_of(directory, 1)
    made, _ = job_of(None, directory)
    found = manifest.read(path)
    with caplog.at_level(logging.WARNING, "hvd_ext"):
        left = optimizer_states.restore(made, {}, path, found, "state:")
        assert left == ("top-k: optimizer 0, variables 0",)
        assert f"ours: {WITH}" in warnings_of(caplog)
        caplog.clear()
        hvd.barrier()
        if hvd.rank() == 0:
            (path / manifest.rank_file(0)).unlink()
        hvd.barrier()
        assert optimizer_states.restore(made, {}, path, found, "state:") == left  # it is named as dropped
    assert warnings_of(caplog) == []


def test_a_slot_that_some_function_reads_is_left_alone_by_another_that_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = keras.Variable(np.zeros((8, 4)), dtype="float32")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.5), compression=CORRECTED)
    optimizer.build([table])
    rows = tf.function(
        lambda: optimizer.apply([tf.IndexedSlices(tf.ones((1, 4)), tf.constant([2]), tf.constant([8, 4]))], [table]),
        autograph=False,
    )
    whole = tf.function(lambda: optimizer.apply([tf.zeros((8, 4))], [table]), autograph=False)
    with caplog.at_level(logging.WARNING, "hvd_ext"):
        rows()
        before = np.asarray(optimizer.momentums[0])
        whole()
    assert np.any(before)
    np.testing.assert_array_equal(optimizer.momentums[0], before)
    assert warnings_of(caplog) == []
