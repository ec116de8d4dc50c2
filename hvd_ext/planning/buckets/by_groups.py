"""Buckets that the user asks for, as a number of buckets or as lists of tensors that share a bucket."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hvd_ext.errors import PlanError
from hvd_ext.planning.buckets.by_size import by_size
from hvd_ext.planning.buckets.model import (
    DEFAULT_BUCKET_NBYTES,
    Bucket,
    BucketPlan,
    Card,
    Class,
    Request,
    bucket_of,
    in_order,
)
from hvd_ext.planning.tensors import DTYPES, Tensor

card = Card(
    name="by_groups",
    idea="Each group of the user is a bucket, or one for each class of its tensors; what is in no group goes by size.",
    source="the option groups of Horovod's DistributedOptimizer",
)


def supports(request: Request) -> str | None:
    """Says why this bucketer cannot meet a request, in words; None if it can."""
    return "it needs groups" if request.groups is None else None


def build(request: Request) -> BucketPlan:
    """Plans a request.

    Args:
        request: a request that the bucketer supports.

    Returns:
        See `by_groups`.
    """
    assert request.groups is not None
    return by_groups(request.tensors, request.groups, request.bucket_nbytes, request.order, request.sparse)


def by_groups(
    tensors: Sequence[Tensor],
    groups: int | Sequence[Sequence[int]],
    bucket_nbytes: int = DEFAULT_BUCKET_NBYTES,
    order: Sequence[int] | None = None,
    sparse: Collection[int] = (),
) -> BucketPlan:
    """Makes one bucket of each group, or one for each class of its tensors.

    Args:
        tensors: the tensors in the order of the model's layers.
        groups: the number of groups of consecutive tensors, which get about equal bytes; there are fewer groups if
            there are fewer tensors. Or the groups themselves: lists of indices of tensors, of any sizes and dtypes;
            empty lists are ignored.
        bucket_nbytes: the size of the buckets of tensors that are in no group.
        order: the indices of the tensors in ready order; None for the reverse order of the layers.
        sparse: the indices of the tensors that may be sparsified.

    Returns:
        Buckets of one class each, in the order in which their last tensor is ready.

    Raises:
        PlanError: an index is out of range or occurs twice, the number of groups is below 1, or `by_size` refuses the
            tensors.
    """
    by_size(tensors)  # checks the tensors
    nbytes = [tensor.elements * DTYPES[tensor.dtype].nbytes for tensor in tensors]
    if isinstance(groups, int):
        if groups < 1:
            raise PlanError(f"groups ({groups}): must be at least 1")
        groups = _divided(nbytes, groups)
    grouped = [index for group in groups for index in group]
    for index in grouped:
        if not 0 <= index < len(tensors):
            raise PlanError(f"groups: tensor {index} does not exist; there are {len(tensors)} tensors")
    if len(set(grouped)) < len(grouped):
        twice = next(index for index in grouped if grouped.count(index) > 1)
        raise PlanError(f"groups: tensor {tensors[twice].name!r} is listed twice; each tensor may be in one group only")
    order = tuple(reversed(range(len(tensors)))) if order is None else order
    place = {index: number for number, index in enumerate(order)}
    buckets = [
        bucket
        for group in groups
        for bucket in _by_class(tensors, sorted(group, key=lambda index: place[index]), sparse)
    ]
    chosen = set(grouped)
    rest = [index for index in order if index not in chosen]
    return in_order([*buckets, *by_size(tensors, bucket_nbytes, rest, sparse).buckets], order)


def _by_class(tensors: Sequence[Tensor], group: Sequence[int], sparse: Collection[int]) -> list[Bucket]:
    found: dict[Class, list[int]] = {}
    for index in group:
        found.setdefault((tensors[index].dtype, index in sparse), []).append(index)
    return [bucket_of(tensors, indices) for indices in found.values()]


def _divided(nbytes: Sequence[int], count: int) -> list[list[int]]:
    """Cut the tensors into `count` runs. A run ends when it has its share of the bytes, and no run is empty."""
    count = min(count, len(nbytes))
    runs: list[list[int]] = [[]]
    done, total = 0, sum(nbytes)
    for index, size in enumerate(nbytes):
        left, runs_left = len(nbytes) - index, count - len(runs)
        share_reached = done * count >= total * len(runs)
        if runs[-1] and runs_left > 0 and (left == runs_left or (share_reached and left > runs_left)):
            runs.append([])
        runs[-1].append(index)
        done += size
    return [run for run in runs if run]
