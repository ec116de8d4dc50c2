"""Reducescatter: each rank's rows of the sum, for every dtype, uneven and empty parts, and its gradient."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import InvalidError, MismatchError
from hvd_ext.tensorflow.collectives.dtypes import REDUCED
from tests.ranks.numbers import total, values

pytestmark = pytest.mark.ranks(1, 2, 3, 8)

WAYS = {"eager": lambda function: function, "traced": tf.function}


def rows_of(rank: int, size: int, rows: int) -> slice:
    """The rule in other words than the engine's: rank r gets what np.array_split gives it."""
    mine = np.array_split(np.arange(rows), size)[rank]
    return slice(int(mine[0]), int(mine[-1]) + 1) if len(mine) else slice(0, 0)


@pytest.mark.parametrize(("dtype", "way"), [*((dtype, "eager") for dtype in REDUCED), ("float32", "traced")])
def test_each_rank_gets_its_rows_of_the_sum_for_every_dtype(dtype: str, way: str, rank: int, size: int) -> None:
    shape = (3 * size + 1, 5)
    function = WAYS[way](lambda x: hvd.reducescatter(x, op=hvd.Sum, name=f"{dtype} {way}"))
    result = function(tf.cast(values(rank, shape), dtype))
    assert result.dtype.name == dtype
    np.testing.assert_array_equal(tf.cast(result, tf.int64), total(size, shape)[rows_of(rank, size, shape[0])])


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 7, 8, 17, 100_003])
def test_rows_that_do_not_divide_go_to_the_first_ranks(rows: int, rank: int, size: int) -> None:
    result = hvd.reducescatter(values(rank, (rows,)).astype(np.float64), op=hvd.Sum)
    np.testing.assert_array_equal(result, total(size, (rows,))[rows_of(rank, size, rows)])


def test_it_averages_unless_told_otherwise(rank: int, size: int) -> None:
    result = hvd.reducescatter(values(rank, (2 * size, 3)).astype(np.float32) * size)
    np.testing.assert_array_equal(result, total(size, (2 * size, 3))[2 * rank : 2 * rank + 2])


@pytest.mark.parametrize(("op", "way"), [(hvd.Sum, "eager"), (hvd.Average, "traced")])
def test_the_gradient_is_horovods_the_allgather_of_the_parts(op: object, way: str, rank: int, size: int) -> None:
    rows = 2 * size + 1

    def gradient(x: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(hvd.reducescatter(x, op=op, prescale_factor=2.0, postscale_factor=4.0) * weights)
        return tape.gradient(loss, x)

    weights = values(0, (rows, 3), 4).astype(np.float64)
    mine = tf.constant(weights[rows_of(rank, size, rows)])
    result = WAYS[way](gradient)(tf.zeros((rows, 3), tf.float64), mine)
    np.testing.assert_array_equal(result, weights * 8 * (size if op == hvd.Sum else 1))


def test_ranks_that_differ_are_told_both_values_and_the_next_call_works(rank: int, size: int) -> None:
    if size > 1:
        last = rank == size - 1
        with pytest.raises(MismatchError, match=rf"rank {size - 1} has float32\[5\], rank 0 has float32\[4\]"):
            hvd.reducescatter(np.ones(5 if last else 4, np.float32), name="rows")
        with pytest.raises(MismatchError, match=rf"rank {size - 1} has op sum, rank 0 has op average"):
            hvd.reducescatter(np.ones(4, np.float32), op=hvd.Sum if last else hvd.Average, name="op")
        with pytest.raises(MismatchError, match=rf"rank {size - 1} has allreduce, rank 0 has reducescatter"):
            (hvd.allreduce if last else hvd.reducescatter)(np.ones(4, np.float32), name="kind")
    assert hvd.reducescatter(np.ones(size, np.float32), op=hvd.Sum)[0] == size


def test_arguments_that_cannot_be_are_refused_in_words() -> None:
    with pytest.raises(InvalidError, match="a scalar has none"):
        hvd.reducescatter(tf.constant(1.0))
    with pytest.raises(InvalidError, match=r"uint8.*must be one of"):
        hvd.reducescatter(tf.constant([1], tf.uint8))
    with pytest.raises(InvalidError, match="hvd_ext.Average or hvd_ext.Sum"):
        hvd.reducescatter(tf.constant([1.0]), op=1)
