"""Every collective in process sets that overlap, its gradient, and objects and variables: only the members count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import InvalidError, MismatchError
from hvd_ext.job.process_sets import ProcessSet
from hvd_ext.tensorflow.collectives import objects
from tests.ranks.numbers import WAYS, values


@pytest.fixture(scope="module")
def sets() -> Iterator[list[ProcessSet]]:
    """The even ranks; from 3 ranks on also all but the first, which overlap with them."""
    hvd.init()
    lists = [list(range(0, hvd.size(), 2)), list(range(1, hvd.size()))]
    if hvd.size() == 2:
        lists.pop()  # [1] is for the test of a set that goes
    added = [hvd.add_process_set(ranks) for ranks in lists if 0 < len(ranks) < hvd.size()]
    yield added
    for one in added:
        hvd.remove_process_set(one)


@pytest.fixture
def mine(sets: list[ProcessSet]) -> list[ProcessSet]:
    """Those with this rank; all ranks in one job of one rank."""
    return [one for one in sets if one.included()] or ([] if sets else [hvd.global_process_set])


def x(rank: int, *shape: int, salt: int = 0) -> tf.Tensor:
    return tf.constant(values(rank, shape, salt), tf.float64)


@pytest.mark.parametrize("way", WAYS)
def test_every_collective_has_the_members_values(way: str, mine: list[ProcessSet], rank: int, size: int) -> None:
    def every(tensor: tf.Tensor, where: ProcessSet) -> dict[str, Any]:
        hvd.barrier(process_set=where)
        n, place = len(where.ranks), where.ranks.index(rank)
        grouped = hvd.grouped_allreduce([tensor, 2 * tensor], op=hvd.Sum, process_set=where)
        return {
            "sum": hvd.allreduce(tensor, op=hvd.Sum, process_set=where),
            "average": hvd.allreduce(tensor, process_set=where),
            "named": hvd.allreduce(tensor, op=hvd.Sum, name="one name", process_set=where),
            "second": grouped[1],
            "gathered": hvd.allgather(tensor[: place + 1], process_set=where),
            "each": hvd.grouped_allgather([tensor], process_set=where)[0],
            "root's": hvd.broadcast(tensor, where.ranks[-1], process_set=where),
            "rows": hvd.reducescatter(tf.tile(tensor[:1], [n, 1]), op=hvd.Sum, process_set=where),
            "to all": hvd.alltoall(tf.tile(tensor[:1], [n, 1]), process_set=where),
        }

    all_ranks = hvd.allreduce(x(rank, 9, 2), op=hvd.Sum, name="one name")
    for where in mine:
        found = WAYS[way](lambda tensor, where=where: every(tensor, where))(x(rank, 9, 2))
        theirs = [x(other, 9, 2).numpy() for other in where.ranks]
        np.testing.assert_array_equal(found["sum"], sum(theirs))
        np.testing.assert_allclose(found["average"], sum(theirs) / len(theirs), rtol=1e-15)
        np.testing.assert_array_equal(found["named"], sum(theirs))
        np.testing.assert_array_equal(found["second"], 2 * sum(theirs))
        np.testing.assert_array_equal(found["gathered"], np.concatenate([t[: i + 1] for i, t in enumerate(theirs)]))
        np.testing.assert_array_equal(found["each"], np.concatenate(theirs))
        np.testing.assert_array_equal(found["root's"], theirs[-1])
        np.testing.assert_array_equal(found["rows"], sum(theirs)[:1])
        np.testing.assert_array_equal(found["to all"], np.concatenate([t[:1] for t in theirs]))
    np.testing.assert_array_equal(all_ranks, sum(x(other, 9, 2).numpy() for other in range(size)))


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_horovods_in_all_ranks_and_in_sets(way: str, mine: list[ProcessSet], rank: int) -> None:
    """Each member's loss is the result weighed with numbers of its own; parts are of unequal length."""

    def gradients(tensor: tf.Tensor, weights: tf.Tensor, where: ProcessSet) -> dict[str, tf.Tensor]:
        calls = {
            "average": lambda t: hvd.allreduce(t, prescale_factor=2.0, process_set=where),
            "sum": lambda t: hvd.allreduce(t, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0, process_set=where),
            "allgather": lambda t: hvd.allgather(t[: where.ranks.index(rank) + 1], process_set=where),
            "broadcast": lambda t: hvd.broadcast(t, where.ranks[len(where.ranks) // 2], process_set=where),
            "reducescatter": lambda t: hvd.reducescatter(t, process_set=where, postscale_factor=2.0),
            "rows of a sum": lambda t: hvd.reducescatter(tf.concat([t, t[:1]], 0), op=hvd.Sum, process_set=where),
            "alltoall": lambda t: hvd.alltoall(t, process_set=where),
        }
        found = {}
        for name, call in calls.items():
            with tf.GradientTape() as tape:
                tape.watch(tensor)
                result = call(tensor)
                loss = tf.reduce_sum(result * weights[: tf.shape(result)[0]])
            found[name] = tape.gradient(loss, tensor)
        return found

    for where in [*mine, hvd.global_process_set] if hvd.size() > 1 else mine:
        n, place = len(where.ranks), where.ranks.index(rank)
        w = [values(other, (n * n + 1, 2), 5).astype(np.float64) for other in where.ranks]
        found = WAYS[way](lambda a, b, where=where: gradients(a, b, where))(x(rank, n, 2), tf.constant(w[place]))
        np.testing.assert_allclose(found["average"], 2 * sum(w)[:n] / n, rtol=1e-15)
        np.testing.assert_allclose(found["sum"], 2 * sum(w)[:n], rtol=1e-15)
        part, begin = place + 1, place * (place + 1) // 2
        np.testing.assert_allclose(found["allgather"][:part], sum(w)[begin : begin + part] / n, rtol=1e-15)
        assert not np.any(found["allgather"][part:])
        root = place == n // 2
        np.testing.assert_allclose(found["broadcast"], sum(w)[:n] / n if root else np.zeros((n, 2)), rtol=1e-15)
        np.testing.assert_array_equal(found["reducescatter"], 2 * np.stack([one[0] for one in w]))
        joined = n * np.stack([w[0][0], w[0][1], *(one[0] for one in w[1:])])  # the first rank has two rows
        joined[0] += joined[n]
        np.testing.assert_array_equal(found["rows of a sum"], joined[:n])
        np.testing.assert_array_equal(found["alltoall"], np.stack([one[place] for one in w]))


def test_a_gradient_after_its_set_has_gone_is_refused_in_words(rank: int, size: int) -> None:
    if size == 1:
        pytest.skip("one rank has no other set: run under mpirun -np 2 or more")
    alone = hvd.add_process_set([size - 1])
    with tf.GradientTape() as tape:
        tensor = tf.zeros((2, 1))
        tape.watch(tensor)
        result = hvd.allgather(tensor, process_set=alone) if alone.included() else tensor
    hvd.remove_process_set(alone)
    if rank == size - 1:
        with pytest.raises(InvalidError, match="since the collective ran, its process set was removed"):
            tape.gradient(result, tensor)


def test_objects_and_variables_of_a_set(mine: list[ProcessSet], rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for large, piece in ((objects.LARGE_NBYTES, objects.PIECE_NBYTES), (10, 1 << 20), (10, 7)):
        monkeypatch.setattr(objects, "LARGE_NBYTES", large)
        monkeypatch.setattr(objects, "PIECE_NBYTES", piece)
        for where in mine:
            last = where.ranks[-1]
            text = "x" * (30 if rank % 2 else 1)
            assert hvd.broadcast_object((rank, text), last, process_set=where)[0] == last
            found = hvd.allgather_object((rank, text), process_set=where)
            assert found == [(other, "x" * (30 if other % 2 else 1)) for other in where.ranks]
            variable = tf.Variable([float(rank)])
            hvd.broadcast_variables(lambda variable=variable: [variable], last, process_set=where)
            assert float(variable[0]) == last
            (value,) = hvd.broadcast_([tf.Variable([float(rank)], name="v")], where.ranks[0], process_set=where)
            assert float(value[0]) == where.ranks[0]


def test_who_is_not_a_member_may_not_call(sets: list[ProcessSet], rank: int, size: int) -> None:
    for where in sets:
        if where.included():
            with pytest.raises(InvalidError, match=rf"root_rank \({size}\): must be "):
                hvd.broadcast(1.0, size, process_set=where)
            with pytest.raises(InvalidError, match=rf"root_rank \({size}\): must be (one of the ranks|a rank, 0)"):
                hvd.broadcast_object(1, size, process_set=where)
            continue
        for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.allgather_object, hvd.grouped_allreduce):
            with pytest.raises(InvalidError, match=f"{call.__name__}: rank {rank} is not in process set"):
                call([1.0], process_set=where)
    with pytest.raises(InvalidError, match="it must be added before it is used"):
        hvd.allreduce(1.0, process_set=ProcessSet([0]))
    with pytest.raises(InvalidError, match="takes a ProcessSet"):
        hvd.allreduce(1.0, process_set=[0])


def test_a_mismatch_in_a_set_names_the_ranks_of_the_job(mine: list[ProcessSet], rank: int) -> None:
    for where in mine:
        first, last = where.ranks[0], where.ranks[-1]
        if first == last:
            continue
        with pytest.raises(MismatchError, match=rf"rank {last} has float32\[2\], rank {first} has float32\[3\]"):
            hvd.allreduce(tf.zeros(2 if rank == last else 3), name="of a set", process_set=where)
        assert float(hvd.allreduce(1.0, op=hvd.Sum, process_set=where)) == len(where.ranks)


def test_ranks_and_sizes_as_ops(sets: list[ProcessSet], rank: int, size: int) -> None:
    places = tf.function(lambda: [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()])
    assert [int(place) for place in places()] == [rank, size, hvd.local_rank(), hvd.local_size()]
    for where in sets:
        size_op = tf.function(lambda where=where: hvd.size_op(process_set_id=where.process_set_id))
        assert int(size_op()) == len(where.ranks)
    assert int(hvd.process_set_included_op(999)) == -2
    with pytest.raises(InvalidError, match="process set 999"):
        hvd.size_op(999)
    hvd.barrier()
    hvd.shutdown()
    assert int(hvd.process_set_included_op()) == -1
