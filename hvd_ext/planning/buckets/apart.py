"""Buckets for steps in which only some tensors may be sparsified: the two kinds never share a bucket."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hvd_ext.planning.buckets.by_groups import by_groups
from hvd_ext.planning.buckets.by_size import by_size
from hvd_ext.planning.buckets.model import (
    DEFAULT_BUCKET_NBYTES,
    BucketPlan,
    Card,
    Request,
    bucket_of,
    in_order,
)
from hvd_ext.planning.tensors import Tensor

card = Card(
    name="apart",
    idea="Tensors that may be sparsified share no bucket with the others; each kind goes by size, or by groups.",
    source="biases and scales are sent whole beside top-k gradients, as in Lin et al. 2018 (DGC)",
)


def build(request: Request) -> BucketPlan:
    """Plans a request.

    Args:
        request: any.

    Returns:
        See `apart`.
    """
    return apart(request.tensors, request.sparse or (), request.groups, request.bucket_nbytes, request.order)


def apart(
    tensors: Sequence[Tensor],
    sparse: Collection[int],
    groups: int | Sequence[Sequence[int]] | None = None,
    bucket_nbytes: int = DEFAULT_BUCKET_NBYTES,
    order: Sequence[int] | None = None,
) -> BucketPlan:
    """Plans each kind of tensors by itself, or divides the user's groups by kind.

    Args:
        tensors: the tensors in the order of the model's layers.
        sparse: the indices of the tensors that may be sparsified.
        groups: as `by_groups` takes them; None for buckets of a fixed size.
        bucket_nbytes: the size that a bucket should have.
        order: the indices of the tensors in ready order; None for the reverse order of the layers.

    Returns:
        The buckets of both kinds in the order in which their last tensor is ready.

    Raises:
        PlanError: `by_size` or `by_groups` refuses the arguments.
    """
    order = tuple(reversed(range(len(tensors)))) if order is None else order
    kinds = [[index for index in order if (index in sparse) == kind] for kind in (False, True)]
    if groups is None:
        buckets = [
            bucket_of(tensors, [kind[index] for index in bucket.tensors])
            for kind in kinds
            for bucket in by_size([tensors[index] for index in kind], bucket_nbytes, range(len(kind))).buckets
        ]
    else:
        whole = by_groups(tensors, groups, bucket_nbytes, order).buckets
        parts = [[index for index in bucket.tensors if index in kind] for bucket in whole for kind in kinds]
        buckets = [bucket_of(tensors, part) for part in parts if part]
    return in_order(buckets, order)
