"""Broadcasts of tensors, of variables and of objects, and the barrier."""

from __future__ import annotations

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import HvdExtError, InvalidError
from hvd_ext.tensorflow import variables as variables_module
from hvd_ext.tensorflow.dtypes import MOVED
from tests.ranks.numbers import total, values

WAYS = {"eager": lambda function: function, "traced": tf.function}


def typed(rank: int, dtype: str, shape: tuple[int, ...] = (5, 2)) -> tf.Tensor:
    return tf.cast(values(rank, shape) % 2 if dtype == "bool" else values(rank, shape), dtype)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", MOVED)
def test_all_get_the_roots_tensor_for_every_dtype(dtype: str, way: str, rank: int, size: int) -> None:
    root = size - 1
    result = WAYS[way](lambda x: hvd.broadcast(x, root))(typed(rank, dtype))
    assert result.dtype.name == dtype
    np.testing.assert_array_equal(tf.cast(result, tf.int64), tf.cast(typed(root, dtype), tf.int64))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (300_017,)], ids=str)
def test_every_rank_can_be_the_root(shape: tuple[int, ...], rank: int, size: int) -> None:
    for root in range(size):
        result = hvd.broadcast(values(rank, shape).astype(np.float32), root)
        np.testing.assert_array_equal(result, values(root, shape))


@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_is_the_sum_on_the_root_and_zero_elsewhere(way: str, rank: int, size: int) -> None:
    root = size // 2

    def gradient(x: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(hvd.broadcast(x, root) * weights)
        return tape.gradient(loss, x)

    weights = tf.constant(values(rank, (4,), 1), tf.float64)
    result = WAYS[way](gradient)(tf.zeros(4, tf.float64), weights)
    np.testing.assert_array_equal(result, total(size, (4,), 1) if rank == root else np.zeros(4))


@pytest.mark.parametrize("piece_nbytes", [1, 64 << 20])
def test_variables_of_every_kind_get_the_roots_values(
    piece_nbytes: int, rank: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variables_module, "PIECE_NBYTES", piece_nbytes)
    root = size - 1
    ours = [
        tf.Variable(typed(rank, "float32"), name="plain"),
        keras.Variable(values(rank, (3,)), dtype="float32", name="of_keras"),
        keras.Variable(values(rank, (2, 2)), dtype="bfloat16", name="half"),
        tf.Variable(typed(rank, "bool"), name="flags"),
        keras.Variable(rank, dtype="int64", name="counter"),
        tf.Variable(tf.zeros((0, 3)), name="empty"),
    ]
    hvd.broadcast_variables(iter(ours), root_rank=root)
    np.testing.assert_array_equal(ours[0], values(root, (5, 2)))
    np.testing.assert_array_equal(ours[1], values(root, (3,)))
    np.testing.assert_array_equal(tf.cast(ours[2].value, tf.int64), values(root, (2, 2)))
    np.testing.assert_array_equal(ours[3], values(root, (5, 2)) % 2 == 1)
    assert int(ours[4]) == root


def test_variables_can_be_broadcast_inside_a_function(rank: int) -> None:
    variable = tf.Variable(typed(rank, "float32"))

    @tf.function
    def step() -> None:
        hvd.broadcast_variables([variable])

    step()
    np.testing.assert_array_equal(variable, values(0, (5, 2)))


def test_no_variables_are_broadcast_without_words() -> None:
    hvd.broadcast_variables([])


def test_objects_travel(rank: int, size: int) -> None:
    own = {"rank": rank, "array": values(rank, (3,)), "function": lambda x: x + rank}
    for root in {0, size - 1}:
        got = hvd.broadcast_object(own, root_rank=root)
        assert got["rank"] == root
        assert got["function"](10) == 10 + root
        np.testing.assert_array_equal(got["array"], values(root, (3,)))
    everybody = hvd.allgather_object(["text", rank, None])
    assert everybody == [["text", other, None] for other in range(size)]
    big = hvd.allgather_object(b"x" * (200_000 + rank))
    assert [len(one) for one in big] == [200_000 + other for other in range(size)]


def test_an_object_that_does_not_pickle_is_an_error_on_all_ranks(size: int) -> None:
    with pytest.raises(HvdExtError, match=f"the object of rank {size - 1} does not pickle"):
        hvd.broadcast_object(threading.Lock(), root_rank=size - 1)
    with pytest.raises(HvdExtError, match="the object of rank 0 does not pickle"):
        hvd.allgather_object(threading.Lock())
    assert hvd.allgather_object(1) == [1] * size


def test_a_root_that_is_no_rank_is_refused_in_words(size: int) -> None:
    for root in (-1, size, True, "0"):
        with pytest.raises(InvalidError, match=rf"root_rank \({root!r}\): must be a rank, 0 to {size - 1}"):
            hvd.broadcast(tf.zeros(3), root)
        with pytest.raises(InvalidError, match="root_rank"):
            hvd.broadcast_object(1, root)


def test_the_barrier_passes_when_all_have_come(rank: int) -> None:
    hvd.barrier()
    hvd.barrier(name="with a name")

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        hvd.barrier()
        hvd.barrier()
        return x + 1

    assert int(step(tf.constant(rank))) == rank + 1
