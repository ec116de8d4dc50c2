"""One bucket for all tensors."""

from __future__ import annotations

from hvd_ext.planning.buckets import Bucket, Card, Request, bucket_of, in_order, without_groups

card = Card(
    name="single",
    idea="All tensors that may share a bucket are sent together, when the last of them is ready.",
    source="SyncEASGD in Shi et al. 2019 (MG-WFBP), section III.C, after You et al. 2017",
)

supports = without_groups


def build(request: Request) -> tuple[Bucket, ...]:
    """One bucket for each class of tensors."""
    return in_order((bucket_of(request.tensors, indices) for indices in request.classes.values()), request.order)
