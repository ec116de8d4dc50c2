"""How long ranks compute, by workload: pure functions of a seed, the step and the rank, in seconds that are slept.

Source: Li et al., "Taming Unbalanced Training Workloads in Deep Learning with Partial Collective Operations"
(eager-SGD, PPoPP 2020): sections 2.1 to 2.3, 6.2.1 and 6.2.3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

# of a seed, a step, a rank and the number of ranks
Slept = Callable[[int, int, int, int], float]


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a rank does in a step: it sleeps, spends processor time, and trains a linear model.

    Attributes:
        slept_s: gives how long a rank sleeps in a step, seconds.
        processor_s: processor time that a rank spends beside training, seconds.
        dimensions: of the inputs of the linear model.
        batch: examples of a step, of all ranks together.
    """

    slept_s: Slept
    processor_s: float = 0.0
    dimensions: int = 256
    batch: int = 128


def one_delayed(delay_s: float, slept_s: float = 0.030) -> Slept:
    """Section 6.2.1: in each step one rank, drawn evenly, is delayed. All ranks sleep for `slept_s` besides."""

    def slept(seed: int, step: int, rank: int, ranks: int) -> float:
        drawn = int(np.random.default_rng((seed, step)).integers(ranks))
        return slept_s + (delay_s if rank == drawn else 0.0)

    return slept


def shifted(least_s: float, most_s: float) -> Slept:
    """Section 6.2.3: the ranks have delays at equal distances, and each has its neighbour's in the next step."""

    def slept(seed: int, step: int, rank: int, ranks: int) -> float:
        return least_s + (most_s - least_s) * ((seed + rank + step) % ranks) / max(ranks - 1, 1)

    return slept


def spread(least_s: float, most_s: float, mean_s: float, deviation_s: float) -> Slept:
    """Times with a least, a most, a mean and a standard deviation, independent of each other.

    The paper tells these four numbers of each of its distributions; a beta distribution has all four.
    """
    width_s = most_s - least_s
    mean = (mean_s - least_s) / width_s
    both = mean * (1 - mean) / (deviation_s / width_s) ** 2 - 1

    def slept(seed: int, step: int, rank: int, ranks: int) -> float:
        return least_s + width_s * float(np.random.default_rng((seed, step, rank)).beta(mean * both, (1 - mean) * both))

    return slept


WORKLOADS = {
    **{
        f"hyperplane-{delay_ms}": Workload(one_delayed(delay_ms / 1000), dimensions=8192, batch=2048)
        for delay_ms in (200, 300, 400)
    },
    "severe": Workload(shifted(0.050, 0.400), processor_s=0.015),
    # a tenth of the times of sections 2.1, 2.2 and 2.3
    "video": Workload(spread(0.0201, 0.3410, 0.1235, 0.0706)),
    "language": Workload(spread(0.0179, 0.3482, 0.0475, 0.0144)),
    "cloud": Workload(spread(0.0399, 0.1892, 0.0454, 0.0116)),
}
