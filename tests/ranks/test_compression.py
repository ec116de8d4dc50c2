"""Compression: float32 travels as halves, is added in float32, and ends as the same bits on all ranks.

test_pairs.py trains with it; test_mismatch_table.py has ranks whose compression differs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.job import runtime
from hvd_ext.options import Options
from hvd_ext.planning import registry
from hvd_ext.planning.tensors import Tensor
from hvd_ext.tensorflow.gradients import registration
from tests.ranks.numbers import total, values

HALVES = (hvd.Compression.fp16, hvd.Compression.bf16)
# the distance of two neighbours relative to their size
UNIT = {hvd.Compression.fp16: 2.0**-11, hvd.Compression.bf16: 2.0**-8}
ELEMENTS = 5_003


def thirds(rank: int) -> npt.NDArray[np.float32]:
    """Values that no half holds exactly."""
    return ((values(rank, (ELEMENTS,)) + 1) / 3).astype(np.float32)


def assert_same_bits_everywhere(result: tf.Tensor, size: int) -> None:
    everyone = hvd.allgather(result[tf.newaxis]).numpy()
    for other in range(1, size):
        np.testing.assert_array_equal(everyone[other].view(np.uint32), everyone[0].view(np.uint32))


def algorithms() -> list[str]:
    tree = runtime.current().tree
    return [name for name in registry.names() if registry.supports(registry.get(name), tree) is None]


@pytest.mark.parametrize("compression", HALVES)
def test_every_algorithm_ends_with_equal_bits_near_the_sum_of_float32(
    compression: hvd.Compression, rank: int, size: int
) -> None:
    expected = np.sum([thirds(other).astype(np.float64) for other in range(size)], axis=0)
    for algorithm in algorithms():
        result = hvd.allreduce(thirds(rank), op=hvd.Sum, compression=compression, algorithm=algorithm)
        # each rank's number is rounded at most once on each of its ways, and sums of them again
        np.testing.assert_allclose(result, expected, rtol=(size + 2) * UNIT[compression], err_msg=algorithm)
        assert_same_bits_everywhere(result, size)


def test_whole_numbers_that_a_half_holds_are_exact_in_a_traced_function(rank: int, size: int) -> None:
    reduce = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16))
    np.testing.assert_array_equal(reduce(values(rank, (300, 7)).astype(np.float32)), total(size, (300, 7)))


@pytest.mark.parametrize("compression", HALVES)
def test_a_reducescatter_gives_the_rows_of_the_sum(compression: hvd.Compression, rank: int, size: int) -> None:
    exact = hvd.reducescatter(values(rank, (300, 7)).astype(np.float32), op=hvd.Sum, compression=compression)
    mine = np.array_split(np.arange(300), size)[rank]
    np.testing.assert_array_equal(exact, total(size, (300, 7))[mine])
    near = hvd.reducescatter(thirds(rank), op=hvd.Sum, compression=compression)
    expected = np.sum([thirds(other).astype(np.float64) for other in range(size)], axis=0)
    np.testing.assert_allclose(near, np.array_split(expected, size)[rank], rtol=(size + 2) * UNIT[compression])


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_a_sum_beyond_the_range_of_fp16_arrives_where_the_ranks_values_are_in_it(
    op: hvd.ReduceOp, rank: int, size: int
) -> None:
    # exact with 11 bits, whatever the number of ranks; and small values, which a division before the way would lose
    x = np.float32([40_000, -65_504, 2.0**-20, 1.0] * 300)
    expected = x * (size if op == hvd.Sum else 1)
    for algorithm in algorithms():
        result = hvd.allreduce(x, op=op, compression=hvd.Compression.fp16, algorithm=algorithm)
        np.testing.assert_allclose(result, expected, rtol=size * UNIT[hvd.Compression.fp16], atol=size * 2.0**-24)
        assert_same_bits_everywhere(result, size)
    rows = hvd.reducescatter(x, op=op, compression=hvd.Compression.fp16)
    mine = np.array_split(expected, size)[rank]
    np.testing.assert_allclose(rows, mine, rtol=size * UNIT[hvd.Compression.fp16], atol=size * 2.0**-24)
    channel = registration.open_channel(
        "big", [Tensor("g", x.shape, "float32")], Options(op=op, compression=hvd.Compression.fp16)
    )
    (reduced,) = channel.reduce([tf.constant(x)])
    np.testing.assert_allclose(reduced, expected, rtol=size * UNIT[hvd.Compression.fp16], atol=size * 2.0**-24)
    channel.close()


@pytest.mark.parametrize("call", [hvd.allreduce, lambda x: hvd.grouped_allreduce([x, x])[1]])
def test_the_average_of_halves_is_finite(call: Callable[[tf.Tensor], tf.Tensor], size: int) -> None:
    halves = tf.constant([40_000, 65_504, 3], tf.float16)
    result = call(halves)
    assert result.dtype == tf.float16
    np.testing.assert_allclose(result.numpy(), halves.numpy(), rtol=2 * UNIT[hvd.Compression.fp16])
    assert np.isinf(hvd.allreduce(halves, op=hvd.Sum)[1]) == (size > 1)


def test_fp16_overflows_to_infinity_and_bf16_does_not(rank: int, size: int) -> None:
    x = np.float32([70_000.0, 1.0])
    fp16 = hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16)
    bf16 = hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.bf16)
    assert np.isinf(fp16[0]) == (size > 1)  # one rank sends nothing
    assert fp16[1] == size
    np.testing.assert_allclose(bf16[0], 70_000.0 * size, rtol=3 * UNIT[hvd.Compression.bf16])


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "int32", "int64"])
def test_other_dtypes_travel_as_they_are(dtype: str, size: int) -> None:
    # numbers that the dtype holds exactly, and bfloat16 does not
    x = tf.constant([{"float16": 257, "bfloat16": 9}.get(dtype, 2**20 + 1)], dtype)
    result = hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.bf16)
    assert result.dtype.name == dtype
    np.testing.assert_array_equal(tf.cast(result, tf.int64), tf.cast(x, tf.int64) * size)


@pytest.mark.parametrize("compression", hvd.Compression)
def test_a_loop_may_compress_and_decompress_itself(compression: hvd.Compression, rank: int, size: int) -> None:
    for dtype in (tf.float64, tf.float32, tf.float16, tf.int32, tf.bool):
        tensor = tf.cast(values(rank, (5,)), dtype)
        compressed, ctx = compression.compress(tensor)
        assert compressed.dtype.name == (compression.value if dtype.is_floating and compression.value else dtype.name)
        result = compression.decompress(compressed, ctx)
        assert result.dtype == dtype
        np.testing.assert_array_equal(result, tensor)
    compressed, ctx = compression.compress(tf.constant(values(rank, (5,)), tf.float32))
    reduced = compression.decompress(hvd.allreduce(compressed, op=hvd.Sum), ctx)
    np.testing.assert_array_equal(reduced, total(size, (5,)).astype(np.float32))
    assert reduced.dtype == tf.float32


def test_the_gradient_travels_as_the_tensor_did(rank: int, size: int) -> None:
    x = tf.constant(values(rank, (9,)), tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16)
        loss = tf.reduce_sum(y * float(rank + 1) / 3)
    exact = sum((other + 1) / 3 for other in range(size))
    gradient = tape.gradient(loss, x)
    np.testing.assert_allclose(gradient, np.full(9, exact), rtol=(size + 2) * UNIT[hvd.Compression.fp16])
    if size > 1:
        assert np.all(gradient.numpy() == gradient.numpy().astype(np.float16).astype(np.float32))


def test_a_channel_compresses_its_float32_buckets_only(rank: int, size: int) -> None:
    specs = [Tensor("single", (ELEMENTS,), "float32"), Tensor("double", (ELEMENTS,), "float64")]
    channel = registration.open_channel("compressed", specs, Options(op=hvd.Sum, compression=hvd.Compression.fp16))
    single, double = channel.reduce([tf.constant(thirds(rank)), tf.constant(thirds(rank), tf.float64)])
    exact = np.sum([thirds(other).astype(np.float64) for other in range(size)], axis=0)
    np.testing.assert_allclose(double, exact, rtol=1e-14)
    np.testing.assert_allclose(single, exact, rtol=(size + 2) * UNIT[hvd.Compression.fp16])
    assert (np.max(np.abs(single - exact)) > 0) == (size > 1)
    assert_same_bits_everywhere(single, size)
    channel.close()
