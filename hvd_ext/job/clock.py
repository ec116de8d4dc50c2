"""How far the clocks of the ranks are apart: bounds from causality alone, no assumption on the network.

All ranks make the same exchanges through rank 0. An exchange ends on a rank only after every rank has announced it. So
for each exchange k, with a_r(k) the time at which rank r announced it and e_r(k) the time at which it ended there, both
on rank r's own clock, and d the time on rank r's clock minus that on rank 0's:

    a_r(k) - e_0(k)  <=  d  <=  e_r(k) - a_0(k)

The tightest bounds over all k hold d; the middle is the estimate and half the width its uncertainty.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_ext.job import consensus

if TYPE_CHECKING:
    from hvd_ext.engine.engine import Engine

EXCHANGES = 10
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True)
class Clock:
    """A rank's clock against rank 0's.

    Args:
        offset_ns: this rank's clock minus rank 0's.
        uncertainty_ns: the true offset is at most so far from `offset_ns`.
    """

    offset_ns: int
    uncertainty_ns: int


@dataclasses.dataclass(frozen=True)
class Stamps:
    """When a rank announced exchanges and when they ended there, in ns of its own clock, and whose clock that is."""

    announced: Sequence[int]
    ended: Sequence[int]
    machine: str


def estimate(mine: Stamps, root: Stamps) -> Clock:
    """Bound the offset between two clocks.

    Args:
        mine: of this rank.
        root: of rank 0, for the same exchanges.

    Returns:
        The estimate; offset and uncertainty 0 where both ranks read the clock of one machine.
    """
    low = max(a - e for a, e in zip(mine.announced, root.ended, strict=True))
    high = min(e - a for e, a in zip(mine.ended, root.announced, strict=True))
    # A container may have a clock of its own: then 0 is out of bounds.
    if mine.machine and mine.machine == root.machine and low <= 0 <= high:
        return Clock(0, 0)
    return Clock((low + high) // 2, (high - low + 1) // 2)


def measure(engine: Engine) -> Clock:
    """Compare this rank's clock with rank 0's; all ranks call it.

    Args:
        engine: the running engine.

    Returns:
        This rank's clock.
    """
    announced, ended = [], []
    for _ in range(EXCHANGES):
        announced.append(time.monotonic_ns())
        engine.exchange("clocks of the trace", b"")
        ended.append(time.monotonic_ns())

    def stamps() -> dict[str, object]:
        machine = _BOOT.read_text(encoding="ascii").strip() if _BOOT.exists() else ""
        return {"announced": announced, "ended": ended, "machine": machine}

    answers = consensus.exchange(engine, "clocks of the trace", stamps)
    return estimate(Stamps(**answers[engine.rank]), Stamps(**answers[0]))
