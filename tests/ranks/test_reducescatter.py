"""Reducescatter: each rank's rows of the sum, for every dtype, uneven and empty parts, and its gradient."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.tensorflow.collectives.dtypes import REDUCED
from tests.ranks.numbers import WAYS, eagerly_and, total, values

pytestmark = pytest.mark.ranks(1, 2, 3, 8)


def rows_of(rank: int, size: int, rows: int) -> slice:
    """The rule in other words than the engine's: rank r gets what np.array_split gives it."""
    mine = np.array_split(np.arange(rows), size)[rank]
    return slice(int(mine[0]), int(mine[-1]) + 1) if len(mine) else slice(0, 0)


@pytest.mark.parametrize(("way", "dtype"), eagerly_and(["float32"], REDUCED))
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
