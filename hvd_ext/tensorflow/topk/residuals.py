"""Residuals and velocities as arrays by tensor and offset, for checkpoints and for jobs of another shape.

For each bucket with top-k gradients, a rank keeps the residual of its own share of the bucket, and with momentum
correction the velocity. Buckets and shares depend on the options and on the cluster; tensors and offsets do not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hvd_ext.engine.engine import Engine
    from hvd_ext.tensorflow.gradients.channel import Channel

Arrays = dict[str, np.ndarray]

RESIDUAL, VELOCITY = "residual", "velocity"
_WHICH = {RESIDUAL: 0, VELOCITY: 1}


@dataclasses.dataclass(frozen=True)
class Piece:
    """A run of elements of one tensor that a rank keeps.

    Args:
        which: `RESIDUAL` or `VELOCITY`.
        tensor: the tensor's index in its list of variables.
        offset: the place of the first element in the tensor.
        count: the number of elements.
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
    def where(self) -> tuple[str, int, int, int]:
        """The fields that identify the piece in any job."""
        return self.which, self.tensor, self.offset, self.count


def pieces(channel: Channel, engine: Engine) -> list[Piece]:
    """List the pieces that this rank keeps for a channel, in the order of buckets and places.

    Args:
        channel: an open channel.
        engine: the channel's engine.
    """
    found = []
    for number, bucket in enumerate(channel.layout.buckets):
        if bucket.selection is None:
            continue
        first, elements, has_velocity = engine.state(channel.handle, number)
        begin = 0
        for tensor in bucket.tensors:
            of = channel.layout.tensors[tensor]
            low, high = max(begin, first), min(begin + of.elements, first + elements)
            if low < high:
                found += [
                    Piece(which, tensor, low - begin, high - low, of.name, number, low - first)
                    for which in ((RESIDUAL, VELOCITY) if has_velocity else (RESIDUAL,))
                ]
            begin += of.elements
    return found


def read(channel: Channel, engine: Engine) -> Arrays:
    """Copy this rank's residuals and velocities of a channel, between two steps.

    Args:
        channel: an open channel.
        engine: the channel's engine.

    Returns:
        float32 arrays by the pieces' keys.
    """
    found = pieces(channel, engine)
    shares = {
        (piece.bucket, piece.which): np.zeros(engine.state(channel.handle, piece.bucket)[1], np.float32)
        for piece in found
    }
    for (bucket, which), share in shares.items():
        engine.read_state(channel.handle, bucket, _WHICH[which], share)
    return {
        piece.key: shares[piece.bucket, piece.which][piece.place : piece.place + piece.count].copy() for piece in found
    }


def write(channel: Channel, engine: Engine, arrays: Arrays) -> None:
    """Set this rank's residuals and velocities of a channel, between two steps; pieces without an array become 0.

    Args:
        channel: an open channel.
        engine: the channel's engine.
        arrays: float32 arrays by the keys of this channel's pieces.
    """
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
    """Multiply this rank's velocities of a channel, between two steps.

    Args:
        channel: an open channel.
        engine: the channel's engine.
        factor: the factor.
    """
    for bucket in {piece.bucket for piece in pieces(channel, engine) if piece.which == VELOCITY}:
        share = np.zeros(engine.state(channel.handle, bucket)[1], np.float32)
        engine.read_state(channel.handle, bucket, _WHICH[VELOCITY], share)
        share *= np.float32(factor)
        engine.write_state(channel.handle, bucket, _WHICH[VELOCITY], share)


def parsed(key: str, array: np.ndarray) -> Piece:
    """Make a piece from its key in a file.

    Args:
        key: the key, from `Piece.key`.
        array: the array of this key.
    """
    which, tensor, offset, name = key.split("/", 3)
    return Piece(which, int(tensor), int(offset), int(array.size), name)


def claims(wanted: Sequence[Sequence[tuple[str, int, int, int]]], rank: int) -> list[np.ndarray]:
    """Mark the elements that a rank is the first to keep.

    Each host keeps all elements, on some of its ranks; the sum over an earlier job must go to only one host.

    Args:
        wanted: for each rank the `where` of its pieces.
        rank: the rank.

    Returns:
        A boolean mask for each of the rank's pieces.
    """
    masks = []
    for which, tensor, offset, count in wanted[rank]:
        mask = np.ones(count, bool)
        for earlier in wanted[:rank]:
            for other, of, begin, length in earlier:
                if (other, of) == (which, tensor):
                    mask[max(0, begin - offset) : max(0, begin + length - offset)] = False
        masks.append(mask)
    return masks


def regrouped(own: Sequence[Piece], masks: Sequence[np.ndarray], states: Iterable[Arrays], scale: float) -> Arrays:
    """Add up the residuals and velocities of all ranks of an earlier job, for the elements of this rank.

    Args:
        own: this rank's pieces.
        masks: the elements of these pieces that get a sum, from `claims`; the others become 0.
        states: the arrays that each rank of the earlier job saved, from `read`; read one after another.
        scale: multiplies every sum.

    Returns:
        float32 arrays by the pieces' keys; each sum is computed in float64 and rounded once.
    """
    totals = [np.zeros(piece.count, np.float64) for piece in own]
    for state in states:
        saved = [(parsed(key, array), array) for key, array in state.items()]
        for piece, total in zip(own, totals, strict=True):
            for one, array in saved:
                low, high = max(one.offset, piece.offset), min(one.offset + one.count, piece.offset + piece.count)
                if (one.which, one.tensor) == (piece.which, piece.tensor) and low < high:
                    total[low - piece.offset : high - piece.offset] += array[low - one.offset : high - one.offset]
    return {
        piece.key: np.where(mask, total * scale, 0).astype(np.float32)
        for piece, mask, total in zip(own, masks, totals, strict=True)
    }
