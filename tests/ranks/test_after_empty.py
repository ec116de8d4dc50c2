"""After a call in which some ranks have nothing to send, to receive or to add, twenty calls of all kinds are right.

A rank once counted such a call as no message at all, while the others counted one: from then on the calls of the ranks
met each other's messages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.job.process_sets import ProcessSet
from tests.ranks.conftest import LAUNCHED_SIZE

pytestmark = pytest.mark.skipif(LAUNCHED_SIZE > 4, reason="from four ranks on there are no more patterns of empty ones")

CALLS = 20


def value(rank: int, call: int) -> int:
    """What a rank gives to a call: different for any two of both."""
    return 1000 * call + rank + 1


class Ranks:
    """The ranks that take part: all, or those of a process set; how each call is made, and what must come out."""

    def __init__(self, process_set: ProcessSet | None = None) -> None:
        self.options = {} if process_set is None else {"process_set": process_set}
        self.ranks = list(range(hvd.size())) if process_set is None else list(process_set.ranks)
        self.place = self.ranks.index(hvd.rank())
        self.expected: list[object] = []  # of the traced calls
        self.traced = tf.function(self._all_at_once)

    def allreduce(self, call: int) -> tuple[tf.Tensor, object]:
        x = tf.constant([float(value(self.place, call))] * 3)
        expected = [float(sum(value(p, call) for p in range(len(self.ranks))))] * 3
        return hvd.allreduce(x, op=hvd.Sum, name=f"allreduce{call}", **self.options), expected

    def broadcast(self, call: int) -> tuple[tf.Tensor, object]:
        root = call % len(self.ranks)
        x = tf.constant([value(self.place, call)], tf.int64)
        return hvd.broadcast(x, self.ranks[root], name=f"broadcast{call}", **self.options), [value(root, call)]

    def allgather(self, call: int) -> tuple[tf.Tensor, object]:
        x = tf.fill([self.place + 1], tf.constant(value(self.place, call), tf.int32))
        expected = [value(p, call) for p in range(len(self.ranks)) for _ in range(p + 1)]
        return hvd.allgather(x, name=f"allgather{call}", **self.options), expected

    def reducescatter(self, call: int) -> tuple[tf.Tensor, object]:
        x = tf.fill([len(self.ranks)], tf.constant(value(self.place, call), tf.int64))
        expected = [sum(value(p, call) for p in range(len(self.ranks)))]
        return hvd.reducescatter(x, op=hvd.Sum, name=f"reducescatter{call}", **self.options), expected

    def alltoall(self, call: int) -> tuple[tf.Tensor, object]:
        x = tf.fill([len(self.ranks)], tf.constant(value(self.place, call), tf.int64))
        expected = [value(p, call) for p in range(len(self.ranks))]
        return hvd.alltoall(x, name=f"alltoall{call}", **self.options), expected

    def all_kinds(self, call: int) -> tuple[tf.Tensor, object]:
        """Make the call of this number, of one kind after the other."""
        kinds = (self.allreduce, self.broadcast, self.allgather, self.reducescatter, self.alltoall)
        return kinds[call % len(kinds)](call)

    def _all_at_once(self) -> list[tf.Tensor]:
        pairs = [self.all_kinds(call) for call in range(CALLS)]
        self.expected = [pair[1] for pair in pairs]
        return [pair[0] for pair in pairs]


def alltoall(splits: Callable[[int, int], list[int]]) -> Callable[[Ranks], None]:
    """An alltoall with the splits that a rank (its place, the number of ranks) has."""

    def call(ranks: Ranks) -> None:
        size = len(ranks.ranks)
        mine = splits(ranks.place, size)
        result, counts = hvd.alltoall(tf.fill([sum(mine), 2], ranks.place), mine, name="empty", **ranks.options)
        expected = [splits(p, size)[ranks.place] for p in range(size)]
        np.testing.assert_array_equal(counts, expected)
        np.testing.assert_array_equal(result[:, 0], np.repeat(np.arange(size), expected))

    return call


def allgather(rows: Callable[[int], int]) -> Callable[[Ranks], None]:
    """An allgather with the rows that a rank has."""

    def call(ranks: Ranks) -> None:
        result = hvd.allgather(tf.fill([rows(ranks.place), 2], ranks.place), name="empty", **ranks.options)
        size = len(ranks.ranks)
        np.testing.assert_array_equal(result[:, 0], np.repeat(np.arange(size), [rows(p) for p in range(size)]))

    return call


def slices(ranks: Ranks) -> None:
    """A sum of slices, of which only the last rank has any."""
    last = len(ranks.ranks) - 1
    n = 2 * (ranks.place == last)
    mine = tf.IndexedSlices(tf.ones([n, 3]) * (ranks.place + 1), tf.range(n), dense_shape=[5, 3])
    result = tf.convert_to_tensor(hvd.allreduce(mine, op=hvd.Sum, name="empty", **ranks.options))
    np.testing.assert_array_equal(result[:, 0], [last + 1] * 2 + [0] * 3)


def nothing(ranks: Ranks) -> None:
    """Tensors without elements, through every other kind of call."""
    assert hvd.allreduce(tf.zeros([0, 3]), name="empty sum", **ranks.options).shape == [0, 3]
    assert hvd.broadcast(tf.zeros([0]), ranks.ranks[0], name="empty broadcast", **ranks.options).shape == [0]
    assert hvd.reducescatter(tf.zeros([0, 2]), name="empty scatter", **ranks.options).shape == [0, 2]


PATTERNS: dict[str, Callable[[Ranks], None]] = {
    "alltoall: all empty": alltoall(lambda p, size: [0] * size),
    "alltoall: the first to itself": alltoall(lambda p, size: [3 * (p == 0 and to == 0) for to in range(size)]),
    "alltoall: the last to itself": alltoall(lambda p, size: [2 * (p == to == size - 1) for to in range(size)]),
    "alltoall: each to itself": alltoall(lambda p, size: [int(p == to) for to in range(size)]),
    "alltoall: the first to the last": alltoall(
        lambda p, size: [2 * (p == 0 and to == size - 1) for to in range(size)]
    ),
    "alltoall: the last to the first": alltoall(
        lambda p, size: [2 * (p == size - 1 and to == 0) for to in range(size)]
    ),
    "alltoall: two of them exchange": alltoall(
        lambda p, size: [int({p, to} == {0, size - 1} and p != to) for to in range(size)]
    ),
    "allgather: all empty": allgather(lambda p: 0),
    "allgather: only the first": allgather(lambda p: 3 * (p == 0)),
    "allgather: all but the first": allgather(lambda p: 2 * (p != 0)),
    "slices: only the last": slices,
    "nothing at all": nothing,
}


@pytest.fixture(scope="module")
def ranks_of_a_set() -> Iterator[Ranks | None]:
    """All ranks but the first, as a process set; none for a rank that is not in it, or where there is no such set."""
    hvd.init()
    members = list(range(1, hvd.size()))
    some = hvd.add_process_set(members) if members else None
    yield Ranks(some) if hvd.rank() in members else None
    if some is not None:
        hvd.remove_process_set(some)


def check(results: list[tuple[tf.Tensor, object]]) -> None:
    for call, (result, expected) in enumerate(results):
        np.testing.assert_array_equal(result, expected, err_msg=f"call {call} after the empty one")


def eagerly(ranks: Ranks) -> list[tuple[tf.Tensor, object]]:
    return [ranks.all_kinds(call) for call in range(CALLS)]


def in_a_function(ranks: Ranks) -> list[tuple[tf.Tensor, object]]:
    results = ranks.traced()
    return list(zip(results, ranks.expected, strict=True))


def from_threads(ranks: Ranks) -> list[tuple[tf.Tensor, object]]:
    results: list[tuple[tf.Tensor, object] | None] = [None] * CALLS

    def some(first: int) -> None:
        for call in range(first, CALLS, 4):
            results[call] = ranks.all_kinds(call)

    threads = [threading.Thread(target=some, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [result for result in results if result is not None]


WAYS = {"eager": eagerly, "function": in_a_function, "threads": from_threads}


@pytest.fixture(scope="module")
def all_ranks() -> Ranks:
    """All ranks of the job."""
    hvd.init()
    return Ranks()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_next_twenty_calls_are_right(pattern: str, all_ranks: Ranks) -> None:
    ranks = all_ranks
    for way in WAYS.values():
        PATTERNS[pattern](ranks)
        results = way(ranks)
        assert len(results) == CALLS
        check(results)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_next_twenty_calls_of_a_process_set_are_right(pattern: str, ranks_of_a_set: Ranks | None) -> None:
    if ranks_of_a_set is not None:
        PATTERNS[pattern](ranks_of_a_set)
        check(eagerly(ranks_of_a_set))
    hvd.barrier()
