"""After a call in which some ranks have nothing to send, to receive or to add, twenty calls of all kinds are right.

A rank once counted such a call as no message at all, while the others counted one: from then on the calls of the ranks
met each other's messages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from tests.ranks.conftest import LAUNCHED_SIZE

pytestmark = pytest.mark.skipif(LAUNCHED_SIZE > 4, reason="from four ranks on there are no more patterns of empty ones")

CALLS = 20


class Ranks:
    """The ranks that take part: all, or those of a process set; they make calls, of one kind after the other."""

    def __init__(self, process_set: hvd.ProcessSet | None = None) -> None:
        self.options: dict[str, Any] = {} if process_set is None else {"process_set": process_set}
        self.members = list(range(hvd.size())) if process_set is None else list(process_set.ranks)
        self.place, self.count = self.members.index(hvd.rank()), len(self.members)
        self.expected: list[Any] = []  # of the traced calls
        self.traced = tf.function(self._all_at_once, autograph=False)

    def call(self, number: int) -> tuple[tf.Tensor, Any]:
        """Make a call with values that no other rank and no other call has: the result, and what must come out."""
        every = [1000 * number + place + 1 for place in range(self.count)]
        mine, root, more = every[self.place], number % self.count, {"name": f"call {number}", **self.options}
        kinds = [
            lambda: (hvd.allreduce(tf.fill([3], float(mine)), op=hvd.Sum, **more), [sum(every)] * 3),
            lambda: (hvd.broadcast(tf.constant([mine]), self.members[root], **more), [every[root]]),
            lambda: (
                hvd.allgather(tf.fill([self.place + 1], mine), **more),
                np.repeat(every, range(1, self.count + 1)),
            ),
            lambda: (hvd.reducescatter(tf.fill([self.count], mine), op=hvd.Sum, **more), [sum(every)]),
            lambda: (hvd.alltoall(tf.fill([self.count], mine), **more), every),
        ]
        return kinds[number % len(kinds)]()

    def _all_at_once(self) -> list[tf.Tensor]:
        pairs = [self.call(number) for number in range(CALLS)]
        self.expected = [expected for _, expected in pairs]
        return [result for result, _ in pairs]


def alltoall(splits: Callable[[int, int, int], int]) -> Callable[[Ranks], None]:
    """An alltoall with the rows that go from one place to another; the third number is the last place."""

    def call(ranks: Ranks) -> None:
        places, last = range(ranks.count), ranks.count - 1
        mine = [int(splits(ranks.place, to, last)) for to in places]
        result, counts = hvd.alltoall(tf.fill([sum(mine), 2], ranks.place), mine, name="empty", **ranks.options)
        expected = [int(splits(place, ranks.place, last)) for place in places]
        np.testing.assert_array_equal(counts, expected)
        np.testing.assert_array_equal(result[:, 0], np.repeat(places, expected))

    return call


def allgather(rows: Callable[[int], int]) -> Callable[[Ranks], None]:
    """An allgather with the rows that a place has."""

    def call(ranks: Ranks) -> None:
        result = hvd.allgather(tf.fill([rows(ranks.place), 2], ranks.place), name="empty", **ranks.options)
        places = range(ranks.count)
        np.testing.assert_array_equal(result[:, 0], np.repeat(places, [rows(place) for place in places]))

    return call


def slices(ranks: Ranks) -> None:
    """A sum of slices, of which only the last rank has any."""
    last = ranks.count - 1
    n = 2 * (ranks.place == last)
    mine = tf.IndexedSlices(tf.ones([n, 3]) * (ranks.place + 1), tf.range(n), dense_shape=[5, 3])
    result = tf.convert_to_tensor(hvd.allreduce(mine, op=hvd.Sum, name="empty", **ranks.options))
    np.testing.assert_array_equal(result[:, 0], [last + 1] * 2 + [0] * 3)


def nothing(ranks: Ranks) -> None:
    """Tensors without elements, through every other kind of call."""
    assert hvd.allreduce(tf.zeros([0, 3]), name="empty sum", **ranks.options).shape == [0, 3]
    assert hvd.broadcast(tf.zeros([0]), ranks.members[0], name="empty broadcast", **ranks.options).shape == [0]
    assert hvd.reducescatter(tf.zeros([0, 2]), name="empty scatter", **ranks.options).shape == [0, 2]


PATTERNS: dict[str, Callable[[Ranks], None]] = {
    "alltoall: all empty": alltoall(lambda place, to, last: 0),
    "alltoall: the first to itself": alltoall(lambda place, to, last: 3 * (place == to == 0)),
    "alltoall: the last to itself": alltoall(lambda place, to, last: 2 * (place == to == last)),
    "alltoall: each to itself": alltoall(lambda place, to, last: place == to),
    "alltoall: the first to the last": alltoall(lambda place, to, last: 2 * (place == 0 and to == last)),
    "alltoall: the last to the first": alltoall(lambda place, to, last: 2 * (place == last and to == 0)),
    "alltoall: two of them exchange": alltoall(lambda place, to, last: {place, to} == {0, last} and place != to),
    "allgather: all empty": allgather(lambda place: 0),
    "allgather: only the first": allgather(lambda place: 3 * (place == 0)),
    "allgather: all but the first": allgather(lambda place: 2 * (place != 0)),
    "slices: only the last": slices,
    "nothing at all": nothing,
}


def eagerly(ranks: Ranks) -> list[tuple[tf.Tensor, Any]]:
    return [ranks.call(number) for number in range(CALLS)]


def in_a_function(ranks: Ranks) -> list[tuple[tf.Tensor, Any]]:
    results = ranks.traced()
    return list(zip(results, ranks.expected, strict=True))


def from_threads(ranks: Ranks) -> list[tuple[tf.Tensor, Any]]:
    results: dict[int, tuple[tf.Tensor, Any]] = {}

    def some(first: int) -> None:
        for number in range(first, CALLS, 4):
            results[number] = ranks.call(number)

    threads = [threading.Thread(target=some, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(CALLS)]


def check(pattern: str, way: Callable[[Ranks], list[tuple[tf.Tensor, Any]]], ranks: Ranks) -> None:
    PATTERNS[pattern](ranks)
    results = way(ranks)
    assert len(results) == CALLS
    for number, (result, expected) in enumerate(results):
        np.testing.assert_array_equal(result, expected, err_msg=f"call {number} after the empty one")


@pytest.fixture(scope="module")
def all_ranks() -> Ranks:
    """All ranks of the job."""
    hvd.init()
    return Ranks()


@pytest.fixture(scope="module")
def ranks_of_a_set() -> Iterator[Ranks | None]:
    """All ranks but the first, as a process set; none for a rank that is not in it, or where there is no such set."""
    hvd.init()
    members = list(range(1, hvd.size()))
    some = hvd.add_process_set(members) if members else None
    yield Ranks(some) if hvd.rank() in members else None
    if some is not None:
        hvd.remove_process_set(some)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_next_twenty_calls_are_right(pattern: str, all_ranks: Ranks) -> None:
    for way in (eagerly, in_a_function, from_threads):
        check(pattern, way, all_ranks)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_next_twenty_calls_of_a_process_set_are_right(pattern: str, ranks_of_a_set: Ranks | None) -> None:
    if ranks_of_a_set is not None:
        check(pattern, eagerly, ranks_of_a_set)
    hvd.barrier()
