"""A bucket for each tensor."""

from __future__ import annotations

from hvd_ext.planning.buckets import Bucket, Card, Request, bucket_of, without_groups

card = Card(
    name="wfbp",
    idea="Each tensor is sent alone, as soon as it is ready.",
    source="wait-free back-propagation: Shi et al. 2019 (MG-WFBP), section III.B, after Zhang et al. 2017 (Poseidon)",
)

supports = without_groups


def build(request: Request) -> tuple[Bucket, ...]:
    """One bucket for each tensor, in ready order."""
    return tuple(bucket_of(request.tensors, [index]) for index in request.order)
