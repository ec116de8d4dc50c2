"""The density of each step.

All ranks must compute the same densities, so these are IEEE doubles.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The density of each step: one from each of the first steps on, which ascend from 0."""

    firsts: tuple[int, ...]
    densities: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Auto:
    """The choice of `density="auto"`: a high density while the gradients' norm changes much, else a low one.

    At the end of each window of steps, the root mean square norm of the reduced gradients is compared with that of the
    window before. If |old - new| is at least `change` times old, and in the first window, the next window has the
    higher density, else the lower (Accordion: Agarwal et al., MLSys 2021, algorithm 1). The paper compares epochs, with
    a change of 0.5 (section 4).

    Args:
        densities: the higher density, then the lower.
        change: the relative change of the norm from which the higher density is used.
    """

    window_steps: int = 100
    densities: tuple[float, float] = (0.1, 0.01)
    change: float = 0.5
