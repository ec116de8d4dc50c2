"""Several backward passes for one update: Keras' accumulation and Horovod's backward_passes_per_step are one thing."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import InvalidError
from hvd_ext.keras.optimizers.optimizer import channels
from tests.ranks.compare import assert_close
from tests.ranks.steps import averaged, gradients, variables
from tests.ranks.training import assert_same_bits_on_all_ranks, buckets_sent, fill, values

pytestmark = pytest.mark.ranks(1, 2)

PASSES = 3


@pytest.mark.parametrize(
    ("keywords", "traced"),
    [
        ({"average_aggregated_gradients": True, "op": hvd.Sum}, False),
        ({"compression": hvd.Compression.bf16, "groups": 1}, True),
    ],
    ids=["averaged, eager", "summed, traced"],
)
def test_passes_are_added_up_reduced_once_and_then_clipped(keywords: dict[str, object], traced: bool) -> None:
    ours, reference = variables(), variables()
    inner = keras.optimizers.SGD(0.5, momentum=0.5, clipnorm=2.0)
    optimizer = hvd.DistributedOptimizer(inner, backward_passes_per_step=PASSES, **keywords)
    plain = keras.optimizers.SGD(0.5, momentum=0.5, clipnorm=2.0)

    def step(parts: list[tf.Tensor]) -> None:
        optimizer.apply(parts, ours)

    step = tf.function(step) if traced else step
    before = buckets_sent()
    for number in range(2 * PASSES):
        step(gradients(hvd.rank(), number))
        if number % PASSES < PASSES - 1:
            expected = values(reference)  # nothing moves between the updates
        else:
            passes = zip(*(averaged(number - back) for back in range(PASSES)), strict=True)
            factor = hvd.size() / PASSES if keywords.get("average_aggregated_gradients") else 1
            plain.apply([tf.add_n(list(parts)) * factor for parts in passes], reference)
            expected = values(reference)
        assert_close(values(ours), expected, rtol=0.02 if "compression" in keywords else 2e-5, atol=2e-3)
    assert_same_bits_on_all_ranks(ours)
    assert buckets_sent() - before == 2 * len(channels(optimizer)[0].layout.buckets)


def test_sparse_and_missing_gradients_add_up() -> None:
    table, bias = (keras.Variable(np.zeros(shape), dtype="float32") for shape in ((5, 2), (2,)))
    fill([table, bias])
    start = values([table, bias])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    parts = tf.ones((3, 2)) * [[1.0], [2.0], [4.0]]
    rows = tf.constant([hvd.rank() % 5, 3, 3])

    @tf.function
    def step() -> None:
        given = tf.ones(2) * float(hvd.rank() + 1) if hvd.rank() % 2 == 0 else None
        optimizer.apply([tf.IndexedSlices(parts, rows, tf.constant([5, 2])), given], [table, bias])

    step()
    step()
    expected = np.zeros((5, 2), np.float32)
    for rank in range(hvd.size()):
        expected[rank % 5] += 2
        expected[3] += 12
    np.testing.assert_allclose(table.numpy(), start[0] - expected / hvd.size(), rtol=1e-6)
    ones = 2 * sum(rank + 1 for rank in range(hvd.size()) if rank % 2 == 0) / hvd.size()
    np.testing.assert_allclose(bias.numpy(), start[1] - ones, rtol=1e-6)


def test_keras_and_horovods_number_must_agree() -> None:
    optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    with pytest.raises(InvalidError, match=r"has gradient_accumulation_steps=2, which means the same; give one"):
        hvd.DistributedOptimizer(optimizer, backward_passes_per_step=3)
    assert type(optimizer) is keras.optimizers.SGD
    hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2)
    built = keras.optimizers.SGD(1.0)
    built.build(variables())
    with pytest.raises(InvalidError, match="create it with gradient_accumulation_steps=2"):
        hvd.DistributedOptimizer(built, backward_passes_per_step=2)
    assert type(built) is keras.optimizers.SGD
    assert built.gradient_accumulation_steps is None


def test_it_is_saved_as_keras_own_accumulation() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=4)
    assert optimizer.get_config()["gradient_accumulation_steps"] == 4
