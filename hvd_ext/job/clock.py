"""How far the clocks of the ranks are apart: bounds that follow from causality, without assumptions on the network.

All ranks make the same exchanges through rank 0. An exchange ends on a rank only after every rank has announced it. For
exchange k, let a_r(k) be the time at which rank r announced it and e_r(k) the time at which it ended on rank r, both on
rank r's own clock, and let d be rank r's clock minus rank 0's. Then

    a_r(k) - e_0(k)  <=  d  <=  e_r(k) - a_0(k)

d lies between the tightest of these bounds over all k. Their middle is the estimate, and half their distance is its
uncertainty.
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
        uncertainty_ns: the true offset differs from `offset_ns` by at most this.
    """

    offset_ns: int
    uncertainty_ns: int


@dataclasses.dataclass(frozen=True)
class Stamps:
    """When a rank announced exchanges and when they ended there, in ns of its own clock, and the machine it runs on."""

    announced: Sequence[int]
    ended: Sequence[int]
    machine: str


def estimate(local: Stamps, root: Stamps) -> Clock:
    """Bound a clock's offset by stamps of the same exchanges on rank 0; 0 if both read the clock of one machine."""
    low = max(a - e for a, e in zip(local.announced, root.ended, strict=True))
    high = min(e - a for e, a in zip(local.ended, root.announced, strict=True))
    # A container may have its own clock; then 0 lies outside of the bounds.
    if local.machine and local.machine == root.machine and low <= 0 <= high:
        return Clock(0, 0)
    return Clock((low + high) // 2, (high - low + 1) // 2)


def measure(engine: Engine) -> Clock:
    """Compare this rank's clock with rank 0's; all ranks call this function."""
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
