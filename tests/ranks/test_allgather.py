"""Allgather: parts of unequal length, every dtype that is moved, eager and traced, and differentiable."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
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
