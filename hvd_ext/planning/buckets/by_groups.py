"""Buckets that the user asks for, as a number of buckets or as lists of tensors that share a bucket."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_ext.errors import PlanError
from hvd_ext.planning.buckets import Bucket, Card, Request, bucket_of, in_order
from hvd_ext.planning.buckets.by_size import filled

card = Card(
    name="by_groups",
    idea="Each group of the user is a bucket, or one for each class of its tensors; what is in no group goes by size.",
    source="the option groups of Horovod's DistributedOptimizer",
)


def supports(request: Request) -> str | None:
    """Says why this bucketer cannot meet a request, in words; None if it can."""
    return "it needs groups" if request.groups is None else None


def build(request: Request) -> tuple[Bucket, ...]:
    """Makes one bucket of each group, or one for each class of its tensors; what is in no group goes by size.

    Returns:
        Buckets of one class each, in the order in which their last tensor is ready.

    Raises:
        PlanError: an index is out of range or occurs twice, the number of groups is below 1, or `by_size` refuses the
            tensors.
    """
    tensors, groups = request.tensors, request.groups
    assert groups is not None
    filled(request, request.order)  # checks the tensors
    if isinstance(groups, int):
        if groups < 1:
            raise PlanError(f"groups ({groups}): must be at least 1")
        groups = _divided([tensor.nbytes for tensor in tensors], groups)
    grouped = [index for group in groups for index in group]
    for index in grouped:
        if not 0 <= index < len(tensors):
            raise PlanError(f"groups: tensor {index} does not exist; there are {len(tensors)} tensors")
    if len(set(grouped)) < len(grouped):
        twice = next(index for index in grouped if grouped.count(index) > 1)
        raise PlanError(f"groups: tensor {tensors[twice].name!r} is listed twice; each tensor may be in one group only")
    place = {index: number for number, index in enumerate(request.order)}
    buckets = [
        bucket_of(tensors, indices)
        for group in groups
        for indices in request.by_class(sorted(group, key=lambda index: place[index])).values()
    ]
    in_groups = set(grouped)
    rest = [index for index in request.order if index not in in_groups]
    return in_order([*buckets, *filled(request, rest)], request.order)


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
