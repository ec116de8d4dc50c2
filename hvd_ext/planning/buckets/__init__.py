"""Bucket plans: which gradients travel together. Each way to plan them is a function with one name in this table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvd_ext.errors import PlanError
from hvd_ext.planning.buckets.apart import apart
from hvd_ext.planning.buckets.by_groups import by_groups
from hvd_ext.planning.buckets.by_size import DEFAULT_BUCKET_NBYTES, by_size
from hvd_ext.planning.buckets.model import NBYTES_OF, Bucket, BucketPlan, TensorInfo

__all__ = [
    "DEFAULT_BUCKET_NBYTES",
    "NBYTES_OF",
    "Bucket",
    "BucketPlan",
    "TensorInfo",
    "apart",
    "by_groups",
    "by_size",
    "make",
    "names",
]

_PLANNERS: dict[str, Callable[[Sequence[TensorInfo], int], BucketPlan]] = {"by_size": by_size}


def names() -> tuple[str, ...]:
    """The names of all ways to plan buckets.

    Returns:
        Sorted.
    """
    return tuple(sorted(_PLANNERS))


def make(
    tensors: Sequence[TensorInfo], bucket_nbytes: int = DEFAULT_BUCKET_NBYTES, *, planner: str = "by_size"
) -> BucketPlan:
    """Plans buckets.

    Args:
        tensors: in the order of the model's layers.
        bucket_nbytes: the size that a bucket should have.
        planner: one of names().

    Returns:
        The plan.

    Raises:
        PlanError: no planner has that name, or the tensors cannot be planned.
    """
    if planner not in _PLANNERS:
        raise PlanError(f"bucket planner {planner!r}: it is one of {', '.join(names())}")
    return _PLANNERS[planner](tensors, bucket_nbytes)
