"""Buckets of a fixed size."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hvd_ext.errors import PlanError
from hvd_ext.planning.buckets.model import (
    DEFAULT_BUCKET_NBYTES,
    Bucket,
    BucketPlan,
    Card,
    Class,
    Request,
    bucket_of,
    in_order,
    without_groups,
)
from hvd_ext.planning.tensors import DTYPES, Tensor

card = Card(
    name="by_size",
    idea="Tensors fill buckets of a fixed size in the order in which back-propagation makes their gradients.",
    source="tensor fusion, as Horovod (Sergeev and Del Balso 2018) and PyTorch DDP (Li et al. 2020) have it",
)


supports = without_groups


def build(request: Request) -> BucketPlan:
    """Plans a request.

    Args:
        request: a request that the bucketer supports.

    Returns:
        See `by_size`.
    """
    return by_size(request.tensors, request.bucket_nbytes, request.order, request.sparse)


def by_size(
    tensors: Sequence[Tensor],
    bucket_nbytes: int = DEFAULT_BUCKET_NBYTES,
    order: Sequence[int] | None = None,
    sparse: Collection[int] = (),
) -> BucketPlan:
    """Fills buckets of a fixed size with tensors in the order in which back-propagation makes gradients.

    Args:
        tensors: the tensors in the order of the model's layers.
        bucket_nbytes: the size that no bucket exceeds, except that a larger tensor gets a bucket of its own.
        order: the indices of the tensors in ready order; None for the reverse order of the layers.
        sparse: the indices of the tensors that may be sparsified.

    Returns:
        Buckets of one class each, in the order in which their last tensor is ready.

    Raises:
        PlanError: bucket_nbytes is below 1, or a tensor has an unknown dtype or a negative number of elements.
    """
    if bucket_nbytes < 1:
        raise PlanError(f"bucket_nbytes ({bucket_nbytes}): must be at least 1")
    order = tuple(reversed(range(len(tensors)))) if order is None else order
    closed: list[Bucket] = []
    filling: dict[Class, list[int]] = {}
    nbytes: dict[Class, int] = {}
    for index in order:
        tensor = tensors[index]
        if tensor.dtype not in DTYPES:
            raise PlanError(
                f"tensor {tensor.name!r}: its dtype must be one of {', '.join(DTYPES)}, got {tensor.dtype!r}"
            )
        if tensor.elements < 0:
            raise PlanError(f"tensor {tensor.name!r}: it must have 0 or more elements, got {tensor.elements}")
        size = tensor.elements * DTYPES[tensor.dtype].nbytes
        kind = tensor.dtype, index in sparse
        if kind in filling and nbytes[kind] + size > bucket_nbytes:
            closed.append(bucket_of(tensors, filling.pop(kind)))
            del nbytes[kind]
        filling.setdefault(kind, []).append(index)
        nbytes[kind] = nbytes.get(kind, 0) + size
    return in_order([*closed, *(bucket_of(tensors, indices) for indices in filling.values())], order)
