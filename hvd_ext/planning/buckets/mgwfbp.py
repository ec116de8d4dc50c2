"""Buckets of MG-WFBP's Algorithm 1: a tensor waits for the next one if that costs less than a start-up.

The paper says that this is optimal (Theorem 1); it is not. With backward times (1, 1, 2), sizes (1, 1, 1), a = 2 and
b = 1 the algorithm merges the first two tensors and ends at 9; to merge the last two ends at 8 (see `optimal`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvd_ext.planning.buckets import Bucket, Card, Price, Request, bucket_of, in_order, with_prices
from hvd_ext.topology.tree import Link

card = Card(
    name="mgwfbp",
    idea="A tensor joins the bucket of the next one if that is ready before a start-up of the lane's price has passed.",
    source="Shi et al. 2019 (MG-WFBP), Theorem 1 and Algorithm 1",
)

supports = with_prices

FITTED = 64  # sizes to which the line is fitted, evenly spaced up to that of all tensors together


def build(request: Request) -> tuple[Bucket, ...]:
    """Buckets in the order in which their last tensor is ready.

    The paper knows one class of tensors; each class is merged as if it were alone in the lane.
    """
    assert request.ready_s is not None
    assert request.price is not None
    buckets = []
    for kind, indices in request.classes.items():
        nbytes = [request.tensors[index].nbytes for index in indices]
        line = fitted(request.price(kind), sum(nbytes))
        merged = merged_gradient_layers([request.ready_s[index] for index in indices], nbytes, line)
        members: list[int] = []
        for index, joins_next in zip(indices, merged, strict=True):
            members.append(index)
            if not joins_next:
                buckets.append(bucket_of(request.tensors, members))
                members = []
    return in_order(buckets, request.order)


def fitted(price: Price, most_nbytes: int) -> Link:
    """Fits the line of Eq. 9 to a price, with least squares over FITTED sizes of equal weight up to the largest.

    Neither of its numbers is negative.
    """
    sizes = np.linspace(0, max(most_nbytes, 1), FITTED + 1)[1:]
    hold_s, tail_s = price.parts_s(sizes)
    seconds = hold_s + tail_s
    slope = float(np.polyfit(sizes, seconds, 1)[0])
    slope = max(slope, 0.0)
    return Link(max(float(np.mean(seconds) - slope * np.mean(sizes)), 0.0), slope)


def merged_gradient_layers(ready_s: Sequence[float], nbytes: Sequence[int], line: Link) -> list[bool]:
    """Algorithm 1: says for each place whether its gradient is merged into the next one.

    Its layers L, L - 1, ... 1 are our places 0, 1, ..., and its tau_b[l - 2] is the time at which the gradient of layer
    l - 1, the next place, is ready. The line is T_ar of Eq. 9, whose latency is the start-up.
    """
    sizes = list(nbytes)
    merged = [False] * len(sizes)
    starts_s = max(ready_s[0], 0.0) if sizes else 0.0
    for place in range(len(sizes) - 1):
        if ready_s[place + 1] - starts_s < line.alpha_s:  # lines 13 to 16
            merged[place] = True
            sizes[place + 1] += sizes[place]
        # lines 17 to 26: nothing before this place changes, so that the start of the next place is all that is needed
        taken_s = 0.0 if merged[place] else line.alpha_s + sizes[place] * line.beta_s_per_byte
        starts_s = max(starts_s + taken_s, ready_s[place + 1])
    return merged
