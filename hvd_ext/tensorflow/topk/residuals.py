"""Residuals and velocities as arrays by tensor and offset, for checkpoints and for jobs of another shape.

For each bucket with top-k gradients, a rank keeps the residual of its own share of the bucket, and with momentum
correction the velocity. Buckets and shares depend on the options and on the cluster; tensors and offsets do not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_ext.job import consensus
from hvd_ext.options import ReduceOp
from hvd_ext.state import Arrays

if TYPE_CHECKING:
    from hvd_ext.engine.engine import Engine
    from hvd_ext.job.process_sets import ProcessSet
    from hvd_ext.job.runtime import Runtime
    from hvd_ext.tensorflow.gradients.channel import Channel
    from hvd_ext.topology.tree import Tree

Where = tuple[str, int, int, int]  # which, tensor, offset, count

RESIDUAL, VELOCITY = "residual", "velocity"
_WHICH = {RESIDUAL: 0, VELOCITY: 1}


@dataclasses.dataclass(frozen=True)
class Piece:
    """A run of elements of one tensor that a rank keeps.

    Args:
        tensor: the tensor's index in its list of variables.
        offset: the place of the first element in the tensor.
        name: the tensor's name, for people who read the file.
        bucket: the bucket's number in the channel; 0 for a piece of a file.
        place: the place of the first element in the rank's share of the bucket.
    """

    which: str
    tensor: int
    offset: int
    count: int
    name: str
    bucket: int = 0
    place: int = 0

    @property
    def key(self) -> str:
        """The piece's name in a file: which, tensor, offset, and the tensor's name."""
        return f"{self.which}/{self.tensor}/{self.offset}/{self.name}"

    @property
    def where(self) -> Where:
        """The fields that identify the piece in any job."""
        return self.which, self.tensor, self.offset, self.count


def pieces(channel: Channel, engine: Engine) -> list[Piece]:
    """List the pieces that this rank keeps for a channel, in the order of buckets and places."""
    kept = []
    for number, bucket in enumerate(channel.layout.buckets):
        if bucket.selection is None:
            continue
        first, elements, has_velocity = engine.state(channel.handle, number)
        begin = 0
        for tensor in bucket.tensors:
            of = channel.layout.tensors[tensor]
            low, high = max(begin, first), min(begin + of.elements, first + elements)
            if low < high:
                kept += [
                    Piece(which, tensor, low - begin, high - low, of.name, number, low - first)
                    for which in ((RESIDUAL, VELOCITY) if has_velocity else (RESIDUAL,))
                ]
            begin += of.elements
    return kept


def read(channel: Channel, engine: Engine) -> Arrays:
    """Copy this rank's residuals and velocities between two steps: float32 arrays by the pieces' keys."""
    kept = pieces(channel, engine)
    shares = {
        (piece.bucket, piece.which): np.zeros(engine.state(channel.handle, piece.bucket)[1], np.float32)
        for piece in kept
    }
    for (bucket, which), share in shares.items():
        engine.read_state(channel.handle, bucket, _WHICH[which], share)
    return {
        piece.key: shares[piece.bucket, piece.which][piece.place : piece.place + piece.count].copy() for piece in kept
    }


def write(channel: Channel, engine: Engine, arrays: Arrays) -> None:
    """Set residuals and velocities, float32 by the pieces' keys, between two steps; those without an array to 0."""
    by_where = {parsed(key, array).where: array for key, array in arrays.items()}
    shares: dict[tuple[int, str], np.ndarray] = {}
    for piece in pieces(channel, engine):
        share = shares.setdefault(
            (piece.bucket, piece.which), np.zeros(engine.state(channel.handle, piece.bucket)[1], np.float32)
        )
        if piece.where in by_where:
            share[piece.place : piece.place + piece.count] = by_where[piece.where]
    for (bucket, which), share in shares.items():
        engine.write_state(channel.handle, bucket, _WHICH[which], share)


def scale_velocities(channel: Channel, engine: Engine, factor: float) -> None:
    """Multiply this rank's velocities of a channel, between two steps."""
    kept = read(channel, engine)
    velocities = {key: array * np.float32(factor) for key, array in kept.items() if key.startswith(VELOCITY)}
    if velocities:
        write(channel, engine, kept | velocities)


def parsed(key: str, array: np.ndarray) -> Piece:
    """Make a piece from its key in a file."""
    which, tensor, offset, name = key.split("/", 3)
    return Piece(which, int(tensor), int(offset), int(array.size), name)


def redistributed(
    job: Runtime, name: str, local: Arrays, wanted: Sequence[Piece], process_set: ProcessSet | None = None
) -> Arrays:
    """Send residuals and velocities to the ranks that keep their elements now; all ranks call it.

    Each host keeps all elements once, and with `TopK(height=2)` each rack. As long as that stays so, no value changes:
    an element comes from the rank itself if it had it, else from the nearest rank that had it. Otherwise the values of
    all ranks are added up, and the first rank that keeps the element now gets the sum. What no rank had is 0.

    Args:
        local: what this rank kept, from `read`.
        wanted: the pieces that this rank keeps now.

    Returns:
        float32 arrays by the keys of `wanted`.
    """
    import tensorflow as tf

    from hvd_ext.tensorflow.collectives import objects, single

    rank = job.engine.rank
    kept = {parsed(key, array).where: array for key, array in local.items()}
    answers = consensus.exchange(
        job.engine, name, lambda: {"kept": list(kept), "wanted": [piece.where for piece in wanted]}
    )
    before, after = ([[_where(one) for one in answer[key]] for answer in answers] for key in ("kept", "wanted"))
    copies, wishes = (_counts(pieces) for pieces in (before, after))
    if any(copies.get(key, count) != count for key, count in wishes.items()):
        states = objects.allgather_object(local, name=f"{name}, sums", process_set=process_set)
        return regrouped(wanted, claims(after, rank), states, 1.0)
    outgoing: list[list[np.ndarray]] = [[] for _ in answers]
    for receiver in range(job.engine.size):
        for sender, where in sources(before, after[receiver], nearest(job.tree, receiver)):
            if sender == rank:
                outgoing[receiver].append(_slice(kept, where))
    flat = [array for arrays in outgoing for array in arrays]
    splits = [sum(array.size for array in arrays) for arrays in outgoing]
    with tf.init_scope(), tf.device("CPU:0"):
        joined = tf.constant(np.concatenate([np.zeros(0, np.float32), *flat]))
        received = single.alltoall(joined, splits, name=f"{name}, values", process_set=process_set)[0].numpy()
    results = {piece.where: np.zeros(piece.count, np.float32) for piece in wanted}
    at = 0
    for _, where in sources(before, list(results), nearest(job.tree, rank)):
        _slice(results, where)[:] = received[at : at + where[3]]
        at += where[3]
    return {piece.key: results[piece.where] for piece in wanted}


def summed(
    channel: Channel,
    job: Runtime,
    name: str,
    which: str,
    places: Iterable[int],
    *,
    op: ReduceOp,
    factor: float,
    process_set: ProcessSet | None = None,
) -> dict[int, np.ndarray]:
    """Reduce what all ranks keep of tensors to whole float32 arrays of equal bits, by place; all ranks call it."""
    import tensorflow as tf

    from hvd_ext.tensorflow.collectives import single

    kept: dict[int, list[tuple[Piece, np.ndarray]]] = {}
    for key, array in read(channel, job.engine).items():
        piece = parsed(key, array)
        if piece.which == which:
            kept.setdefault(piece.tensor, []).append((piece, array))
    results = {}
    for place in sorted(places):
        tensor = channel.layout.tensors[place]
        local = np.zeros(tensor.elements, np.float32)
        for piece, array in kept.get(place, ()):
            local[piece.offset : piece.offset + piece.count] = array
        with tf.init_scope(), tf.device("CPU:0"):
            total = single.allreduce(
                local, op=op, postscale_factor=factor, name=f"{name}, {place}", process_set=process_set
            )
            results[place] = total.numpy().reshape(tensor.shape)
    return results


def nearest(tree: Tree, rank: int) -> list[int]:
    """Sort the ranks of a cluster by how far they are from one: itself, its host, its rack, the others."""
    nearest_first, branches, node = [rank], [], tree.root
    while node.children:
        branches.append(node)
        node = next(child for child in node.children if rank in child.ranks)
    for branch in reversed(branches):
        nearest_first += sorted(set(branch.ranks) - set(nearest_first))
    return nearest_first


def sources(
    kept: Sequence[Sequence[Where]], wanted: Sequence[Where], candidates: Sequence[int]
) -> list[tuple[int, Where]]:
    """Find the rank, the first of the candidates, that each run of wanted elements comes from; by ascending ranks."""
    runs: list[tuple[int, Where]] = []
    missing: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for which, tensor, offset, count in wanted:
        missing.setdefault((which, tensor), []).append((offset, offset + count))
    for sender in candidates:
        if not any(missing.values()):
            break
        for which, tensor, offset, count in kept[sender]:
            rest = []
            for low, high in missing.get((which, tensor), ()):
                begin, end = max(low, offset), min(high, offset + count)
                if begin >= end:
                    rest.append((low, high))
                    continue
                runs.append((sender, (which, tensor, begin, end - begin)))
                rest += [run for run in ((low, begin), (end, high)) if run[0] < run[1]]
            missing[which, tensor] = rest
    return sorted(runs, key=lambda pair: pair[0])


def _counts(pieces: Sequence[Sequence[Where]]) -> dict[tuple[str, int], int]:
    """How many elements of each tensor all ranks keep together, for residuals and velocities."""
    counts: dict[tuple[str, int], int] = {}
    for which, tensor, _, count in (piece for of_rank in pieces for piece in of_rank):
        counts[which, tensor] = counts.get((which, tensor), 0) + count
    return counts


def _slice(arrays: dict[Where, np.ndarray], where: Where) -> np.ndarray:
    """The part of an array that holds a run of elements, which lies in one of the arrays."""
    which, tensor, offset, count = where
    begin, array = next(
        (begin, array)
        for (other, of, begin, length), array in arrays.items()
        if (other, of) == (which, tensor) and begin <= offset and offset + count <= begin + length
    )
    return array[offset - begin : offset - begin + count]


def _where(values: Sequence[Any]) -> Where:
    which, tensor, offset, count = values
    return which, tensor, offset, count


def claims(wanted: Sequence[Sequence[Where]], rank: int) -> list[np.ndarray]:
    """Mark, in a mask for each of a rank's pieces, the elements that this rank is the first to keep."""
    masks = []
    for which, tensor, offset, count in wanted[rank]:
        mask = np.ones(count, bool)
        for earlier in wanted[:rank]:
            for other, of, begin, length in earlier:
                if (other, of) == (which, tensor):
                    mask[max(0, begin - offset) : max(0, begin + length - offset)] = False
        masks.append(mask)
    return masks


def regrouped(wanted: Sequence[Piece], masks: Sequence[np.ndarray], states: Iterable[Arrays], scale: float) -> Arrays:
    """Add up the residuals and velocities of all ranks of an earlier job, for the elements of this rank.

    Args:
        masks: the elements of these pieces that get a sum, from `claims`; the others become 0.
        states: the arrays that each rank of the earlier job saved, from `read`; read one after another.

    Returns:
        float32 arrays by the pieces' keys; each sum is computed in float64 and rounded once.
    """
    totals = [np.zeros(piece.count, np.float64) for piece in wanted]
    for state in states:
        saved = [(parsed(key, array), array) for key, array in state.items()]
        for piece, total in zip(wanted, totals, strict=True):
            for source, array in saved:
                low = max(source.offset, piece.offset)
                high = min(source.offset + source.count, piece.offset + piece.count)
                if (source.which, source.tensor) == (piece.which, piece.tensor) and low < high:
                    total[low - piece.offset : high - piece.offset] += array[low - source.offset : high - source.offset]
    return {
        piece.key: np.where(mask, total * scale, 0).astype(np.float32)
        for piece, mask, total in zip(wanted, masks, totals, strict=True)
    }
