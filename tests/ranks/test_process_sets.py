"""Process sets: who is in them, several at once in any order, what all ranks must agree on, and their ends."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import CommunicationError, InvalidError, MismatchError, NotInitializedError
from hvd_ext.job import process_sets, runtime
from hvd_ext.job.process_sets import ProcessSet
from hvd_ext.options import Options
from hvd_ext.planning.tensors import Tensor
from hvd_ext.tensorflow.gradients import registration
from hvd_ext.tensorflow.gradients.registration import Channel
from tests.ranks.numbers import values

pytestmark = pytest.mark.ranks(1, 2, 3, 8)

SHAPES = ((7, 5), (), (3001,))


def overlapping(size: int) -> list[list[int]]:
    """Even and odd ranks, neighbours, the two ends, the last one alone: what fewer ranks leave of these, each once."""
    lists = [list(range(0, size, 2)), list(range(1, size, 2)), [0, size - 1], [size - 1]]
    lists += [[rank, rank + 1] for rank in range(0, size - 1, 1 + size // 4)]
    found = {tuple(dict.fromkeys(ranks)) for ranks in lists if ranks} - {tuple(range(size))}
    return [list(ranks) for ranks in sorted(found)]


@pytest.fixture
def added() -> Iterator[Callable[[Sequence[Sequence[int]]], list[ProcessSet]]]:
    """Adds sets, and removes them after the test."""
    made: list[ProcessSet] = []

    def add(lists: Sequence[Sequence[int]]) -> list[ProcessSet]:
        new = [hvd.add_process_set(list(ranks)) for ranks in lists]
        made.extend(new)
        return new

    yield add
    for process_set in made:
        hvd.remove_process_set(process_set)


def opened(process_set: ProcessSet) -> Channel:
    """A channel of a set that this rank is in."""
    specs = [Tensor(f"g{index}", shape, "float32") for index, shape in enumerate(SHAPES)]
    owner = process_sets.member(process_set, "test")
    return registration.open_channel(f"of {process_set.ranks}", specs, Options(op=hvd.Sum), owner=owner)


def inputs(rank: int, salt: int) -> list[tf.Tensor]:
    return [tf.constant(values(rank, shape, salt + index), tf.float32) for index, shape in enumerate(SHAPES)]


def by_hand(ranks: Sequence[int], salt: int) -> list[np.ndarray]:
    return [np.sum([values(rank, s, salt + i) for rank in ranks], axis=0) for i, s in enumerate(SHAPES)]


def test_sets_know_their_ranks_and_the_job_stays_as_it_is(rank: int, size: int, added: Callable) -> None:
    lists = overlapping(size)
    sets = added([ranks[::-1] for ranks in lists])
    everyone = hvd.global_process_set
    assert (everyone.process_set_id, everyone.ranks, everyone.rank()) == (0, list(range(size)), rank)
    assert (everyone.size(), everyone.included()) == (size, True)
    assert len({process_set.process_set_id for process_set in sets}) == len(sets)
    hosts = runtime.current().hosts
    for process_set, ranks in zip(sets, lists, strict=True):
        assert (process_set.ranks, process_set.size()) == (ranks, len(ranks))
        assert process_set.included() == (rank in ranks)
        assert process_sets.find(process_set.process_set_id) is process_set
        inside = process_sets.runtime_of(process_set)
        if rank in ranks:
            assert inside is process_sets.member(process_set, "test")
            assert (inside.engine.rank, inside.engine.size) == (ranks.index(rank), len(ranks))
            assert (process_set.rank(), inside.tree.size) == (ranks.index(rank), len(ranks))
            assert inside.hosts == tuple(hosts[other] for other in ranks)
        else:
            assert inside is None
            listed = ", ".join(str(other) for other in ranks)
            words = rf"rank {rank} is not in process set {process_set.process_set_id} \(ranks {listed}\)"
            for call in (process_set.rank, lambda s=process_set: process_sets.member(s, "rank")):
                with pytest.raises(InvalidError, match=f"rank: {words}"):
                    call()
    assert (hvd.rank(), hvd.size()) == (rank, size)
    assert process_sets.runtime_of(None) is process_sets.runtime_of(everyone) is runtime.current()


def test_sets_work_at_once_in_another_order_on_each_rank(rank: int, size: int, added: Callable) -> None:
    sets = [process_set for process_set in added(overlapping(size)) if process_set.included()]
    channels = [opened(process_set) for process_set in sets]
    everyone = registration.open_channel("all", [Tensor("g", (11,), "float32")], Options(op=hvd.Sum))
    order = list(range(len(sets)))
    random.Random(rank).shuffle(order)

    @tf.function
    def step(salt: tf.Tensor, *gradients: tf.Tensor) -> list[tf.Tensor]:
        results = {at: channels[at].reduce([g + tf.cast(salt, g.dtype) for g in gradients]) for at in order}
        total = everyone.reduce([tf.fill([11], tf.cast(salt + rank, tf.float32))])
        return [total[0], *(tensor for at in range(len(sets)) for tensor in results[at])]

    for salt in range(3):
        total, *results = step(tf.constant(salt), *inputs(rank, 1))
        np.testing.assert_array_equal(total, np.full(11, size * salt + size * (size - 1) // 2))
        for at, process_set in enumerate(sets):
            for result, expected in zip(results[at * len(SHAPES) :], by_hand(process_set.ranks, 1), strict=False):
                np.testing.assert_array_equal(result, expected + salt * len(process_set.ranks))
    for channel in (*channels, everyone):
        channel.close()


def test_a_set_works_while_others_come_and_go(rank: int, size: int, added: Callable) -> None:
    if size == 1:
        pytest.skip("one rank has no sets but the global one")
    (lasting,) = added([list(range(1, size))])
    heard: list[list[bytes]] = []

    def work() -> None:
        engine = process_sets.member(lasting, "work").engine
        heard.extend(engine.exchange("beside", b"%d" % (rank * 100 + turn)) for turn in range(30))

    beside = threading.Thread(target=work if lasting.included() else lambda: None)
    beside.start()
    for turn in range(4):
        passing = hvd.add_process_set([0, size - 1] if size > 2 else [0])
        if passing.included():
            answers = process_sets.member(passing, "test").engine.exchange("passing", b"%d" % (rank + turn))
            assert answers == [b"%d" % (other + turn) for other in passing.ranks]
        number = passing.process_set_id
        assert hvd.remove_process_set(passing)
        assert (passing.process_set_id, passing.size(), passing.rank()) == (None, None, None)
        assert not hvd.remove_process_set(passing)
        with pytest.raises(InvalidError, match="must be added before it is used: call add_process_set"):
            process_sets.member(passing, "test")
        with pytest.raises(InvalidError, match=f"process set {number}: it has not been added; the sets are 0, "):
            process_sets.find(number)
    beside.join()
    expected = [[b"%d" % (other * 100 + turn) for other in lasting.ranks] for turn in range(30)]
    assert heard == (expected if lasting.included() else [])


def test_what_belongs_to_a_removed_set_is_refused_in_words(size: int, rank: int) -> None:
    if size == 1:
        pytest.skip("one rank has no sets but the global one")
    process_set = hvd.add_process_set([size - 1])
    if process_set.included():
        channel = opened(process_set)
        step = tf.function(channel.reduce)
        np.testing.assert_array_equal(step(inputs(rank, 0))[0], by_hand([rank], 0)[0])
    hvd.remove_process_set(process_set)
    if rank == size - 1:
        with pytest.raises(tf.errors.AbortedError, match="an engine that has been shut down, with the job or with its"):
            step(inputs(rank, 0))
    hvd.barrier()


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([], "it must have at least one rank"),
        ([0, 0], "rank 0 is listed again"),
        ([-1], "ranks must not be negative"),
        ([0, 99], r"must be ranks of the job, 0 \.\. \d; rank 99 is not"),
        ([0.5], "its ranks must be whole numbers"),
        ("01", "takes a list of ranks or a communicator of mpi4py"),
        (0, "takes a list of ranks or a communicator of mpi4py"),
    ],
)
def test_wrong_ranks_are_refused_on_all_ranks(ranks: object, words: str, rank: int, size: int) -> None:
    for culprits in (range(size), [size - 1]):
        with pytest.raises(InvalidError, match=words):
            hvd.add_process_set(ranks if rank in culprits else [0])
    if size > 1:
        assert hvd.remove_process_set(hvd.add_process_set([0]))


def test_no_two_sets_have_the_same_ranks(size: int, added: Callable) -> None:
    with pytest.raises(InvalidError, match="the global process set has the same ranks"):
        hvd.add_process_set(range(size))
    with pytest.raises(InvalidError, match="the global process set has the same ranks"):
        hvd.add_process_set(hvd.global_process_set)
    assert not hvd.remove_process_set(hvd.global_process_set)
    for process_set in added(overlapping(size)):
        for again in (process_set, list(process_set.ranks)):
            with pytest.raises(InvalidError, match=f"process set {process_set.process_set_id} has the same ranks"):
                hvd.add_process_set(again)
    with pytest.raises(InvalidError, match=r"remove_process_set \(\[0\]\): takes a ProcessSet, got list"):
        hvd.remove_process_set([0])  # type: ignore[arg-type]
    with pytest.raises(InvalidError, match=r"process_set \(\[0\]\): takes a ProcessSet or None, got list"):
        process_sets.runtime_of([0])  # type: ignore[arg-type]


def test_a_set_is_what_horovods_is(size: int, added: Callable) -> None:
    process_set = ProcessSet(ranks_or_comm=(0,))
    assert process_set.ranks == [0]
    assert str(process_set) == "ProcessSet(process_set_id=None, ranks=[0], mpi_comm=None)"
    process_set.ranks.append(1)  # a copy
    assert process_set.ranks == [0]
    assert hvd.global_process_set.ranks == list(range(size))
    assert hvd.global_process_set.mpi_comm is None


def test_each_rank_gives_the_communicator_that_it_is_in(rank: int, size: int) -> None:
    if size == 1:
        pytest.skip("one rank is all ranks")
    MPI = pytest.importorskip("mpi4py.MPI", reason="needs mpi4py: python -m pip install mpi4py")  # noqa: N806
    world = MPI.COMM_WORLD
    split = world.Split(rank % 2, rank)
    mine = hvd.add_process_set(ProcessSet(split))
    assert mine.ranks == list(range(rank % 2, size, 2))
    assert mine.mpi_comm is split
    assert mine.included()
    assert float(hvd.allreduce(float(rank), op=hvd.Sum, process_set=mine)) == sum(mine.ranks)
    assert hvd.allgather_object(mine.process_set_id, process_set=mine) == [mine.process_set_id] * len(mine.ranks)
    later = mine.process_set_id + 1 if rank % 2 == 0 else mine.process_set_id  # the odd ranks' is the second
    assert hvd.allgather_object(later) == [later] * size
    with pytest.raises(InvalidError, match="has the same ranks"):
        hvd.add_process_set(split)
    backwards = world.Split(0, -rank)
    with pytest.raises(InvalidError, match="it must have its ranks in MPI's order"):
        ProcessSet(backwards)
    with pytest.raises(InvalidError, match="only the ranks of a communicator pass it"):
        ProcessSet(MPI.COMM_NULL)
    hvd.barrier()
    hvd.shutdown()
    first = world.Split(0 if rank == 0 else MPI.UNDEFINED, rank)
    own = [ProcessSet(first)] if rank == 0 else []
    hvd.init(world, [*own, *([ProcessSet([1])] if size > 1 else [])])
    assert hvd.global_process_set.mpi_comm is world
    assert [one.process_set_id for one in own] == [1] * len(own)
    assert process_sets.find(1).ranks == [0]
    assert process_sets.find(2).ranks == [1]
    hvd.shutdown()
    if size > 2:  # given by one of its two ranks
        pair = world.Split(0 if rank < 2 else MPI.UNDEFINED, rank)
        with pytest.raises(MismatchError, match="rank 0 gave one of ranks 0, 1, rank 1 did not"):
            hvd.init(process_sets=[ProcessSet(pair)] if rank == 0 else [])
    hvd.init()


def test_ranks_that_disagree_all_get_an_error_and_the_next_call_works(rank: int, size: int, added: Callable) -> None:
    if size == 1:
        pytest.skip("one rank agrees with itself")
    with pytest.raises(MismatchError, match=r"ranks must be the same on all ranks; rank 1 has \[\[1\]\]"):
        hvd.add_process_set([min(rank, 1)])
    (first,) = added([[0]])
    with pytest.raises(MismatchError, match="call must be the same on all ranks; rank 1 has 'remove_process_set'"):
        hvd.remove_process_set(first) if rank == 1 else hvd.add_process_set([1])
    (second,) = added([[1]])
    with pytest.raises(MismatchError, match="process set must be the same on all ranks"):
        hvd.remove_process_set(second if rank == 1 else first)
    assert hvd.remove_process_set(second)
    if size > 2:
        assert hvd.remove_process_set(hvd.add_process_set([1, 2]))


def test_ranks_of_a_set_are_named_by_their_numbers_in_the_job(rank: int, size: int) -> None:
    if size == 1:
        pytest.skip("one rank waits for nobody")
    process_set = hvd.add_process_set([size - 2, size - 1]) if size > 2 else hvd.add_process_set([1])
    leaves = threading.Thread(target=lambda: process_sets.member(process_set, "test").engine.stop())
    if size > 2 and process_set.included():
        engine = process_sets.member(process_set, "test").engine
        specs = [Tensor("g", (1 + rank // (size - 1),), "float32")]
        words = rf"rank {size - 1} has float32\[2\], rank {size - 2} has float32\[1\]"
        with pytest.raises(MismatchError, match=words):
            registration.open_channel("x", specs, owner=process_sets.member(process_set, "test"))
        if rank == size - 1:
            leaves.start()
        else:
            with pytest.raises(CommunicationError, match=f"rank {size - 1} has shut down"):
                engine.exchange("late", b"")
    assert hvd.remove_process_set(process_set)
    if leaves.ident is not None:
        leaves.join()
    assert hvd.allgather_object(rank) == list(range(size))


def test_sets_end_with_the_job_and_init_adds_them(rank: int, size: int) -> None:
    sets = [ProcessSet(ranks) for ranks in overlapping(size)]
    hvd.barrier()
    hvd.shutdown()
    for wrong, words in (
        ("some", "takes a list of ProcessSet, or 'dynamic'"),
        ([[0]], "takes ProcessSet objects"),
        ([ProcessSet([0]), ProcessSet([0])], "has the same ranks"),
    ):
        with pytest.raises(InvalidError, match=words):
            hvd.init(process_sets=wrong)  # type: ignore[arg-type]
        assert not hvd.is_initialized()
    for _ in range(2):
        hvd.init(process_sets=sets)
        assert [process_set.process_set_id for process_set in sets] == list(range(1, len(sets) + 1))
        for process_set in sets:
            if process_set.included():
                answers = process_sets.member(process_set, "test").engine.exchange("here", b"%d" % rank)
                assert answers == [b"%d" % other for other in process_set.ranks]
        if sets:
            with pytest.raises(InvalidError, match="hvd_ext is running already"):
                hvd.init(process_sets=sets)
        hvd.barrier()
        hvd.shutdown()
        assert {process_set.process_set_id for process_set in sets} <= {None}
        assert not hvd.remove_process_set(ProcessSet([0]))
        for call in (lambda: hvd.add_process_set([0]), ProcessSet([0]).included, lambda: process_sets.find(0)):
            with pytest.raises(NotInitializedError, match="is not running"):
                call()
    hvd.init(process_sets="dynamic")
    if sets:
        with pytest.raises(InvalidError, match="must be added before it is used"):
            process_sets.runtime_of(sets[0])
