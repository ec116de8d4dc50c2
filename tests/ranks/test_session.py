"""Graphs and sessions of TensorFlow 1: collectives, their gradients, tapes, variables and objects."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import InvalidError, NotInitializedError
from hvd_ext.tensorflow.collectives import objects
from tests.ranks.numbers import total, values

pytestmark = pytest.mark.ranks(1, 2)

v1 = tf.compat.v1


def test_every_collective_runs_in_a_session_again_and_again(rank: int, size: int) -> None:
    with tf.Graph().as_default():
        x, anything = v1.placeholder(tf.float32, [None, 2]), v1.placeholder(tf.float32, None)
        results = {
            "allreduce": hvd.allreduce(x, op=hvd.Sum),
            "unknown": hvd.allreduce(anything, op=hvd.Sum),
            "allgather": hvd.allgather(x),
            "broadcast": hvd.broadcast(x, size - 1),
            "reducescatter": hvd.reducescatter(x, op=hvd.Sum),
            "alltoall": hvd.alltoall(x),
            "splits": hvd.alltoall(x, [1] * size)[0],
            "grouped": hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum)[1],
            "grouped_allgather": hvd.grouped_allgather([x, 2 * x])[1],
            "grouped_reducescatter": hvd.grouped_reducescatter([x, 2 * x], op=hvd.Sum)[1],
        }
        done = hvd.barrier()
        with v1.Session() as session:
            for salt in range(3):
                every = [values(other, (size, 2), salt) for other in range(size)]
                found = session.run(results, {x: every[rank], anything: values(rank, (3,), salt)})
                session.run(done)
                mine = np.stack([one[rank] for one in every])
                for name, expected in {
                    "allreduce": sum(every),
                    "unknown": total(size, (3,), salt),
                    "allgather": np.concatenate(every),
                    "broadcast": every[-1],
                    "reducescatter": sum(every)[rank : rank + 1],
                    "alltoall": mine,
                    "splits": mine,
                    "grouped": 2 * sum(every),
                    "grouped_allgather": 2 * np.concatenate(every),
                    "grouped_reducescatter": 2 * sum(every)[rank : rank + 1],
                }.items():
                    np.testing.assert_array_equal(found[name], expected, err_msg=name)


@pytest.mark.parametrize("way", ["session", "function"])
def test_rows_of_unknown_shape_are_reduced(way: str, rank: int, size: int) -> None:
    def reduced(rows: tf.Tensor, indices: tf.Tensor) -> list[tf.Tensor]:
        floats = hvd.allreduce(tf.IndexedSlices(rows, indices), op=hvd.Sum)
        (whole,) = hvd.grouped_allreduce([tf.IndexedSlices(tf.cast(rows, tf.int32), indices)])
        return [floats.values, floats.indices, whole.values]

    rows, indices = np.array([[1.0, 2.0], [4.0, 8.0]], np.float32) * (rank + 1), np.array([rank, 0])
    if way == "session":
        with tf.Graph().as_default(), v1.Session() as session:
            given = v1.placeholder(tf.float32, None), v1.placeholder(tf.int64, None)
            found = session.run(reduced(*given), dict(zip(given, (rows, indices), strict=True)))
    else:
        signature = [tf.TensorSpec(None, tf.float32), tf.TensorSpec(None, tf.int64)]
        found = [one.numpy() for one in tf.function(reduced, input_signature=signature)(rows, indices)]
    expected = np.zeros((size, 2))
    for other in range(size):
        expected[other] += np.array([1, 2]) * (other + 1)
        expected[0] += np.array([4, 8]) * (other + 1)
    np.testing.assert_array_equal(found[0], expected)
    np.testing.assert_array_equal(found[1], range(size))
    np.testing.assert_allclose(found[2], expected / size, rtol=1e-15)
    assert found[2].dtype == np.float64


def test_the_gradients_of_many_broadcasts_in_one_graph_wait_for_nobody(rank: int, size: int) -> None:
    count = 20

    def gradient(number: int) -> tf.Tensor:
        x = tf.fill([3], float(rank + number))
        return tf.gradients(hvd.broadcast(x, number % size), x, tf.fill([3], float(size * number * (rank + 1))))[0]

    with tf.Graph().as_default(), v1.Session() as session:
        results = session.run([gradient(number) for number in range(count)])
        alone = session.run([gradient(number) for number in range(count)][1])  # nothing but this one is run
    everybody = size * (size + 1) // 2
    for number, result in enumerate([*results, alone]):
        number = number if number < count else 1
        np.testing.assert_array_equal(result, [number * everybody if rank == number % size else 0] * 3)


def test_a_tape_needs_no_variable_that_a_session_has_not_initialised(rank: int, size: int) -> None:
    with tf.Graph().as_default():
        v = v1.get_variable("v", initializer=tf.constant([1.0, 2.0]) * (rank + 1))
        w = v1.get_variable("w", initializer=tf.constant([3.0, 5.0]))
        initializer = v1.global_variables_initializer()
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(v * w * (rank + 1))
            gradients = hvd.DistributedGradientTape(tape).gradient(loss, [v, w])
        same = hvd.broadcast_global_variables(size - 1)
        assert v1.global_variables() == [v, w]
        with v1.Session() as session:
            session.run(initializer)
            for _ in range(2):
                np.testing.assert_allclose(session.run(gradients[0]), np.array([3, 5]) * (size + 1) / 2)
            session.run(same)
            np.testing.assert_array_equal(session.run(v), np.array([1, 2]) * size)
            np.testing.assert_allclose(session.run(gradients)[1], np.array([1, 2]) * size * (size + 1) / 2)


def test_large_objects_travel_while_a_graph_is_built(rank: int, size: int) -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        large = bytes([rank]) * objects.LARGE_NBYTES
        assert hvd.broadcast_object(large, size - 1, session) == bytes([size - 1]) * objects.LARGE_NBYTES
        every = hvd.allgather_object(large, session)
    assert [one[:1] for one in every] == [bytes([other]) for other in range(size)]


def test_ranks_that_differ_hear_it_from_the_session(rank: int, size: int) -> None:
    if size == 1:
        pytest.skip("one rank agrees with itself")
    with tf.Graph().as_default(), v1.Session() as session:
        odd = hvd.broadcast(tf.zeros(4 if rank == size - 1 else 3), 0, name="odd")
        with pytest.raises(tf.errors.FailedPreconditionError, match=rf"'odd'.*rank {size - 1} has float32\[4\]"):
            session.run(odd)
        assert session.run(hvd.allreduce(tf.constant(2.0))) == 2


def test_what_a_graph_asks_for_before_init_is_there_after_it_or_refused(rank: int) -> None:
    hvd.barrier()
    hvd.shutdown()
    with tf.Graph().as_default(), v1.Session() as session:
        number = hvd.rank_op()
        with pytest.raises(NotInitializedError, match="is not running"):
            hvd.allreduce(tf.zeros(3))
        hvd.init()
        assert session.run(number) == rank


def test_what_is_refused_says_what_to_do_instead() -> None:
    with pytest.raises(InvalidError, match=r"optimizers of tf\.compat\.v1 are not supported; .* hvd_ext\.allreduce"):
        hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.1))
    with pytest.raises(AttributeError, match=r"make hvd_ext\.broadcast_global_variables\(root_rank\) in the graph"):
        hvd.BroadcastGlobalVariablesHook  # noqa: B018
