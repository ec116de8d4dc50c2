"""Broadcasts of tensors, of variables and of objects, and the barrier."""

from __future__ import annotations

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import HvdExtError, InvalidError
from hvd_ext.tensorflow.collectives import objects, variables as variables_module
from hvd_ext.tensorflow.collectives.dtypes import MOVED
from tests.ranks.numbers import WAYS, eagerly_and, values


def typed(rank: int, dtype: str, shape: tuple[int, ...] = (5, 2)) -> tf.Tensor:
    return tf.cast(values(rank, shape) % 2 if dtype == "bool" else values(rank, shape), dtype)


@pytest.mark.parametrize(("way", "dtype"), eagerly_and(("bool", "float16"), MOVED))
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
    hvd.broadcast_variables([])
    hvd.broadcast_variables(iter(ours), root_rank=root)
    np.testing.assert_array_equal(ours[0], values(root, (5, 2)))
    np.testing.assert_array_equal(ours[1], values(root, (3,)))
    np.testing.assert_array_equal(tf.cast(ours[2].value, tf.int64), values(root, (2, 2)))
    np.testing.assert_array_equal(ours[3], values(root, (5, 2)) % 2 == 1)
    assert int(ours[4]) == root


def test_broadcast_in_place_gives_the_values_too(rank: int, size: int) -> None:
    variables = [tf.Variable(typed(rank, "float32")), keras.Variable(values(rank, (3,)), dtype="int64")]
    for way in WAYS.values():
        first, second = way(lambda: hvd.broadcast_(variables, size - 1, name="in place"))()
        np.testing.assert_array_equal(first, values(size - 1, (5, 2)))
        np.testing.assert_array_equal(second, values(size - 1, (3,)))
        np.testing.assert_array_equal(variables[0], first)
        variables[0].assign(typed(rank, "float32"))


def test_global_variables_exist_in_graphs_of_tensorflow_1_only() -> None:
    with pytest.raises(InvalidError, match=r"keeps no list of all variables; say which: hvd_ext\.broadcast_variables"):
        hvd.broadcast_global_variables(0)
    with pytest.raises(InvalidError, match="keeps no list"):
        tf.function(lambda: hvd.broadcast_global_variables(0), autograph=False)()


def test_objects_travel(rank: int, size: int) -> None:
    own = {"rank": rank, "array": values(rank, (3,)), "function": lambda x: x + rank}
    for root in {0, size - 1}:
        got = hvd.broadcast_object(own, root_rank=root)
        assert got["rank"] == root
        assert got["function"](10) == 10 + root
        np.testing.assert_array_equal(got["array"], values(root, (3,)))
    with pytest.raises(InvalidError, match=r"must be None or a session of tf\.compat\.v1; a name is given as name="):
        hvd.broadcast_object(own, 0, "a name")
    with pytest.raises(InvalidError, match="must be None or a session"):
        hvd.allgather_object(own, "a name")
    everybody = hvd.allgather_object(["text", rank, None])
    assert everybody == [["text", other, None] for other in range(size)]
    # Beside each other: through rank 0, and as a tensor.
    length = (200_000, objects.LARGE_NBYTES + 1)[rank % 2] + rank
    big = hvd.allgather_object(bytes([65 + rank]) * length)
    for other, one in enumerate(big):
        assert one == bytes([65 + other]) * ((200_000, objects.LARGE_NBYTES + 1)[other % 2] + other)
    large = hvd.broadcast_object(np.full(objects.LARGE_NBYTES, rank, np.uint8), size - 1)
    np.testing.assert_array_equal(large, np.full(objects.LARGE_NBYTES, size - 1, np.uint8))


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
