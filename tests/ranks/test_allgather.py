"""Allgather: parts of unequal length, every dtype that is moved, eager and traced, and differentiable."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import InvalidError
from hvd_ext.tensorflow.collectives.dtypes import MOVED
from tests.ranks.numbers import WAYS, eagerly_and, values


def part(rank: int, dtype: str = "float32") -> tf.Tensor:
    """Rank r's part has 2 r + 1 rows."""
    return tf.cast(values(rank, (2 * rank + 1, 3)) % 2 if dtype == "bool" else values(rank, (2 * rank + 1, 3)), dtype)


@pytest.mark.parametrize(("way", "dtype"), eagerly_and(("bool", "float16"), MOVED))
def test_parts_of_unequal_length_are_joined_for_every_dtype(dtype: str, way: str, rank: int, size: int) -> None:
    result = WAYS[way](hvd.allgather)(part(rank, dtype))
    assert result.dtype.name == dtype
    expected = tf.concat([part(other, dtype) for other in range(size)], axis=0)
    np.testing.assert_array_equal(tf.cast(result, tf.int64), tf.cast(expected, tf.int64))


@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_is_horovods_this_ranks_part_of_the_average(way: str, rank: int, size: int) -> None:
    rows = [2 * other + 1 for other in range(size)]

    def gradient(x: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(hvd.allgather(x) * weights)
        return tape.gradient(loss, x)

    weights = [values(other, (sum(rows), 3), 2).astype(np.float64) * size for other in range(size)]
    result = WAYS[way](gradient)(tf.zeros((rows[rank], 3), tf.float64), tf.constant(weights[rank]))
    begin = sum(rows[:rank])
    np.testing.assert_array_equal(result, sum(weights)[begin : begin + rows[rank]] / size)


def test_arguments_that_cannot_be_are_refused_in_words() -> None:
    with pytest.raises(InvalidError, match="a scalar has none"):
        hvd.allgather(tf.constant(1.0))
    with pytest.raises(InvalidError, match=r"string.*must be one of"):
        hvd.allgather(tf.constant(["text"]))
