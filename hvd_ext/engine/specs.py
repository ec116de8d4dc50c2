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
class SparseBucket:
    """What makes a bucket a sparse one: a part of each sum is sent, and the rest stays for the next step.

    What a rank keeps, the residual and the velocity, is of the units that its plan selects (SELECT or FOLD of
    tf_ops/plan/ir.def), and in the units of their sums there.

    Args:
        dense_plan: from `Engine.add_plan`; it folds the units that the bucket's plan selects.
        dense_above: steps of this density and above use `dense_plan`; 0: all do.
        selector: its number in the native code (hvd_ext/compression/selectors.py).
        samplings: of MSTopK, at least 1.
        seed: of what is random.
        threshold: the magnitude from which the threshold selector takes elements.
        momentum: of the velocity that gradients go through first, in [0, 1); None: there is no velocity.
        nesterov: the velocity is Nesterov's.
        masks: the velocity of what was sent becomes 0.
        value_wire: dtype of selected values on their way, "float32", "float16" or "bfloat16"; None: float32. float16
            is bounded by 65504, and what rounding takes stays in the residual.
        indices: how positions travel: 0 the shortest, 1 as int32, 2 as gaps, 3 as a bitmap.
        per_tensor: each tensor's part of the units gets its share of k; else all of them have one k.
    """

    dense_plan: int
    dense_above: float = 1.0
    selector: int = 0
    samplings: int = 30
    seed: int = 0
    threshold: float = 0.0
    momentum: float | None = None
    nesterov: bool = False
    masks: bool = True
    value_wire: str | None = None
    indices: int = 0
    per_tensor: bool = False


class KeptShard(NamedTuple):
    """What a sparse bucket keeps on this rank: the bucket's elements [begin, begin + elements)."""

    begin: int
    elements: int
    has_velocity: bool


@dataclasses.dataclass(frozen=True)
class SparseStatistics:
    """What this rank has sent of a channel's sparse buckets since it was opened, in bytes; and its steps."""

    entries: int
    value_bytes: int
    index_bytes: int
    head_bytes: int
    committed: int
    dropped: int


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
