"""Groups of tensors in one call: right for mixed dtypes and sparse rows, differentiable, compared as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import MismatchError
from tests.ranks.compare import assert_equal
from tests.ranks.numbers import WAYS, total, values

SHAPES = [(3, 2), (), (0,), (5,), (2, 0, 3), (7, 1)]
DTYPES = ["float32", "bfloat16", "float32", "int64", "float64", "float16"]


def members(rank: int, sparse: bool = False) -> list[Any]:
    """Tensors of several dtypes; with two IndexedSlices between them, of which one rank has no rows."""
    made: list[Any] = [
        tf.cast(values(rank, shape, i), dtype) for i, (shape, dtype) in enumerate(zip(SHAPES, DTYPES, strict=True))
    ]
    if sparse:
        made.insert(1, slices(tf.cast(values(rank, (rank, 2), 8), tf.float64), rows(rank, rank)))
        made.append(slices(tf.cast(values(rank, (3, 4), 9), tf.float32), rows(rank, 3)))
    return made


def slices(part: tf.Tensor, indices: tf.Tensor) -> tf.IndexedSlices:
    return tf.IndexedSlices(part, indices, tf.constant([9, part.shape[1]], tf.int64))


def rows(rank: int, count: int) -> tf.Tensor:
    return tf.constant([(2 * rank + 3 * i) % 5 for i in range(count)], tf.int64)


def dense(one: Any) -> np.ndarray:
    return tf.cast(tf.convert_to_tensor(one), tf.float64).numpy()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "mixed"])
def test_every_tensor_of_a_group_is_reduced(sparse: bool, way: str, rank: int, size: int) -> None:
    def reduce(tensors: list[Any]) -> list[Any]:
        return hvd.grouped_allreduce(tensors, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)

    results = WAYS[way](reduce)(members(rank, sparse))
    everybody = [members(other, sparse) for other in range(size)]
    assert len(results) == len(everybody[0])
    for index, (result, own) in enumerate(zip(results, everybody[rank], strict=True)):
        assert isinstance(result, tf.IndexedSlices) == isinstance(own, tf.IndexedSlices)
        assert result.dtype == own.dtype
        np.testing.assert_array_equal(dense(result), sum(dense(other[index]) for other in everybody))


def test_sizes_unknown_to_a_graph_agree_with_known_ones(rank: int, size: int) -> None:
    unknown = tf.function(
        lambda a, b: hvd.grouped_allreduce([a, b], op=hvd.Sum, name="sizes"),
        input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([None])],
    )
    known = tf.function(lambda a, b: hvd.grouped_allreduce([a, b], op=hvd.Sum, name="sizes"))
    pair = [tf.constant(values(rank, (3, 2)), tf.float32), tf.constant(values(rank, (4,), 1), tf.float32)]
    one, other = (unknown if rank % 2 else known)(*pair)
    np.testing.assert_array_equal(one, total(size, (3, 2)))
    np.testing.assert_array_equal(other, total(size, (4,), 1))


def test_a_group_of_one_dtype_is_one_call(rank: int, size: int) -> None:
    from hvd_ext.job import runtime

    engine = runtime.current().engine
    before = engine.statistics().calls
    hvd.grouped_allreduce([tf.fill([n], float(rank)) for n in range(1, 9)])
    assert engine.statistics().calls == before + 1


@pytest.mark.parametrize("way", WAYS)
def test_parts_of_several_tensors_are_joined(way: str, rank: int, size: int) -> None:
    def parts(of: int) -> list[tf.Tensor]:
        return [
            tf.cast(values(of, (of + 1, 2)), tf.float32),
            tf.cast(values(of, (2 * (size - of), 3), 1) % 2, tf.bool),
            tf.cast(values(of, (of,), 2), tf.bfloat16),
        ]

    results = WAYS[way](hvd.grouped_allgather)(parts(rank))
    for index, result in enumerate(results):
        expected = tf.concat([parts(other)[index] for other in range(size)], 0)
        assert result.dtype == expected.dtype
        np.testing.assert_array_equal(dense(result), dense(expected))


@pytest.mark.parametrize("way", WAYS)
def test_rows_of_several_tensors_are_reduced_and_divided(way: str, rank: int, size: int) -> None:
    shapes = {"float32": (2 * size + 1, 3), "int64": (size,), "float64": (1, 2)}
    tensors = [tf.cast(values(rank, shape, i), dtype) for i, (dtype, shape) in enumerate(shapes.items())]
    results = WAYS[way](lambda x: hvd.grouped_reducescatter(x, op=hvd.Sum, postscale_factor=2.0))(tensors)
    for index, (result, (dtype, shape)) in enumerate(zip(results, shapes.items(), strict=True)):
        assert result.dtype.name == dtype
        mine = np.array_split(np.arange(shape[0]), size)[rank]
        np.testing.assert_array_equal(result, 2 * total(size, shape, index)[mine])


def test_an_empty_group_is_an_empty_list(rank: int) -> None:
    for grouped in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
        assert grouped([]) == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("single", "grouped", "options"),
    [
        (hvd.allreduce, hvd.grouped_allreduce, {"prescale_factor": 3.0}),
        (hvd.allgather, hvd.grouped_allgather, {}),
        (hvd.reducescatter, hvd.grouped_reducescatter, {"op": hvd.Sum, "postscale_factor": 2.0}),
    ],
    ids=["allreduce", "allgather", "reducescatter"],
)
def test_the_gradients_of_a_group_are_those_of_its_calls(
    single: Callable[..., Any], grouped: Callable[..., Any], options: dict[str, Any], way: str, rank: int, size: int
) -> None:
    def gradients(call: Callable[[list[tf.Tensor]], list[tf.Tensor]], tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            loss = tf.constant(0.0, tf.float64)
            for result in call(tensors):  # weighed with numbers of this rank
                weights = tf.reshape(tf.range(tf.size(result)) * 7 % 16 + 3 * rank + 1, tf.shape(result))
                loss += tf.reduce_sum(tf.cast(result, tf.float64) * tf.cast(weights, tf.float64))
        return tape.gradient(loss, tensors)

    inputs = [tf.zeros((size + 1, 2), tf.float64), tf.zeros(size)]
    together = WAYS[way](lambda *given: gradients(lambda tensors: grouped(tensors, **options), list(given)))
    apart = gradients(lambda tensors: [single(tensor, **options) for tensor in tensors], inputs)
    assert all(tf.reduce_any(gradient != 0) for gradient in apart)
    assert_equal(together(*inputs), apart)


def test_gradients_flow_through_sparse_rows(rank: int, size: int) -> None:
    weights = values(rank, (9, 4), 3).astype(np.float32)
    with tf.GradientTape() as tape:
        x = tf.zeros((3, 4))
        tape.watch(x)
        result = hvd.allreduce(tf.IndexedSlices(x, rows(rank, 3), [9, 4]), prescale_factor=2.0)
        loss = tf.reduce_sum(tf.convert_to_tensor(result) * weights)
    expected = 2 * total(size, (9, 4), 3) / size / size  # the rows are gathered, and divided
    np.testing.assert_allclose(tape.gradient(loss, x), expected[rows(rank, 3).numpy()], rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda odd: hvd.grouped_allreduce([] if odd else [1.0], name="g"), ["number of tensors 0"]),
        (
            lambda odd: hvd.grouped_allreduce([tf.zeros(4), tf.zeros((2, 3) if odd else 6)], name="g"),
            ["tensor 1 float32[2, 3]", "tensor 1 float32[6]"],
        ),
        (
            lambda odd: hvd.grouped_allreduce(members(0, sparse=True)[1 if odd else 2 :][:1], name="g"),
            ["tensor 0 IndexedSlices of float64[*, 2]", "tensor 0 bfloat16[]"],
        ),
        (
            lambda odd: hvd.grouped_allgather([tf.zeros(4), tf.zeros((1, 3 if odd else 2))], name="g"),
            ["tensor 1 float32[*, 3]"],
        ),
        (
            lambda odd: hvd.grouped_reducescatter([tf.zeros(4 if odd else 5)], name="g"),
            ["tensor 0 float32[4]", "tensor 0 float32[5]"],
        ),
        (
            lambda odd: (hvd.grouped_allgather if odd else hvd.grouped_reducescatter)([tf.zeros(4)], name="g"),
            ["grouped_allgather", "grouped_reducescatter"],
        ),
    ],
)
def test_groups_that_differ_are_refused_on_all_ranks_before_anything_is_exchanged(
    call: Callable[[bool], Any], parts: list[str], rank: int, size: int
) -> None:
    if size == 1:
        pytest.skip("one rank cannot differ from itself: run under mpirun -np 2 or more")
    with pytest.raises(MismatchError) as caught:
        call(rank == size - 1)
    words = str(caught.value)
    assert hvd.allgather_object(words) == [words] * size
    for part in ("'g'", f"rank {size - 1} has", "rank 0 has", *parts):
        assert part in words
    assert float(hvd.grouped_allreduce([1.0], op=hvd.Sum, name="g")[0]) == size
