"""A bucket plan as a value: which tensors travel together, and in which order the buckets start."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hvd_ext.planning.tensors import Tensor

DEFAULT_BUCKET_NBYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be put into buckets, and how.

    Args:
        tensors: in the order of the model's layers.
        bucket_nbytes: the size that a bucket should have.
        groups: the user's, as `by_groups` takes them; None where there are none.
        sparse: the indices of the tensors that may be sparsified, where buckets of the two kinds are kept apart; None
            where they need not be.
    """

    tensors: Sequence[Tensor]
    bucket_nbytes: int = DEFAULT_BUCKET_NBYTES
    groups: int | Sequence[Sequence[int]] | None = None
    sparse: Collection[int] | None = None


@dataclass(frozen=True, slots=True)
class Card:
    """What people read about a bucketer.

    Args:
        name: the bucketer's, equal to its module's.
        idea: one sentence.
        source: paper, section, equations; or what it is like.
    """

    name: str
    idea: str
    source: str


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
