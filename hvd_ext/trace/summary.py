"""The communication of each step, from the events of a trace: exposed time, hidden time, last rank; pure functions.

docs/trace.md defines the words. Times are in microseconds.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from hvd_ext.trace.events import Event

_Spans = list[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a channel, over all ranks of the trace.

    Args:
        communication_us: the time in which some bucket was being reduced, of the rank with the longest time.
        exposed_us: the time in which all tensors were submitted and a collect waited, of the rank with the longest
            time.
        hidden: the fraction of all ranks' communication that was not exposed, 0 to 1; None without communication.
        slowest: the bucket that took longest on any rank; None without communication.
        slowest_us: the time of this bucket.
        last: the rank that was the last to submit its last tensor; None on one rank.
        late_us: the time between the first rank's last tensor and that of this rank.
    """

    channel: str
    step: int
    communication_us: float
    exposed_us: float
    hidden: float | None
    slowest: int | None
    slowest_us: float
    last: int | None
    late_us: float


@dataclasses.dataclass(frozen=True)
class Total:
    """A figure over all steps."""

    median: float
    p90: float


def steps_of(events: Iterable[Event]) -> list[Step]:
    """Sum up each step of a merged trace, in the order of their begins.

    Steps without an event "step" are ignored, because the trace began during them.
    """
    begins: dict[tuple[int, int], float] = {}
    of_steps: dict[tuple[int, int], dict[int, list[Event]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    for event in events:
        about = event.get("args", {})
        if "step" not in about:
            continue
        key = (about["lane"], about["step"])
        of_steps[key][event["pid"]].append(event)
        if event.get("cat") == "step":
            begins[key] = min(begins.get(key, math.inf), event["ts"])
    order = sorted(begins, key=lambda key: (begins[key], key))
    return [_step(key[1], of_steps[key]) for key in order]


def _step(number: int, ranks: dict[int, list[Event]]) -> Step:
    complete = {rank: events for rank, events in ranks.items() if _of(events, "step")}
    busy = {rank: union(_spans(events, "reduce")) for rank, events in complete.items()}
    exposed = {rank: union(_spans(events, "exposed")) for rank, events in complete.items()}
    all_busy = sum(length(spans) for spans in busy.values())
    shown = sum(length(common(busy[rank], exposed[rank])) for rank in complete)
    buckets = [event for events in complete.values() for event in _of(events, "reduce")]
    slowest = max(buckets, key=lambda event: event["dur"], default=None)
    submitted = {
        rank: _of(events, "submitted")[0]["ts"] for rank, events in complete.items() if _of(events, "submitted")
    }
    last = max(submitted, key=lambda rank: (submitted[rank], -rank)) if len(submitted) > 1 else None
    return Step(
        channel=next(iter(complete.values()))[0]["args"]["channel"],
        step=number,
        communication_us=max(length(spans) for spans in busy.values()),
        exposed_us=max(length(spans) for spans in exposed.values()),
        hidden=1 - shown / all_busy if all_busy > 0 else None,
        slowest=None if slowest is None else slowest["args"]["bucket"],
        slowest_us=0.0 if slowest is None else slowest["dur"],
        last=last,
        late_us=0.0 if last is None else submitted[last] - min(submitted.values()),
    )


def total(values: Sequence[float]) -> Total:
    """Return the median and the 90th percentile, interpolated linearly between the values."""
    median, p90 = np.percentile(values, (50, 90)).tolist()
    return Total(median, p90)


def stragglers(steps: Iterable[Step]) -> list[tuple[int, int]]:
    """Count the steps in which each rank was last.

    Returns:
        Pairs of a rank and its number of steps, with the largest number first.
    """
    counts = collections.Counter(step.last for step in steps if step.last is not None)
    return sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))


def union(spans: Iterable[tuple[float, float]]) -> _Spans:
    """Join spans that overlap or touch; the result is sorted."""
    joined: _Spans = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def common(first: _Spans, second: _Spans) -> _Spans:
    """Return the intersection of two unions of spans."""
    pairs = [(max(a, c), min(b, d)) for a, b in first for c, d in second]
    return [(begin, end) for begin, end in pairs if begin < end]


def length(spans: _Spans) -> float:
    """Add up the lengths of disjoint spans."""
    return sum(end - begin for begin, end in spans)


def _of(events: Iterable[Event], category: str) -> list[Event]:
    return [event for event in events if event.get("cat") == category]


def _spans(events: Iterable[Event], category: str) -> _Spans:
    return [(event["ts"], event["ts"] + event["dur"]) for event in _of(events, category)]
