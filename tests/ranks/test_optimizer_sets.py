"""An optimizer of a process set: its ranks train together, and the others alone."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import InvalidError
from hvd_ext.keras.optimizers.optimizer import channels
from tests.ranks.compare import assert_close
from tests.ranks.steps import gradients, variables
from tests.ranks.training import data, model, values


@pytest.fixture
def evens() -> Iterator[hvd.ProcessSet]:
    """Ranks 0, 2, 4, ...; of two ranks rank 0 alone."""
    if hvd.size() == 1:
        pytest.skip("one rank has no set but the global one")
    added = hvd.add_process_set(list(range(0, hvd.size(), 2)))
    yield added
    if hvd.is_initialized() and added.process_set_id is not None:
        hvd.remove_process_set(added)


def mine(evens: hvd.ProcessSet) -> list[int]:
    """The ranks that this one trains with."""
    return list(evens.ranks) if evens.included() else [hvd.rank()]


def test_members_reduce_among_themselves_and_outsiders_train_alone(evens: hvd.ProcessSet) -> None:
    ours, reference = variables(), variables()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=2.0),
        process_set=evens,
        backward_passes_per_step=2,
        gradient_predivide_factor=2.0,
        groups=2,
    )
    plain = keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=2.0)

    @tf.function
    def step(parts: list[tf.Tensor]) -> None:
        optimizer.apply(parts, ours)

    for number in range(4):
        step(gradients(hvd.rank(), number))
    for number in (0, 2):
        every = [gradients(rank, number + late) for rank in mine(evens) for late in range(2)]
        plain.apply([tf.add_n(list(parts)) / len(mine(evens)) for parts in zip(*every, strict=True)], reference)
    assert_close(ours, reference)
    assert len(channels(optimizer)) == evens.included()


def test_a_set_and_the_job_train_in_turns_with_embeddings_and_local_variables(evens: hvd.ProcessSet) -> None:
    table, own = (keras.Variable(np.zeros((5, 2)), dtype="float32", name=name) for name in ("table", "own"))
    weights = variables()
    start = values(weights)
    inside = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum, process_set=evens)
    outside = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)
    inside.register_local_var(own)
    rows = tf.constant([hvd.rank() % 5, 4, 4])
    for number in range(2):
        parts = tf.IndexedSlices(tf.ones((3, 2)), rows, tf.constant([5, 2]))
        inside.apply([parts, tf.ones((5, 2)) * 4.0], [table, own])
        outside.apply(gradients(hvd.rank(), number), weights)
    expected = np.zeros((5, 2))
    for rank in mine(evens):
        expected[rank % 5] -= 2
        expected[4] -= 4
    np.testing.assert_array_equal(table.numpy(), expected)
    divisor = len(mine(evens)) if evens.included() else 1
    np.testing.assert_allclose(own.numpy(), np.full((5, 2), -8.0 / divisor), rtol=1e-6)
    every = [gradients(rank, number) for rank in range(hvd.size()) for number in range(2)]
    total = [tf.add_n(list(parts)) for parts in zip(*every, strict=True)]
    assert_close(weights, [before - parts for before, parts in zip(start, total, strict=True)])


def test_a_set_in_mixed_precision_skips_alone(evens: hvd.ProcessSet) -> None:
    """Rank 0 overflows: the set's ranks skip the step, the others take it."""
    ours = variables()
    start = values(ours)
    scaling = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=2.0)
    optimizer = hvd.DistributedOptimizer(scaling, process_set=evens)
    optimizer.apply([part * (np.inf if hvd.rank() == 0 else 1.0) for part in gradients(hvd.rank(), 0)], ours)
    assert float(optimizer.dynamic_scale) == (1.0 if evens.included() else 2.0)
    for before, after in zip(start, values(ours), strict=True):
        assert np.array_equal(before, after) == evens.included()


def test_a_set_that_is_removed_is_refused_and_one_that_was_never_added_too(evens: hvd.ProcessSet) -> None:
    ours = model()
    ours.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=evens), "mse", run_eagerly=True)
    ours.train_on_batch(*data(hvd.rank(), 4))
    hvd.remove_process_set(evens)
    assert not any(channel.is_open for channel in channels(ours.optimizer))
    with pytest.raises(InvalidError, match="must be added before it is used"):
        ours.train_on_batch(*data(hvd.rank(), 4))
    never = hvd.ProcessSet([0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=never)
    with pytest.raises(InvalidError, match="must be added before it is used"):
        optimizer.apply(gradients(hvd.rank(), 0), variables())
