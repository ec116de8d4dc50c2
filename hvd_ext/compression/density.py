"""How many elements a density means, and which density a step has.

All ranks must find the same numbers, in Python, in TensorFlow and in the engine: densities are IEEE doubles, and the
rules here are the ones of tf_ops/engine.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    from hvd_ext.compression.topk import TopK

# The two densities of "auto", how many steps it looks at together, and how much the norm must change to be dense.
# Accordion (Agarwal et al., MLSys 2021, section 4) compares epochs and takes a change of 0.5.
AUTO_DENSITIES = (0.1, 0.01)
AUTO_WINDOW_STEPS = 100
AUTO_CHANGE = 0.5


def count(density: float, elements: int) -> int:
    """Give K(e), the number of elements that a density takes of the first e.

    Args:
        density: from 0 to 1.
        elements: e, from 0.

    Returns:
        floor(density * e + 0.5), taken in double.
    """
    return math.floor(density * elements + 0.5)


def share(density: float, begin: int, end: int) -> int:
    """Give the number of elements that a density takes of [begin, end) of a buffer.

    Args:
        density: from 0 to 1.
        begin: the first element.
        end: behind the last.

    Returns:
        K(end) - K(begin): the numbers of any parts of a buffer add up to that of the whole.
    """
    return count(density, end) - count(density, begin)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The density of each step.

    Args:
        firsts: the first step of each density, rising, from 0.
        densities: one for each.
    """

    firsts: tuple[int, ...]
    densities: tuple[float, ...]

    def at(self, step: int) -> float:
        """Give the density of a step.

        Args:
            step: update steps before it, from 0.

        Raises:
            InvalidError: the step is negative.
        """
        if step < 0:
            raise InvalidError(f"density of step {step}: steps are counted from 0")
        return self.densities[sum(first <= step for first in self.firsts) - 1]


def schedule(options: TopK) -> Schedule:
    """Give the schedule that options ask for.

    Args:
        options: density and warmup count; of "auto" the lower density is taken.

    Returns:
        The warm-up's densities, each for an equal part of its steps, and then the density.
    """
    target = AUTO_DENSITIES[1] if options.density == "auto" else float(options.density)
    if options.warmup is None:
        return Schedule((0,), (target,))
    kept = [density for density in options.warmup.densities if density > target]
    # of few steps a part may be empty: the last density with the same first step is the one that counts
    firsts = [index * options.warmup.steps // len(kept) for index in range(len(kept))] if kept else []
    steps = dict(zip(firsts, kept, strict=True))
    steps[options.warmup.steps if kept else 0] = target
    return Schedule(tuple(steps), tuple(steps.values()))


@dataclasses.dataclass(frozen=True)
class Auto:
    """The choice of `density="auto"`: dense where the gradients' norm changes much, sparse where it does not.

    Once in `AUTO_WINDOW_STEPS` steps the mean square norm of the reduced gradients is compared with that of the
    window before: where |old - new| is at least `AUTO_CHANGE` of old, and in the first window, the higher of
    `AUTO_DENSITIES` holds, else the lower (Accordion, algorithm 1).

    Args:
        window_steps: how many steps are looked at together.
        densities: the higher, the lower.
        change: the relative change of the norm from which the higher holds.
    """

    window_steps: int = AUTO_WINDOW_STEPS
    densities: tuple[float, float] = AUTO_DENSITIES
    change: float = AUTO_CHANGE

    def next(self, old: float, new: float) -> float:
        """Give the density of the next window.

        Args:
            old: the norm in the window before; below 0 where there is none.
            new: the norm in the window that has ended.

        Returns:
            One of `densities`.
        """
        critical = old < 0 or abs(old - new) >= self.change * old
        return self.densities[0] if critical else self.densities[1]
