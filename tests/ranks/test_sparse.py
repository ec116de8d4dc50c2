"""Sparse gradients over the ranks equal the dense ones, bit for bit the same on all of them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import InvalidError, MismatchError
from hvd_ext.job import runtime
from hvd_ext.options.gradients import GradientOptions
from hvd_ext.tensorflow.collectives import sparse

pytestmark = pytest.mark.ranks(1, 2)

ROWS, WIDTH = 11, 3
_names = (f"table{number}" for number in itertools.count())


def options(op: Any = hvd.Average, compression: Any = hvd.Compression.none, factor: float = 1.0) -> GradientOptions:
    """The three options that count here."""
    return GradientOptions(op=op, compression=compression, gradient_predivide_factor=factor)


def rows_of(rank: int, count: int, dtype: str, seed: int, index: str = "int64") -> tf.IndexedSlices:
    """Random rows of a rank with many repetitions; eighths, so that their sums are exact."""
    random = np.random.default_rng(1000 * seed + rank)
    indices = random.integers(0, ROWS, count).astype(index)
    values = random.integers(-8, 9, (count, WIDTH)) / 8
    return tf.IndexedSlices(tf.cast(values, dtype), tf.constant(indices), tf.constant([ROWS, WIDTH], tf.int64))


def dense(slices: tf.IndexedSlices) -> np.ndarray:
    result = np.zeros((ROWS, WIDTH))
    np.add.at(result, slices.indices.numpy(), slices.values.numpy().astype(np.float64))
    return result


def assert_same_bits(slices: tf.IndexedSlices) -> None:
    parts = [slices.indices.numpy().astype(np.int64).tobytes(), slices.values.numpy().tobytes()]
    digest = hashlib.sha256(b"".join(parts)).hexdigest()
    assert hvd.allgather_object(digest) == [digest] * hvd.size()
    assert np.all(np.diff(slices.indices.numpy()) > 0)


def reduced(slices: tf.IndexedSlices, chosen: Any, traced: bool = False, **more: Any) -> tf.IndexedSlices:
    name = next(_names)

    def call() -> tf.IndexedSlices:
        return sparse.reduce(runtime.current(), name, slices, chosen, **more)

    call_it: Callable[[], tf.IndexedSlices] = tf.function(call) if traced else call
    return call_it()


@pytest.mark.parametrize(
    ("dtype", "index", "traced"),
    [("float32", "int64", True), ("float64", "int32", False), ("bfloat16", "int32", False)],
)
def test_random_rows_equal_the_dense_sum(dtype: str, index: str, traced: bool) -> None:
    for seed, op, shape in itertools.product(range(1 if traced else 2), (hvd.Sum, hvd.Average), (None, (ROWS, WIDTH))):
        counts = [((rank + 1) * 7 + seed * 16) % 23 for rank in range(hvd.size())]  # some ranks have none
        every = [rows_of(rank, count, dtype, seed, index) for rank, count in enumerate(counts)]
        result = reduced(every[hvd.rank()], options(op), traced, shape=shape)
        expected = sum(dense(part) for part in every) / (1 if op == hvd.Sum else hvd.size())
        assert (result.dtype.name, result.indices.dtype.name) == (dtype, index)
        # sums are exact, an average over 3 ranks is rounded once
        rtol = {"float32": 1e-7, "float64": 1e-15, "bfloat16": 2.0**-8}[dtype]
        np.testing.assert_allclose(dense(result), expected, rtol=rtol, atol=0)
        touched = {int(index) for part in every for index in part.indices.numpy()}
        assert set(result.indices.numpy().tolist()) == touched
        assert_same_bits(result)


def test_real_numbers_have_equal_bits_whatever_order_a_rank_gives_its_rows_in() -> None:
    random = np.random.default_rng(hvd.rank())
    slices = tf.IndexedSlices(tf.constant(random.normal(size=(40, 5)), tf.float32), random.integers(0, 9, 40))
    for compression in hvd.Compression:
        result = reduced(slices, options(compression=compression))
        assert_same_bits(result)
        again = reduced(slices, options(compression=compression))
        assert np.array_equal(again.values, result.values)


def test_rows_of_equal_index_are_added_before_anything_is_sent() -> None:
    slices = tf.IndexedSlices(tf.constant([[1.0], [2.0], [4.0], [8.0]]), tf.constant([5, 2, 5, 2]), tf.constant([7, 1]))
    result = reduced(slices if hvd.rank() == 0 else sparse.empty((7, 1), "float32"), options(hvd.Sum))
    assert result.indices.numpy().tolist() == [2, 5]
    assert result.values.numpy().tolist() == [[10.0], [5.0]]
    if hvd.rank() == 0:
        assert result.indices.dtype == tf.int32
        assert result.dense_shape is slices.dense_shape
    # 1 + 2^-8 twice: bfloat16 sums taken in bfloat16 would lose both halves
    halves = tf.IndexedSlices(tf.constant([1.0, 2.0**-8, 2.0**-8], tf.bfloat16), tf.constant([0, 0, 0]))
    result = reduced(halves if hvd.rank() == 0 else sparse.empty((1,), "bfloat16"), options(hvd.Sum))
    assert float(result.values[0]) == 1 + 2.0**-7
    assert reduced(sparse.empty((7, 2), "float32"), options()).values.shape == (0, 2)


@pytest.mark.parametrize(("dtype", "average"), [("int64", "float64"), ("int8", "float32"), ("uint16", "float32")])
def test_rows_of_whole_numbers_are_summed_as_they_are_and_averaged_as_floats(dtype: str, average: str) -> None:
    rank, size = hvd.rank(), hvd.size()
    slices = tf.IndexedSlices(
        tf.constant([[rank + 1], [3], [1]], dtype), tf.constant([2, rank, 2]), tf.constant([9, 1])
    )
    expected = dict.fromkeys(range(size), 3.0)
    expected[2] = expected.get(2, 0.0) + size * (size + 1) // 2 + size
    for op, wanted, by in ((hvd.Sum, dtype, 1), (hvd.Average, average, size)):
        result = hvd.allreduce(slices, op=op, postscale_factor=2.0)
        assert result.values.dtype.name == wanted
        assert result.indices.numpy().tolist() == sorted(expected)
        sums = np.array([[2 * expected[index] / by] for index in sorted(expected)], wanted)
        np.testing.assert_allclose(result.values, sums, rtol=1e-6)
    if dtype == "int8":
        with pytest.raises(InvalidError, match=r"the result does not fit into int8 \(-128 to 127\)"):
            hvd.allreduce(tf.IndexedSlices(tf.constant([127, 1], dtype), [0, 0]), op=hvd.Sum)


def test_a_row_that_a_rank_repeats_travels_once() -> None:
    slices = tf.IndexedSlices(tf.ones((4000, 64)), tf.zeros(4000, tf.int64))
    before = runtime.current().engine.statistics().bytes_sent
    result = reduced(slices, options(hvd.Sum))
    assert runtime.current().engine.statistics().bytes_sent - before < 4000 * 64
    assert result.values.numpy().tolist() == [[4000.0 * hvd.size()] * 64]


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "tf.function"])
def test_ranks_without_rows_take_part(traced: bool) -> None:
    own = rows_of(0, 9, "float32", 1) if hvd.rank() == 0 else sparse.empty((ROWS, WIDTH), "float32")
    result = reduced(own, options(), traced, shape=(ROWS, WIDTH), dtype="float32")
    np.testing.assert_allclose(dense(result), dense(rows_of(0, 9, "float32", 1)) / hvd.size(), rtol=1e-7)
    assert result.dense_shape.numpy().tolist() == [ROWS, WIDTH]
    assert_same_bits(result)
    none = reduced(sparse.empty((ROWS, 2), "float32"), options(), traced, shape=(ROWS, 2), dtype="float64")
    assert none.values.shape == (0, 2)
    assert none.values.dtype == tf.float64


def of_row(value: float, dtype: str = "float32", count: int = 1) -> tf.IndexedSlices:
    """One value in one row, or the same several times."""
    return tf.IndexedSlices(tf.fill([count], tf.cast(value, dtype)), tf.constant([3] * count), tf.constant([ROWS]))


def test_halves_on_the_wire_are_added_in_float32() -> None:
    # 2049 is no float16; two rows of 1024.5 of one rank are added before they are rounded
    halves = options(hvd.Sum, hvd.Compression.fp16)
    assert reduced(of_row(1024.5, count=2), halves).values.numpy().tolist() == [2048.0 * hvd.size()]
    assert reduced(of_row(1024.5, "float64"), halves).values.numpy().tolist() == [1024.5 * hvd.size()]


def test_predividing_keeps_a_sum_inside_the_range_of_halves() -> None:
    large = of_row(131072.0)
    result = reduced(large, options(compression=hvd.Compression.fp16, factor=4.0))
    assert result.values.numpy().tolist() == [131072.0]
    assert np.isinf(reduced(large, options(compression=hvd.Compression.fp16)).values.numpy()).all()
    assert reduced(of_row(49152.0), options(factor=2.0)).values.numpy().tolist() == [49152.0]


def test_one_function_may_use_a_name_twice() -> None:
    first, second = rows_of(hvd.rank(), 5, "float32", 1), rows_of(hvd.rank(), 8, "float32", 2)

    @tf.function
    def both() -> tuple[tf.IndexedSlices, tf.IndexedSlices]:
        job = runtime.current()
        return tuple(sparse.reduce(job, "twice", part, options(hvd.Sum)) for part in (first, second))

    for _ in range(2):
        for seed, count, result in zip((1, 2), (5, 8), both(), strict=True):
            expected = sum(dense(rows_of(rank, count, "float32", seed)) for rank in range(hvd.size()))
            np.testing.assert_array_equal(dense(result), expected)


def test_rows_of_different_widths_are_a_mismatch_on_all_ranks() -> None:
    if hvd.size() == 1:
        pytest.skip("needs two ranks")
    odd = tf.IndexedSlices(tf.ones((2, 2 + (hvd.rank() == hvd.size() - 1))), tf.constant([0, 1]))
    with pytest.raises(MismatchError, match="odd table.values"):
        sparse.reduce(runtime.current(), "odd table", odd, options())
    assert_same_bits(reduced(rows_of(hvd.rank(), 4, "float32", 9), options()))
