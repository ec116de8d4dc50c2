"""Lowering of the calls of sparse plans: messages of entries, and local rows between them.

All calls of a level are lowered together, because a rank sends the data of several neighbouring calls to a peer as one
message. Otherwise two hosts would exchange two messages where the border of a third host's shards cuts a range that
they share. In a two_shot such a border divides the pieces, which are then messages of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hvd_ext.planning import ir
from hvd_ext.planning.ir import BEGIN, COUNT, OPCODE, PEER, ROUND, Rows
from hvd_ext.planning.model import Call, Span

# The rounds of each kind of call; a sparse_broadcast has two rounds for each step.
_ROUNDS = {
    "select": 1,
    "fold": 1,
    "scatter": 1,
    "sparse_allreduce": 2,
    "sparse_all_gather": 3,
    "sparse_merge": 2,
}


class _Row(NamedTuple):
    """A row before merging. `place` is the place of the vector's origin in its group, which orders the local rows."""

    round: int
    place: int
    opcode: int
    peer: int
    begin: int
    units: int


def rounds_of_sparse_call(call: Call) -> int:
    """The number of rounds of one call of a sparse plan; messages and local rows are in separate rounds."""
    if call.kind == "sparse_broadcast":
        return 2 * (len(call.ranks) - 1).bit_length()
    return 4 if call.method == "two_shot" else _ROUNDS[call.kind]


def sparse_rows(calls: Sequence[Call], rank: int) -> Rows:
    """Makes the rows of one rank in the sparse calls of one level.

    Args:
        calls: the calls in which the rank takes part, of kinds in model.LOCAL and model.SPARSE.

    Returns:
        int64 [n, 5], with rounds counted from 0. The local rows of a round are in the order in which they run: first
        CLEAR, then the vectors in the order of their groups. A rank sends first to the next place of its group and then
        goes around, so that not all members send to the first one at once.
    """
    made = sorted(row for call in calls for row in _OF_KIND[call.kind](call, rank) if row.units)
    merged: list[_Row] = []
    for row in made:
        last = merged[-1] if merged else None
        if last and last[:4] == row[:4] and last.begin + last.units == row.begin:
            merged[-1] = last._replace(units=last.units + row.units)
        else:
            merged.append(row)
    ahead = _ahead(calls, rank)

    def order(row: _Row) -> tuple[int, ...]:
        sends = row.opcode == ir.SEND_SPARSE
        return (row.round, ahead[row.peer], row.peer, row.begin) if sends else (row.round, 0)

    merged.sort(key=order)
    rows = np.empty((len(merged), 5), dtype=np.int64)
    if merged:
        table = np.array(merged, dtype=np.int64)
        rows[:, [ROUND, OPCODE, PEER, BEGIN, COUNT]] = table[:, [0, 2, 3, 4, 5]]
    return rows


def _ahead(calls: Sequence[Call], rank: int) -> dict[int, int]:
    """The least number of places by which each peer is ahead of a rank.

    There is one number for each peer, so that two messages to one peer stay in the order of their units.
    """
    ahead: dict[int, int] = {}
    for call in calls:
        place_of_rank, size = call.ranks.index(rank), len(call.ranks)
        for place, peer in enumerate(call.ranks):
            ahead[peer] = min(ahead.get(peer, size), (place - place_of_rank) % size)
    return ahead


def _select(call: Call, rank: int) -> Iterator[_Row]:
    opcode = ir.SELECT if call.kind == "select" else ir.FOLD
    yield _Row(0, 0, opcode, rank, call.spans[0].begin, call.spans[0].count)


def _scatter(call: Call, rank: int) -> Iterator[_Row]:
    span = call.spans[0]
    yield _Row(0, -1, ir.CLEAR, rank, span.begin, span.count)
    yield _Row(0, 0, ir.SCATTER_ADD, rank, span.begin, span.count)


def _allreduce(call: Call, rank: int) -> Iterator[_Row]:
    begin, count = call.spans[0].begin, call.spans[0].count
    place_of_rank = call.ranks.index(rank)
    if call.method == "two_shot":
        yield from _two_shot(call.ranks, place_of_rank, pieces(call))
        return
    yield _Row(1, -1, ir.CLEAR, rank, begin, count)
    for place, peer in enumerate(call.ranks):
        if peer != rank:
            yield _Row(0, place_of_rank, ir.SEND_SPARSE, peer, begin, count)
            yield _Row(0, place, ir.RECV_SPARSE, peer, begin, count)
        yield _Row(1, place, ir.SCATTER_ADD, peer, begin, count)


def pieces(call: Call) -> list[Span]:
    """The pieces that the ranks of a two_shot add up, in the order of the group."""
    begin, count, size = call.spans[0].begin, call.spans[0].count, len(call.ranks)
    borders = [begin + place * count // size for place in range(size + 1)]
    return [Span(first, last - first) for first, last in itertools.pairwise(borders)]


def _two_shot(ranks: Sequence[int], place_of_rank: int, spans: Sequence[Span]) -> Iterator[_Row]:
    rank, own = ranks[place_of_rank], spans[place_of_rank]
    yield _Row(1, -1, ir.CLEAR, rank, own.begin, own.count)
    yield _Row(1, len(ranks), ir.RESELECT, rank, own.begin, own.count)
    for place, (peer, span) in enumerate(zip(ranks, spans, strict=True)):
        yield _Row(1, place, ir.SCATTER_ADD, peer, own.begin, own.count)
        yield _Row(3, -1, ir.CLEAR, rank, span.begin, span.count)
        yield _Row(3, place, ir.SCATTER_ADD, peer, span.begin, span.count)
        if peer != rank:
            yield _Row(0, place_of_rank, ir.SEND_SPARSE, peer, span.begin, span.count)
            yield _Row(0, place, ir.RECV_SPARSE, peer, own.begin, own.count)
            yield _Row(2, place_of_rank, ir.SEND_SPARSE, peer, own.begin, own.count)
            yield _Row(2, place, ir.RECV_SPARSE, peer, span.begin, span.count)


def _all_gather(call: Call, rank: int) -> Iterator[_Row]:
    place_of_rank = call.ranks.index(rank)
    shard = call.spans[place_of_rank]
    yield _Row(0, place_of_rank, ir.PACK, rank, shard.begin, shard.count)
    for place, (peer, span) in enumerate(zip(call.ranks, call.spans, strict=True)):
        if peer != rank:
            yield _Row(1, place_of_rank, ir.SEND_SPARSE, peer, shard.begin, shard.count)
            yield _Row(1, place, ir.RECV_SPARSE, peer, span.begin, span.count)
            yield _Row(2, -1, ir.CLEAR, rank, span.begin, span.count)
            yield _Row(2, place, ir.SCATTER_ADD, peer, span.begin, span.count)


def _merge(call: Call, rank: int) -> Iterator[_Row]:
    receiver, sender = call.ranks
    begin, count = call.spans[0].begin, call.spans[0].count
    if rank == sender:
        yield _Row(0, 1, ir.SEND_SPARSE, receiver, begin, count)
    else:
        yield _Row(0, 1, ir.RECV_SPARSE, sender, begin, count)
        yield _Row(1, 1, ir.MERGE, sender, begin, count)


def _broadcast(call: Call, rank: int) -> Iterator[_Row]:
    """The rows of a binomial tree that starts at the root; each step halves the distance."""
    begin, count = call.spans[0].begin, call.spans[0].count
    size, root = len(call.ranks), call.ranks.index(call.root)
    behind = (call.ranks.index(rank) - root) % size
    steps = (size - 1).bit_length()
    for step in range(steps):
        half = 1 << (steps - 1 - step)
        if behind % (2 * half) == 0 and behind + half < size:
            peer = call.ranks[(root + behind + half) % size]
            yield _Row(2 * step, 0, ir.SEND_SPARSE, peer, begin, count)
        elif behind % (2 * half) == half:
            peer = call.ranks[(root + behind - half) % size]
            yield _Row(2 * step, 0, ir.RECV_SPARSE, peer, begin, count)
            yield _Row(2 * step + 1, 0, ir.TAKE, peer, begin, count)


_OF_KIND = {
    "select": _select,
    "fold": _select,
    "scatter": _scatter,
    "sparse_allreduce": _allreduce,
    "sparse_all_gather": _all_gather,
    "sparse_merge": _merge,
    "sparse_broadcast": _broadcast,
}
