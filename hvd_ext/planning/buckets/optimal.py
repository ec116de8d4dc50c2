"""The buckets with which the last one is delivered first, found by dynamic programming.

Tensors are taken in ready order, and a bucket is a run of neighbours of one class, because a bucket that leaves out a
tensor for a later one cannot end earlier. Buckets of two classes go down one lane in the order in which their last
tensors are ready. A state (i, j) says that the first i tensors of the one class and the first j of the other are in
buckets; which class the last of these buckets has follows from whose last tensor is ready later. So a state is reached
from states of one kind only, and all states whose last tensor is the t-th of the ready order are found together.

A state keeps the least time at which the lane is free. That is enough without tails, where the lane is free when the
last bucket is delivered. With tails, the search takes only buckets that are delivered before a limit. The latest
delivery of each solution becomes the limit, until there is no solution any more: the last one is the best one. Where
that goes in small steps, bisection brings the limit near the end.

Of one class and without tails it is E_j = min over i < j of max(E_i, r_j) + T(S_j - S_i), in O(n^2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from hvd_ext.planning.buckets import Bucket, Card, Price, Request, bucket_of, in_order, with_prices
from hvd_ext.planning.cost.lane import Parts, recursion

card = Card(
    name="optimal",
    idea="Of all ways to cut the ready order into buckets, the one whose last bucket is delivered first.",
    source="dynamic programming over the recursion of planning/cost/lane.py, which is Eq. 20 of Shi et al. 2019 with "
    "tails",
)

MOST_CLASSES = 2
# So often the latest delivery is the next limit at once; then the rest is halved down to this part of it.
STRICT = 4
NARROWED = 1e-5

_Floats = NDArray[np.float64]


def supports(request: Request) -> str | None:
    """Says why this bucketer cannot meet a request, in words; None if it can."""
    classes = len(request.classes)
    if classes > MOST_CLASSES:
        return f"it takes tensors of {MOST_CLASSES} classes (dtype; may be sparsified), and here are {classes}"
    return with_prices(request)


def build(request: Request) -> tuple[Bucket, ...]:
    """Buckets in the order in which their last tensor is ready.

    Where several plans are the best, neighbours are joined as long as that costs nothing.
    """
    assert request.ready_s is not None
    assert request.price is not None
    place = {index: number for number, index in enumerate(request.order)}
    lines = [
        Line(
            np.array([place[index] for index in indices]),
            np.array([request.ready_s[index] for index in indices], dtype=np.float64),
            np.array([request.tensors[index].nbytes for index in indices], dtype=np.float64),
            request.price(kind),
        )
        for kind, indices in request.classes.items()
    ]
    members = list(request.classes.values())
    buckets = [bucket_of(request.tensors, members[line][begin:end]) for line, begin, end in joined(best(lines), lines)]
    return in_order(buckets, request.order)


@dataclass(frozen=True, slots=True)
class Line:
    """The tensors of a class in ready order.

    Args:
        places: their places in the ready order of all tensors, ascending.
        ready_s: the times at which they are ready, never falling.
    """

    places: NDArray[np.int64]
    ready_s: _Floats
    nbytes: _Floats
    price: Price


Cut = tuple[int, int, int]  # a bucket: the number of its line, its first tensor there, and the one after its last


def best(lines: Sequence[Line]) -> list[Cut]:
    """Finds the buckets with which the last delivery is earliest, in the order in which they start."""
    if not lines:
        return []
    search = _Search(lines)
    cuts = search.before(np.inf)
    assert cuts is not None
    latest, least_s = latest_s(cuts, lines), search.free_s  # no solution frees the lane before least_s
    for tried in count():
        far = tried >= STRICT and latest - least_s > NARROWED * latest
        limit_s = (least_s + latest) / 2 if far else latest
        better = search.before(limit_s)
        if better is not None:
            cuts, latest = better, latest_s(better, lines)
        elif far:
            least_s = limit_s
        else:
            break
    return cuts


def latest_s(cuts: Sequence[Cut], lines: Sequence[Line]) -> float:
    """The time of the last delivery; the buckets are in the order in which they start."""
    ready_s = [float(lines[number].ready_s[end - 1]) for number, _, end in cuts]
    _, ends_s = recursion(ready_s, _parts(cuts, lines))
    return max(ends_s, default=0.0)


def _parts(cuts: Sequence[Cut], lines: Sequence[Line]) -> list[Parts]:
    hold_s, tail_s = np.zeros(len(cuts)), np.zeros(len(cuts))
    for number, line in enumerate(lines):
        of_line = [place for place, cut in enumerate(cuts) if cut[0] == number]
        sums = np.concatenate(([0.0], np.cumsum(line.nbytes)))
        sizes = np.array([sums[cuts[place][2]] - sums[cuts[place][1]] for place in of_line])
        if of_line:
            hold_s[of_line], tail_s[of_line] = line.price.parts_s(sizes)
    return list(map(Parts, hold_s.tolist(), tail_s.tolist()))


def joined(cuts: Sequence[Cut], lines: Sequence[Line]) -> list[Cut]:
    """Joins neighbours of a class as long as the last delivery does not become later."""
    kept, limit_s = list(cuts), latest_s(cuts, lines)
    place = 0
    while place < len(kept):
        number, begin, _ = kept[place]
        following = next((later for later in range(place + 1, len(kept)) if kept[later][0] == number), None)
        if following is not None:
            tried = [*kept[:place], *kept[place + 1 : following], (number, begin, kept[following][2])]
            tried += kept[following + 1 :]
            if latest_s(tried, lines) <= limit_s:
                kept = tried
                continue
        place += 1
    return kept


class _Search:
    """The least time at which the lane is free in each state, and the bucket that leads there."""

    def __init__(self, lines: Sequence[Line]) -> None:
        nothing = np.zeros(0)
        self._lines = [*lines, Line(nothing.astype(np.int64), nothing, nothing, lines[0].price)][:2]
        counts = [len(line.places) for line in self._lines]
        # the tensors in ready order: each one's line, its number there, and how many of the other line are before it
        owners = np.argsort(np.concatenate([line.places for line in self._lines]), kind="stable")
        self._steps: list[tuple[int, int, int]] = []
        done = [0, 0]
        for owner in owners.tolist():
            number = int(owner >= counts[0])
            done[number] += 1
            self._steps.append((number, done[number], done[1 - number]))
        self._parts: list[list[tuple[_Floats, _Floats]]] = []
        for line in self._lines:
            sums = np.concatenate(([0.0], np.cumsum(line.nbytes)))
            prices = [line.price.parts_s(sums[end] - sums[:end]) for end in range(1, len(line.places) + 1)]
            self._parts.append([(hold_s[:, None], tail_s[:, None]) for hold_s, tail_s in prices])
        self._shape = (counts[0] + 1, counts[1] + 1)
        self.free_s = 0.0  # the time at which the last solution frees the lane

    def before(self, limit_s: float) -> list[Cut] | None:
        """Finds buckets that are all delivered before a limit and free the lane as early as that allows.

        Returns:
            The buckets in the order in which they start; None if there is no such solution.
        """
        free_s = np.full(self._shape, np.inf)
        free_s[0, 0] = 0.0
        begins = np.zeros(self._shape, dtype=np.int64)
        for number, end, others in self._steps:
            line = self._lines[number]
            hold_s, tail_s = self._parts[number][end - 1]
            states, chosen = (free_s, begins) if number == 0 else (free_s.T, begins.T)
            until_s = np.maximum(states[:end, : others + 1], line.ready_s[end - 1]) + hold_s
            if limit_s < np.inf:
                until_s[until_s + tail_s >= limit_s] = np.inf
            first = np.argmin(until_s, axis=0)
            chosen[end, : others + 1] = first
            states[end, : others + 1] = until_s[first, np.arange(others + 1)]
        if free_s[-1, -1] == np.inf:
            return None
        self.free_s = float(free_s[-1, -1])
        return self._way(begins)

    def _way(self, begins: NDArray[np.int64]) -> list[Cut]:
        cuts: list[Cut] = []
        left = [self._shape[0] - 1, self._shape[1] - 1]
        for number, end, others in reversed(self._steps):
            if left[number] == end and left[1 - number] <= others:
                begin = int(begins[left[0], left[1]])
                cuts.append((number, begin, end))
                left[number] = begin
        return cuts[::-1]
