"""The job sizes at which the planner changes from exact to quick methods, and the classes of buffer sizes."""

from __future__ import annotations

import math

# In jobs of up to this size, plans are priced and proven from the rows of all ranks.
MOST_RANKS = 64
# In jobs of up to this size, plans are simulated; all algorithms at one buffer size then take about 0.1 s of CPU time.
MOST_SIMULATED = 16


def size_class(nbytes: int) -> int:
    """The buffer size that stands for all similar sizes: the nearest power of two, by ratio."""
    low = 1 << max(nbytes.bit_length() - 1, 0)
    return low if nbytes * nbytes < 2 * low * low else 2 * low


def stands_for(size: int, least: int = 1) -> str:
    """Describes, in words, the range of buffer sizes that share one choice.

    Args:
        least: the smallest class, which includes all smaller sizes.
    """
    first = 0 if size <= least else math.isqrt(size * size // 2 - 1) + 1
    return f"one choice for {first} to {math.isqrt(2 * size * size - 1)} bytes"
