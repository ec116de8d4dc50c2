"""What the engine is told about: dtypes, tensors, buckets, channels."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from hvd_ext.options import ReduceOp


@dataclasses.dataclass(frozen=True)
class DType:
    """A dtype that the engine reduces: its code (tf_ops/kernels/reduce.h) and bytes per element."""

    code: int
    nbytes: int


DTYPES: dict[str, DType] = {
    "float32": DType(0, 4),
    "float64": DType(1, 8),
    "float16": DType(2, 2),
    "bfloat16": DType(3, 2),
    "int32": DType(4, 4),
    "int64": DType(5, 8),
}


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor of a channel: its name for messages, its number of elements and its dtype (a key of `DTYPES`)."""

    name: str
    elements: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class BucketSpec:
    """Tensors that are sent together.

    Args:
        dtype: of all its tensors, a key of `DTYPES`.
        op: `Sum` or `Average`.
        plan: from `Engine.add_plan`.
        segment_nbytes: the grain of pipelining in bytes sent, at least 1.
        tensors: indices of the channel's tensors, in their order in the buffer.
        wire: float32 travels as "float16" or "bfloat16"; None: as it is.
    """

    dtype: str
    op: ReduceOp
    plan: int
    segment_nbytes: int
    tensors: tuple[int, ...]
    wire: str | None = None


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What the engine has done since it started, on this rank; sizes in bytes."""

    buckets: int
    calls: int
    segments: int
    bytes_sent: int
    bytes_received: int


class ChannelSpec(NamedTuple):
    """What a channel was opened with."""

    name: str
    tensors: tuple[TensorSpec, ...]
    buckets: tuple[BucketSpec, ...]
