"""Buckets for steps in which only some tensors may be sparsified: the two kinds never share a bucket."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hvd_ext.planning.buckets.by_groups import by_groups
from hvd_ext.planning.buckets.by_size import by_size
from hvd_ext.planning.buckets.model import (
    DEFAULT_BUCKET_NBYTES,
    Bucket,
    BucketPlan,
    Card,
    Request,
)
from hvd_ext.planning.tensors import DTYPES, Tensor

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
    return apart(request.tensors, request.sparse or (), request.groups, request.bucket_nbytes)


def apart(
    tensors: Sequence[Tensor],
    sparse: Collection[int],
    groups: int | Sequence[Sequence[int]] | None = None,
    bucket_nbytes: int = DEFAULT_BUCKET_NBYTES,
) -> BucketPlan:
    """Plans each kind of tensors by itself, or divides the user's groups by kind.

    Args:
        tensors: the tensors in the order of the model's layers.
        sparse: the indices of the tensors that may be sparsified.
        groups: as `by_groups` takes them; None for buckets of a fixed size.
        bucket_nbytes: the size that a bucket should have.

    Returns:
        The buckets of both kinds in the order in which their last tensor is ready.

    Raises:
        PlanError: `by_size` or `by_groups` refuses the arguments.
    """
    kinds = [[index for index in range(len(tensors)) if (index in sparse) == kind] for kind in (False, True)]
    if groups is None:
        buckets = [
            Bucket(bucket.dtype, tuple(kind[index] for index in bucket.tensors), bucket.nbytes)
            for kind in kinds
            for bucket in by_size([tensors[index] for index in kind], bucket_nbytes).buckets
        ]
    else:
        whole = by_groups(tensors, groups, bucket_nbytes).buckets
        parts = [
            (bucket.dtype, tuple(index for index in bucket.tensors if index in kind))
            for bucket in whole
            for kind in kinds
        ]
        buckets = [
            Bucket(dtype, part, sum(tensors[index].elements for index in part) * DTYPES[dtype].nbytes)
            for dtype, part in parts
            if part
        ]
    # back-propagation ends with the model's first tensors, so a bucket is full when its lowest-numbered tensor is ready
    return BucketPlan(tuple(sorted(buckets, key=lambda bucket: -min(bucket.tensors))))
