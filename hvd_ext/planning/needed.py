"""The fewest elements that must be sparsified, where gradients that the lane has time for can be sent whole.

A step has time for gradients that are ready early, and for those that are small. So three rows of tensors are tried, of
which each gives up its first tensors as long as the step stays near the best: the earliest first, the largest first,
and the smallest first. From the row with the fewest elements left, single tensors are given up then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from hvd_ext.planning.tensors import Tensor

# The step may take so much longer than with all of them sparsified.
NEAR = 1.05
# The number of single tensors that are tried, the largest first.
MOST_TRIED = 24


def fewest(
    tensors: Sequence[Tensor],
    ready_s: Sequence[float],
    selected: Collection[int],
    step_s: Callable[[Collection[int]], float],
    near: float = NEAR,
) -> frozenset[int]:
    """Finds the tensors that are sparsified.

    Args:
        ready_s: the time at which each is ready, seconds.
        selected: the places of the tensors that may be sparsified.
        step_s: predicts the step if only the tensors of some places are sparsified, seconds.
        near: the factor by which the step may be longer than with all of them.

    Returns:
        The places of few tensors, with few elements, with which the step is so near.
    """
    limit_s = step_s(selected) * near
    if step_s(()) <= limit_s:
        return frozenset()

    def elements(places: Iterable[int]) -> int:
        return sum(tensors[place].elements for place in places)

    by_size = sorted(selected, key=lambda place: (tensors[place].elements, place))
    by_time = sorted(selected, key=lambda place: (ready_s[place], -place))
    rows = [_rest(row, step_s, limit_s) for row in (by_time, by_size, by_size[::-1])]
    kept = set(min(rows, key=elements))
    for place in sorted(kept, key=lambda place: (-tensors[place].elements, place))[:MOST_TRIED]:
        if step_s(kept - {place}) <= limit_s:
            kept.discard(place)
    return frozenset(kept)


def _rest(row: Sequence[int], step_s: Callable[[Collection[int]], float], limit_s: float) -> Sequence[int]:
    """Gives up the first tensors of a row, found by bisection."""
    low, high = 0, len(row)  # row[low:] is near enough, and row[high:] is not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if step_s(row[middle:]) <= limit_s else (low, middle)
    return row[low:]
