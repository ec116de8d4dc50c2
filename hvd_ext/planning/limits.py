"""The sizes at which the planner goes from exact to quick ways, and the sizes of buffers that it tells apart."""

from __future__ import annotations

import math

# The rows of all ranks are looked at, to price and to prove a plan, in jobs of up to this size.
MOST_RANKS = 64
# Up to this size a plan is simulated: all algorithms at one size of buffer then take some 0.1 s of a processor.
MOST_SIMULATED = 16


def size_class(nbytes: int) -> int:
    """The size of buffer that stands for all similar ones.

    Args:
        nbytes: 0 or more.

    Returns:
        The nearest power of two, by ratio.
    """
    low = 1 << max(nbytes.bit_length() - 1, 0)
    return low if nbytes * nbytes < 2 * low * low else 2 * low


def stands_for(size: int, least: int = 1) -> str:
    """Says which sizes of buffers take one choice.

    Args:
        size: from size_class().
        least: the class of all that is smaller.

    Returns:
        For people.
    """
    first = 0 if size <= least else math.isqrt(size * size // 2 - 1) + 1
    return f"one choice for {first} to {math.isqrt(2 * size * size - 1)} bytes"
