"""A bucket plan as a value: which tensors travel together, and in which order the buckets start."""

from __future__ import annotations

from dataclasses import dataclass

NBYTES_OF = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "int64": 8,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor to be reduced.

    Args:
        name: for messages.
        elements: 0 or more.
        dtype: a key of NBYTES_OF.
    """

    name: str
    elements: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors of one dtype that are sent together.

    Args:
        dtype: of all its tensors.
        tensors: indices into the list that was planned, in their order in the buffer.
        nbytes: of the buffer.
    """

    dtype: str
    tensors: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """All buckets in the order in which they start, the same on all ranks.

    Args:
        buckets: every tensor is in exactly one.
    """

    buckets: tuple[Bucket, ...]
