"""What is summed: buffers of which every rank and every place has another value, and the check of their sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Values stay below 61 x 4,096 ranks: every partial sum is exact in float32, whatever the order of the additions.
PERIOD = 61


def _pattern(rank: int) -> NDArray[np.int64]:
    return (np.arange(PERIOD) * 7 + rank * 13) % PERIOD


def _repeated(pattern: NDArray[np.int64], elements: int) -> NDArray[np.float32]:
    return np.tile(pattern.astype(np.float32), -(-elements // PERIOD))[:elements]


def values_of(rank: int, elements: int) -> NDArray[np.float32]:
    """The buffer of one rank, float32 [elements]: it depends on the rank and on the place, and sums are exact."""
    return _repeated(_pattern(rank), elements)


def sum_of(size: int, elements: int) -> NDArray[np.float32]:
    """The right sum over all ranks, float32 [elements]."""
    return _repeated(np.sum([_pattern(rank) for rank in range(size)], axis=0), elements)


def fault_of(result: Any, elements: int, right: Callable[[int], NDArray[np.float32]]) -> str:
    """Compare a result with the right one, bit by bit.

    Args:
        result: what a contestant returned.
        elements: how many it must have.
        right: gives the first elements of the right result, which repeats itself every `PERIOD` elements.

    Returns:
        The first wrong element and both values in words; empty where all is right.
    """
    seen = np.asarray(result).reshape(-1)
    if seen.shape != (elements,):
        return f"shape {seen.shape}, must be ({elements},)"
    # in blocks: a second buffer of the whole size might not fit
    block = right(min(elements, PERIOD << 14))
    for begin in range(0, elements, max(len(block), 1)):
        part = seen[begin : begin + len(block)]
        wrong = np.flatnonzero(part != block[: len(part)])
        if wrong.size:
            first = int(wrong[0])
            return f"element {begin + first} is {part[first]}, must be {block[first]}"
    return ""
