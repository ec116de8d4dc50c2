"""The messages and the work of the calls of sparse plans, without their rows, for the prices of levels.py."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hvd_ext.planning.cost.sparse import ELEMENT_NBYTES, Sparsity
from hvd_ext.planning.lower import rounds_of_call
from hvd_ext.planning.lower_sparse import pieces
from hvd_ext.planning.model import LOCAL, SPARSE, Call, Level, LogicalPlan

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


def vectors_at(plan: LogicalPlan) -> list[int]:
    """The number of selections in a vector at each level.

    It is 1 up to the sparse_allreduce, and after it the number of ranks in its largest group.
    """
    vectors, current = [], 1
    for level in plan.levels:
        vectors.append(current)
        current = max([current, *(len(call.ranks) for call in level.calls if call.kind == "sparse_allreduce")])
    return vectors


def message_rounds(level: Level) -> int:
    """The number of rounds with messages in the longest call of a level, without the rounds of local rows."""
    return max((_message_rounds(call) for call in level.calls), default=0)


def _message_rounds(call: Call) -> int:
    if call.kind in LOCAL:
        return 0
    if call.kind == "sparse_broadcast":
        return rounds_of_call(call) // 2
    return 2 if call.method == "two_shot" else 1 if call.kind in SPARSE else rounds_of_call(call)


def messages_of_call(call: Call, sparsity: Sparsity) -> tuple[_Ints, _Ints, _Floats]:
    """The messages of a call that sends entries along a tree.

    Args:
        call: a call of a kind in model.SPARSE.

    Returns:
        Senders, receivers, and the units that have as many bytes as the entries. There are no messages for the kinds in
        which all send to all; these messages are too many to list, see all_to_all_units().
    """
    size = len(call.ranks)
    ranks = np.array(call.ranks, dtype=np.int64)
    counts = np.array([span.count for span in call.spans], dtype=np.float64)
    if call.kind == "sparse_merge":
        return ranks[1:], ranks[:1], counts * sparsity.sent(1)
    if call.kind == "sparse_broadcast":
        behind = np.arange(1, size)  # places behind the root; each receives from the place without its lowest bit
        before = behind - (behind & -behind)
        root = call.ranks.index(call.root)
        return (
            ranks[(before + root) % size],
            ranks[(behind + root) % size],
            np.full(size - 1, sparsity.sent(1)) * counts,
        )
    return ranks[:0], ranks[:0], counts[:0]


def all_to_all_units(level: Level, ways: _Ints, size: int, sparsity: Sparsity, vectors: int) -> _Floats:
    """The loads on the ports of the calls of a level in which all ranks send to all.

    Args:
        ways: the ports on the way from the root to each rank, [ranks, depth], -1 below a leaf.

    Returns:
        float64 [2 * size]: for each port, upwards and downwards, the units that have as many bytes as the entries.
    """
    loads = np.zeros((size, 2))
    for call in level.calls:
        if call.kind not in ("sparse_allreduce", "sparse_all_gather"):
            continue
        members = len(call.ranks)
        two_shot = call.method == "two_shot"
        counts = np.array([span.count for span in (pieces(call) if two_shot else call.spans)], dtype=np.float64)
        units = np.broadcast_to(counts, members) * sparsity.sent(1 if call.kind == "sparse_allreduce" else vectors)
        for ports in ways[list(call.ranks)].T:
            there = ports >= 0
            below = np.bincount(ports[there], minlength=size)
            sent = np.bincount(ports[there], units[there], size)
            out, back = sent * (members - below), below * np.where(below > 0, units.sum() - sent, 0.0)
            if two_shot:  # before, each has sent the others their pieces, which is the same the other way round
                out = back = out + back
            loads[:, 0] += out
            loads[:, 1] += back
    return loads.reshape(-1)


def local_of_call(call: Call, sparsity: Sparsity, vectors: int) -> _Floats:
    """The time that each rank of a call spends on its local rows, float64 [ranks]: seconds if a unit were a byte."""
    size = len(call.ranks)
    counts = np.array([span.count for span in call.spans], dtype=np.float64) / ELEMENT_NBYTES
    one_pass, adding = sparsity.select_s_per_element, sparsity.add_s_per_entry
    if call.kind == "sparse_all_gather":
        others = counts.sum() - counts
        gathered: _Floats = counts * one_pass + others * (one_pass + sparsity.filled(vectors) * adding)
        return gathered
    entries = counts[0] * sparsity.filled(1) * adding
    if call.method == "two_shot":
        own = np.array([span.count for span in pieces(call)], dtype=np.float64) / ELEMENT_NBYTES
        summed: _Floats = own * (2 * one_pass + size * sparsity.filled(1) * adding) + counts[0] * one_pass + entries
        return summed
    if call.kind == "sparse_merge":
        return np.array([entries, 0.0])
    if call.kind == "sparse_broadcast":
        return np.array([0.0 if rank == call.root else entries for rank in call.ranks])
    times = {"select": 0, "fold": 0, "scatter": 1, "sparse_allreduce": size}[call.kind]
    return np.full(size, counts[0] * one_pass + times * entries)
