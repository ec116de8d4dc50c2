"""Communication that delays the computing beside it, because both use the same cores.

The contention is the number of seconds by which a second of communication delays the computing beside it. Where cores
are free it is 0, and all hidden communication is free, as MG-WFBP (Shi et al. 2019) assumes. A training does not show
it in one layout of its buckets, but in two that hide different amounts of communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST = 0.9
# Layouts tell the contention apart from noise if what they hide differs by this share of the computing.
TELLING = 0.1

Spans = Sequence[tuple[float, float]]


def busy(begins_s: Sequence[float], ends_s: Sequence[float]) -> list[tuple[float, float]]:
    """Joins the times of buckets to the spans in which at least one of them is under way, seconds, ascending."""
    spans: list[tuple[float, float]] = []
    for begin_s, end_s in sorted(zip(begins_s, ends_s, strict=True)):
        if spans and begin_s <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end_s))
        elif end_s > begin_s:
            spans.append((begin_s, end_s))
    return spans


def hidden_s(spans: Spans, until_s: float) -> float:
    """Sums up what of the spans lies before a time, seconds."""
    return sum(max(min(end_s, until_s) - begin_s, 0.0) for begin_s, end_s in spans)


def delayed(seconds: float, spans: Spans, contention: float) -> float:
    """The time at which the computing, delayed by communication, has done what it does in `seconds` alone.

    Args:
        seconds: counted from the begin of the step.
        spans: the communication, from `busy`.
        contention: from 0 to `MOST`.
    """
    late_s = 0.0
    for begin_s, end_s in spans:
        left_s = seconds + late_s - begin_s
        if left_s <= 0:
            break
        if left_s <= (end_s - begin_s) * (1 - contention):
            return begin_s + left_s / (1 - contention)
        late_s += contention * (end_s - begin_s)
    return seconds + late_s


def undelayed(seconds: float, spans: Spans, contention: float) -> float:
    """The inverse of `delayed`: the seconds of computing alone that have passed at a measured time."""
    return seconds - contention * hidden_s(spans, seconds)


@dataclass(frozen=True, slots=True)
class Overlap:
    """How computing and communication overlap in a training with one layout.

    Args:
        computed_s: the end of its backward pass, measured from the begin of the step.
        hidden_s: the communication before that.
    """

    computed_s: float
    hidden_s: float


def between(before: Overlap, now: Overlap, known: float) -> float:
    """Finds the contention from two layouts of one training.

    Args:
        known: the contention as it was known before, which stays if the layouts hide too similar amounts.
    """
    more_s = now.hidden_s - before.hidden_s
    if abs(more_s) < TELLING * min(before.computed_s, now.computed_s):
        return known
    return min(max((now.computed_s - before.computed_s) / more_s, 0.0), MOST)
