"""Links from measured times: what is typical of repeated measurements, lines over size, and hosts that are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvd_ext.topology.tree import Link

# Hosts whose times per byte differ by less than this have equal network cards, as far as a measurement can tell.
ALIKE = 0.05
DIGITS = 4  # of a number that was measured; it is not more exact


@dataclass(frozen=True, slots=True)
class Curve:
    """Measured times over the size, and the line through them.

    Args:
        name: what was measured, such as "between hosts".
        points: sizes in bytes and times in seconds.
        link: the line: a latency, and a time per byte.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    link: Link


def typical(seconds: Sequence[float]) -> float:
    """What a measurement takes if nothing disturbs it: the mean of the faster half.

    A disturbed time is always longer. The minimum would be the luckiest time instead, which a job does not have each
    time.
    """
    ordered = sorted(seconds)
    return float(np.mean(ordered[: -(-len(ordered) // 2)]))


def line(points: Sequence[tuple[float, float]]) -> Link:
    """Fits a latency and a time per byte to times, such that the squares of the relative errors are least.

    Args:
        points: sizes in bytes and times in seconds, above 0; at least one.

    Returns:
        The line. A latency or a time per byte that would be negative is 0, and the other one is fitted alone.
    """
    sizes, seconds = (np.array(values, dtype=np.float64) for values in zip(*points, strict=True))
    ones, slopes = 1 / seconds, sizes / seconds

    def alone(column: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
        return float(column.sum() / max((column * column).sum(), 1e-300))

    if len(set(sizes.tolist())) > 1:
        (alpha_s, beta), *_ = np.linalg.lstsq(np.stack([ones, slopes], axis=1), np.ones(len(sizes)), rcond=None)
        if alpha_s >= 0 and beta >= 0:
            return Link(float(alpha_s), float(beta))
        if beta < 0:
            return Link(alone(ones), 0.0)
    return Link(0.0, alone(slopes))


def slopes(points: Sequence[tuple[float, float]]) -> list[float]:
    """Gives the times per byte of sizes above the smallest one, whose time is the latency of all.

    Args:
        points: sizes in bytes and times in seconds, above 0; the smallest size is of a few bytes.

    Returns:
        Seconds per byte in the order of the sizes. A quarter of a time is at least for its bytes, whatever the noise.
    """
    (_, alpha_s), *others = sorted(points)
    return [max(seconds - alpha_s, seconds / 4) / nbytes for nbytes, seconds in others]


def middle(values: Sequence[float]) -> float:
    """Gives the value whose largest ratio to the given ones, either way, is least."""
    return float(np.sqrt(min(values) * max(values)))


def levelled(betas: Sequence[float], alike: float = ALIKE) -> list[float]:
    """Gives equal times per byte to those that differ by no more than a measurement errs.

    Returns:
        The same in the same order; values of which each is within `alike` of the next larger one have their median.
    """
    order = sorted(range(len(betas)), key=lambda place: betas[place])
    level = list(betas)
    group: list[int] = []
    for place in [*order, -1]:
        if group and (place < 0 or betas[place] > betas[group[-1]] * (1 + alike)):
            middle = float(np.median([betas[member] for member in group]))
            for member in group:
                level[member] = middle
            group = []
        group.append(place)
    return level


def rounded(value: float) -> float:
    """Rounds a measured number to four digits."""
    return float(f"{value:.{DIGITS}g}")
