"""Buckets of a fixed size."""

from __future__ import annotations

from collections.abc import Iterable

from hvd_ext.errors import PlanError
from hvd_ext.planning.buckets import Bucket, Card, Class, Request, bucket_of, in_order, without_groups
from hvd_ext.planning.tensors import DTYPES

card = Card(
    name="by_size",
    idea="Tensors fill buckets of a fixed size in the order in which back-propagation makes their gradients.",
    source="tensor fusion, as Horovod (Sergeev and Del Balso 2018) and PyTorch DDP (Li et al. 2020) have it",
)

supports = without_groups


def build(request: Request) -> tuple[Bucket, ...]:
    """Buckets of one class each, in the order in which their last tensor is ready; see `filled`."""
    return in_order(filled(request, request.order), request.order)


def filled(request: Request, indices: Iterable[int]) -> list[Bucket]:
    """Fills buckets of the request's size with some tensors in their order; a larger tensor gets a bucket of its own.

    Raises:
        PlanError: the size is below 1, or a tensor has an unknown dtype or a negative number of elements.
    """
    if request.bucket_nbytes < 1:
        raise PlanError(f"bucket_nbytes ({request.bucket_nbytes}): must be at least 1")
    closed: list[Bucket] = []
    filling: dict[Class, list[int]] = {}
    nbytes: dict[Class, int] = {}
    for index in indices:
        tensor = request.tensors[index]
        if tensor.dtype not in DTYPES:
            raise PlanError(
                f"tensor {tensor.name!r}: its dtype must be one of {', '.join(DTYPES)}, got {tensor.dtype!r}"
            )
        if tensor.elements < 0:
            raise PlanError(f"tensor {tensor.name!r}: it must have 0 or more elements, got {tensor.elements}")
        kind = request.class_of(index)
        if kind in filling and nbytes[kind] + tensor.nbytes > request.bucket_nbytes:
            closed.append(bucket_of(request.tensors, filling.pop(kind)))
            del nbytes[kind]
        filling.setdefault(kind, []).append(index)
        nbytes[kind] = nbytes.get(kind, 0) + tensor.nbytes
    return [*closed, *(bucket_of(request.tensors, members) for members in filling.values())]
