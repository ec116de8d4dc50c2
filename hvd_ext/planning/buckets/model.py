"""A bucket plan as a value: the tensors of each bucket, and the order in which the buckets start."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hvd_ext.planning.tensors import Tensor

DEFAULT_BUCKET_NBYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Request:
    """The tensors that need buckets, and the user's wishes.

    Args:
        tensors: the tensors in the order of the model's layers.
        bucket_nbytes: the size that a bucket should have.
        groups: the user's groups, as `by_groups` takes them; None for none.
        sparse: the indices of the tensors that may be sparsified, which then share no bucket with the others; None if
            the two kinds may share buckets.
    """

    tensors: Sequence[Tensor]
    bucket_nbytes: int = DEFAULT_BUCKET_NBYTES
    groups: int | Sequence[Sequence[int]] | None = None
    sparse: Collection[int] | None = None


@dataclass(frozen=True, slots=True)
class Card:
    """The description of a bucketer for people.

    Args:
        name: the name of the bucketer and of its module.
        idea: one sentence.
        source: paper, section, equations; or a similar program.
    """

    name: str
    idea: str
    source: str


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors of one dtype that are sent together.

    Args:
        dtype: the dtype of all its tensors.
        tensors: indices into the request's tensors, in their order in the buffer.
        nbytes: the size of the buffer.
    """

    dtype: str
    tensors: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """All buckets in the order in which they start, the same on all ranks; every tensor is in exactly one bucket."""

    buckets: tuple[Bucket, ...]
