"""Allreduce: right for every dtype, shape and algorithm, eager and traced (gradients: test_collectives_in_sets.py)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import InvalidError, MismatchError, PlanError
from hvd_ext.job import runtime
from hvd_ext.planning import registry
from hvd_ext.tensorflow.collectives.dtypes import ALLREDUCED, REDUCED, WIDENED
from tests.ranks.compare import assert_equal
from tests.ranks.numbers import WAYS, eagerly_and, total, values

pytestmark = pytest.mark.ranks(1, 2, 3)  # test_placement.py has every algorithm on 8

SHAPES = [(), (1,), (0,), (7,), (3, 5), (2, 0, 3), (100_003,)]


@pytest.mark.parametrize(("way", "dtype"), eagerly_and(("float32", "bfloat16", "int64"), REDUCED))
def test_the_sum_is_exact_for_every_dtype(dtype: str, way: str, rank: int, size: int) -> None:
    reduce = WAYS[way](lambda x: hvd.allreduce(x, op=hvd.Sum))
    result = reduce(tf.cast(values(rank, (19,)), dtype))
    assert result.dtype.name == dtype
    np.testing.assert_array_equal(tf.cast(result, tf.int64), total(size, (19,)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_sum_is_exact_for_every_shape(shape: tuple[int, ...], rank: int, size: int) -> None:
    result = hvd.allreduce(values(rank, shape).astype(np.float32), op=hvd.Sum)
    assert result.shape == shape
    np.testing.assert_array_equal(result, total(size, shape))


@pytest.mark.parametrize("dtype", REDUCED)
def test_the_average_is_the_sum_divided_once(dtype: str, rank: int, size: int) -> None:
    result = hvd.allreduce(tf.cast(values(rank, (19,)), dtype))
    if dtype.startswith("int"):
        np.testing.assert_array_equal(result, total(size, (19,)) // size)
        return
    wide = "float32" if dtype in ("float16", "bfloat16") else dtype
    expected = tf.cast(tf.cast(total(size, (19,)), wide) / tf.cast(size, wide), dtype)
    np.testing.assert_array_equal(tf.cast(result, tf.float64), tf.cast(expected, tf.float64))


def test_average_is_the_default_and_horovods_keyword_is_understood(rank: int, size: int) -> None:
    x = values(rank, (5,)).astype(np.float64)
    np.testing.assert_array_equal(hvd.allreduce(x, average=False), total(size, (5,)))
    np.testing.assert_array_equal(hvd.allreduce(x, average=True), hvd.allreduce(x))


@pytest.mark.parametrize("algorithm", registry.names())
@pytest.mark.parametrize("elements", [5, 70_001])
def test_every_algorithm_gives_the_sum_or_says_why_not(algorithm: str, elements: int, rank: int, size: int) -> None:
    x = values(rank, (elements,)).astype(np.float64)
    if registry.supports(registry.get(algorithm), runtime.current().tree) is not None:
        with pytest.raises(PlanError, match=algorithm):
            hvd.allreduce(x, op=hvd.Sum, algorithm=algorithm)
        return
    result = hvd.allreduce(x, op=hvd.Sum, algorithm=algorithm)
    np.testing.assert_array_equal(result, total(size, (elements,)))


@pytest.mark.parametrize(("way", "dtype"), eagerly_and(["uint8"], WIDENED))
def test_narrow_whole_numbers_are_added_exactly_or_refused(way: str, dtype: str, rank: int, size: int) -> None:
    reduce = WAYS[way](lambda x: hvd.allreduce(x, op=hvd.Sum))
    result = reduce(tf.cast(values(rank, (19,)) // 2, dtype))
    assert result.dtype.name == dtype
    expected = np.sum([values(r, (19,)) // 2 for r in range(size)], axis=0)
    np.testing.assert_array_equal(tf.cast(result, tf.int64), expected)
    largest = tf.constant([0, tf.as_dtype(dtype).max], dtype)
    np.testing.assert_array_equal(hvd.allreduce(largest), largest)  # the average of all fits
    if size > 1:
        refusal = InvalidError if way == "eager" else tf.errors.InvalidArgumentError
        with pytest.raises(refusal, match=f"the result does not fit into {dtype}"):
            reduce(largest)


def extremes(dtype: str, rank: int) -> npt.NDArray[np.generic]:
    """Values whose sums leave the dtype, and small ones of both signs."""
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    small = [rank * 7 - 3 * (low < 0), rank + 1, -rank * (low < 0)]
    return np.array([high, low, high - rank, low + rank, low if rank % 2 else high, *small], dtype)


def divided(total: int, divisor: int) -> int:
    return -(-total // divisor) if total < 0 else total // divisor


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"])
def test_an_average_of_whole_numbers_never_wraps_and_is_truncated_toward_zero(dtype: str, rank: int, size: int) -> None:
    x = tf.constant(extremes(dtype, rank))
    sums = [sum(int(extremes(dtype, other)[i]) for other in range(size)) for i in range(len(x))]
    expected = [divided(one, size) for one in sums]
    traced = tf.function(lambda one: hvd.allreduce(one, name=f"whole {dtype}"), autograph=False)
    results = [hvd.allreduce(x), traced(x), hvd.allreduce(x, process_set=hvd.global_process_set)]
    results += hvd.grouped_allreduce([x, x])
    if dtype in REDUCED:
        rows = tf.tile(x[tf.newaxis], [size, 1])
        results += [hvd.reducescatter(rows)[0], hvd.grouped_reducescatter([rows, rows])[1][0]]
    for result in results:
        assert result.dtype == dtype
        assert result.numpy().tolist() == expected
    half = hvd.allreduce(x, postscale_factor=0.5)
    np.testing.assert_allclose(half.numpy(), [divided(one, 2 * size) for one in sums], rtol=1e-12)
    twice = tf.IndexedSlices(tf.concat([x, x], 0), np.tile(np.arange(len(x)), 2))
    np.testing.assert_allclose(hvd.allreduce(twice).values, [2 * one / size for one in sums], rtol=1e-6)


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_whole_numbers_that_a_factor_makes_too_large_are_refused(dtype: str, op: hvd.ReduceOp, rank: int) -> None:
    x = tf.constant([np.iinfo(dtype).max // 2 - rank], dtype)
    with pytest.raises(InvalidError, match=f"the result does not fit into {dtype}"):
        hvd.allreduce(x, op=op, postscale_factor=8.0)


def test_a_sum_and_an_average_of_whole_numbers_do_not_meet(rank: int, size: int) -> None:
    for dtype in ("int32", "int64"):
        with pytest.raises(MismatchError, match="op sum, rank 0 has op average") if size > 1 else nullcontext():
            hvd.allreduce(tf.constant([1], dtype), op=hvd.Sum if rank else hvd.Average, postscale_factor=2.0, name="w")


@pytest.mark.parametrize(("way", "dtype"), eagerly_and(["int32"], REDUCED))
def test_factors_multiply_before_and_after(way: str, dtype: str, rank: int, size: int) -> None:
    x = tf.cast(values(rank, (19,)) * 4, dtype)
    reduce = WAYS[way](lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.25, postscale_factor=2.0))
    np.testing.assert_array_equal(tf.cast(reduce(x), tf.int64), 2 * total(size, (19,)))
    average = WAYS[way](lambda x: hvd.allreduce(x, postscale_factor=float(size)))
    np.testing.assert_allclose(tf.cast(average(x), tf.float64), 4 * total(size, (19,)), rtol=2e-2)
    if dtype.startswith("int"):
        np.testing.assert_array_equal(average(x), 4 * total(size, (19,)))  # cut once, at the end


def test_calls_are_matched_by_name_in_whatever_order_each_rank_makes_them(rank: int, size: int) -> None:
    @tf.function
    def step(x: tf.Tensor) -> dict[str, tf.Tensor]:
        names = ["first", "second", "third"]
        order = names if rank % 2 == 0 else names[::-1]
        return {name: hvd.allreduce(x + len(name), op=hvd.Sum, name=name) for name in order}

    results = step(tf.constant(values(rank, (4,)), tf.int32))
    for name, result in results.items():
        np.testing.assert_array_equal(result, total(size, (4,)) + size * len(name))


def test_one_name_used_twice_in_a_function_means_two_calls(rank: int, size: int) -> None:
    @tf.function
    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return hvd.allreduce(x, op=hvd.Sum, name="same"), hvd.allreduce(2 * x, op=hvd.Sum, name="same")

    once, twice = step(tf.constant(values(rank, (6,)), tf.int64))
    np.testing.assert_array_equal(once, total(size, (6,)))
    np.testing.assert_array_equal(twice, 2 * total(size, (6,)))


def test_ranks_may_trace_a_function_at_different_times(rank: int, size: int) -> None:
    step = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))
    for _ in range(rank):
        step.get_concrete_function(tf.TensorSpec([None], tf.float32))
    other = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))
    if rank % 2:
        other.get_concrete_function(tf.TensorSpec([3], tf.float32))
    for _ in range(2):
        np.testing.assert_array_equal(step(tf.constant(values(rank, (3,)), tf.float32)), total(size, (3,)))
        np.testing.assert_array_equal(other(tf.constant(values(rank, (3,), 1), tf.float32)), total(size, (3,), 1))


def test_a_loop_in_a_function_calls_once_per_turn(rank: int, size: int) -> None:
    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        result = tf.zeros_like(x)
        for turn in tf.range(5):
            result += hvd.allreduce(x * (turn + 1), op=hvd.Sum)
        return result

    np.testing.assert_array_equal(step(tf.constant(values(rank, (3,)), tf.int32)), 15 * total(size, (3,)))


def test_an_unused_result_still_takes_part(rank: int, size: int) -> None:
    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        hvd.allreduce(x, name="unused on rank 0") if rank == 0 else None
        return x if rank == 0 else hvd.allreduce(x, name="unused on rank 0")

    x = tf.constant([float(rank)])
    result = float(step(x)[0])
    assert result == (0 if rank == 0 else (size - 1) / 2)


def test_sizes_unknown_to_a_graph_get_the_plan_of_their_class(rank: int, size: int) -> None:
    step = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum), input_signature=[tf.TensorSpec([None], tf.float32)])
    for elements in (0, 1, 1_000, 20_000, 300_000):
        result = step(tf.constant(values(rank, (elements,)), tf.float32))
        np.testing.assert_array_equal(result, total(size, (elements,)))


ONE = tf.constant([1.0])
SLICES = tf.IndexedSlices(tf.zeros([1, 2]), tf.constant([0]), tf.constant([3, 2]))


@pytest.mark.parametrize(
    ("tensor", "options", "words"),
    [
        (tf.zeros(3, tf.complex64), {}, r"complex64.*must be one of float32"),
        (tf.constant([True]), {}, "bool.*cast to int32, and compare the sum"),
        (tf.constant(["text"]), {}, "string.*allgather_object"),
        ([tf.zeros(3), tf.zeros(2)], {}, "cannot be converted to one tensor"),
        (1.0, {"op": 7}, r"op \(7\).*hvd_ext\.Average or hvd_ext\.Sum"),
        (1.0, {"op": hvd.Adasum}, f"op .*must be hvd_ext.Average or hvd_ext.Sum; {hvd.Adasum.instead[:20]}"),
        (1.0, {"average": True, "op": hvd.Sum}, r"op \(.*Sum.*\) and average \(True\): give only one of them"),
        (SLICES, {"op": hvd.Max}, r"of IndexedSlices: op .*Max.*convert the slices"),
        (1.0, {"postscale_factor": float("nan")}, "postscale_factor .*: must be a finite number"),
        (1.0, {"postscale_factor": True}, "postscale_factor .*: must be a finite number"),
        (1.0, {"postscale_factor": "2"}, "postscale_factor .*: must be a finite number"),
        (1.0, {"postscale_factor": tf.constant(2.0)}, "postscale_factor .*: must be a finite number"),
        (1.0, {"name": ""}, "name .*must be a text"),
        (1.0, {"compression": "fp16"}, r"compression \('fp16'\): must be one of"),
    ],
)
def test_arguments_that_cannot_be_are_refused_in_words(tensor: object, options: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        hvd.allreduce(tensor, **options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: hvd.allgather(tf.constant(1.0)), "allgather .*a scalar has none"),
        (lambda: hvd.allgather(tf.constant(["text"])), "allgather .*string.*must be one of"),
        (lambda: hvd.alltoall(tf.constant(1.0)), "alltoall .*a scalar has none"),
        (lambda: hvd.alltoall(tf.constant(["text"])), "alltoall .*string.*must be one of"),
        (lambda: hvd.alltoall(ONE, [1.0]), r"splits \(float32\[1\]\): must be a vector of whole numbers"),
        (lambda: hvd.alltoall(ONE, 1), r"splits \(int32\[\]\): must be a vector"),
        (lambda: hvd.reducescatter(tf.constant(1.0)), "reducescatter .*a scalar has none"),
        (lambda: hvd.reducescatter(tf.constant([1], tf.uint8)), "reducescatter .*uint8.*must be one of"),
        (lambda: hvd.reducescatter(ONE, op=1), "reducescatter: op .*hvd_ext.Average or hvd_ext.Sum"),
        (lambda: hvd.reducescatter(ONE, op=hvd.Min), "reducescatter: op .*Min.*the others are for hvd_ext.allreduce"),
        (lambda: hvd.grouped_allreduce(tf.zeros(3)), "takes a list of tensors"),
        (lambda: hvd.grouped_allreduce([tf.zeros(3), tf.constant([True])]), "bool"),
        (lambda: hvd.grouped_allgather([tf.zeros(3), tf.zeros(())]), "a scalar has none"),
        (lambda: hvd.allreduce(SLICES, algorithm="ring"), "rows are gathered; leave it out"),
    ],
)
def test_so_are_those_of_other_collectives(call: Callable[[], object], words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        call()


def test_an_algorithm_that_does_not_exist_is_named() -> None:
    with pytest.raises(PlanError, match="no_such_algorithm"):
        hvd.allreduce(tf.zeros(3), algorithm="no_such_algorithm")


@pytest.mark.parametrize(("way", "dtype"), eagerly_and(("float32", "int8"), ALLREDUCED))
def test_the_least_the_greatest_and_the_product_of_all_ranks(dtype: str, way: str, rank: int, size: int) -> None:
    whole = {hvd.Min: np.min, hvd.Max: np.max, hvd.Product: np.prod}
    for op, reduce in whole.items():
        everyone = np.stack([(np.arange(50) * 7 + r * 3) % 11 + 1 for r in range(size)])
        if op == hvd.Product:
            everyone = np.where((everyone + np.arange(size)[:, None]) % 5 == 0, 2, 1)  # exact in every dtype
        call = WAYS[way](lambda x, op=op: hvd.allreduce(x, op=op, name=f"{op.name} {dtype} {way}"))
        result = call(tf.cast(everyone[rank], dtype))
        assert result.dtype.name == dtype
        np.testing.assert_array_equal(tf.cast(result, tf.int64), reduce(everyone, axis=0))


def test_a_minimum_travels_as_halves_and_in_groups_and_has_factors(rank: int, size: int) -> None:
    x = tf.range(5, dtype=tf.float32) - rank
    halves = hvd.allreduce(x, op=hvd.Min, compression=hvd.Compression.bf16, prescale_factor=2.0, postscale_factor=0.5)
    np.testing.assert_array_equal(halves, np.arange(5) - (size - 1))
    together = hvd.grouped_allreduce([x, tf.constant([rank]), -x], op=hvd.Max)
    expected = [np.arange(5), [size - 1], size - 1 - np.arange(5)]
    assert_equal(together, expected)


def test_a_minimum_is_nan_where_a_rank_has_nan(rank: int, size: int) -> None:
    mine = tf.constant([float("nan") if rank == size - 1 else 1.0, float(rank)])
    np.testing.assert_array_equal(hvd.allreduce(mine, op=hvd.Min), [float("nan"), 0.0])


def test_a_minimum_has_no_gradient_and_says_so() -> None:
    x = tf.constant([1.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = hvd.allreduce(x, op=hvd.Min)
    with pytest.raises(
        (InvalidError, LookupError), match="gradient of an allreduce with op=Min: only Average and Sum have a gradient"
    ):
        tape.gradient(y, x)
