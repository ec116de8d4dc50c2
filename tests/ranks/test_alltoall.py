"""Alltoall: rows from every rank to every rank, even and uneven, for every dtype that is moved, and its gradient."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import InvalidError
from hvd_ext.tensorflow.collectives.dtypes import MOVED
from tests.ranks.numbers import WAYS, eagerly_and, values


def splits_of(rank: int, size: int) -> list[int]:
    """Rows from a rank to each: uneven, some none."""
    return [(3 * rank + 2 * peer) % 5 for peer in range(size)]


def rows(rank: int, size: int) -> npt.NDArray[np.int64]:
    return values(rank, (sum(splits_of(rank, size)), 3))


def received(rank: int, size: int) -> npt.NDArray[np.int64]:
    parts = [np.split(rows(peer, size), np.cumsum(splits_of(peer, size))[:-1])[rank] for peer in range(size)]
    return np.concatenate(parts)


@pytest.mark.parametrize(("way", "dtype"), eagerly_and(("bool", "float16"), MOVED))
def test_uneven_rows_are_exchanged_for_every_dtype(dtype: str, way: str, rank: int, size: int) -> None:
    modulus = 2 if dtype == "bool" else 16
    function = WAYS[way](lambda x, splits: hvd.alltoall(x, splits, name=f"{dtype} {way}"))
    result, counts = function(tf.cast(rows(rank, size) % modulus, dtype), splits_of(rank, size))
    assert result.dtype.name == dtype
    np.testing.assert_array_equal(tf.cast(result, tf.int64), received(rank, size) % modulus)
    np.testing.assert_array_equal(counts, [splits_of(peer, size)[rank] for peer in range(size)])


def test_without_splits_the_rows_are_divided_evenly_and_only_they_come_back(rank: int, size: int) -> None:
    x = values(rank, (2 * size, 3)).astype(np.float32)
    result = hvd.alltoall(x)
    expected = np.concatenate([values(peer, (2 * size, 3))[2 * rank : 2 * rank + 2] for peer in range(size)])
    np.testing.assert_array_equal(result, expected)
    again, counts = hvd.alltoall(x, tf.fill([size], tf.constant(2, tf.int64)))
    np.testing.assert_array_equal(again, expected)
    assert counts.dtype == tf.int64
    assert counts.numpy().tolist() == [2] * size


@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_sends_every_row_back(way: str, rank: int, size: int) -> None:
    def gradient(x: tf.Tensor, splits: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            result, _ = hvd.alltoall(x, splits)
            loss = tf.reduce_sum(result * result)
        return tape.gradient(loss, x)

    x = tf.constant(rows(rank, size), tf.float64)
    np.testing.assert_array_equal(WAYS[way](gradient)(x, tf.constant(splits_of(rank, size))), 2 * rows(rank, size))


def test_splits_that_do_not_add_up_on_one_rank_are_refused_on_all(rank: int, size: int) -> None:
    last = rank == size - 1
    good = [1] * size
    x = np.ones((size, 2), np.float32)
    for name, bad in {
        "sum": [2] * size,
        "length": [*good, 0],
        "negative": [size + 1] + [0] * (size - 2) + [-1],
    }.items():
        if name == "negative" and size == 1:
            continue
        with pytest.raises(InvalidError, match=rf"rank {size - 1} has splits \[.*\] for {size} rows; splits must be"):
            hvd.alltoall(x, bad if last else good, name=name)
    if size > 1:
        with pytest.raises(InvalidError, match=rf"rank {size - 1} has {size + 1} rows and no splits"):
            hvd.alltoall(np.ones(size + last, np.float32), name="rows")
    assert hvd.alltoall(np.full(size, rank, np.int64)).numpy().tolist() == list(range(size))
