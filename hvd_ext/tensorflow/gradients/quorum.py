"""The quorum of sync="auto": every 100 rounds rank 0 chooses how many gradients a round waits for.

It knows when the word of each gradient came to it, and so how long each rank computed each step. With these times it
plays the rounds (`hvd_ext.simulation.rounds`) for several quorums, and takes the largest one that is nearly as fast as
the fastest: among speeds that are alike, the most gradients on time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hvd_ext.job import banner
from hvd_ext.job.log import logger
from hvd_ext.simulation import rounds as simulated

if TYPE_CHECKING:
    from hvd_ext.engine.partial import Rounds
    from hvd_ext.job.runtime import Runtime
    from hvd_ext.tensorflow.gradients.channel import Channel

EVERY = 100  # rounds between two choices
NEARLY = 0.97  # of the speed of the fastest quorum
_FEWEST = 20  # rounds with the times of all ranks, for a choice
_ALL_UP_TO = 8  # ranks for which every quorum is tried; among more, powers of two and all


class AutoQuorum:
    """The choice of one channel's quorum, on rank 0.

    Attributes:
        quorum: the quorum of the rounds that are not open yet.

    Args:
        channel: the channel, whose rounds wait for a quorum; at first all ranks.
    """

    def __init__(self, channel: Channel, job: Runtime) -> None:
        self.quorum = job.engine.size
        self._channel, self._job = channel, job
        job.engine.at_step(channel.handle, 1 + EVERY, self._choose)

    def set(self, quorum: int) -> None:
        """Go on with the quorum of an earlier job."""
        self.quorum = min(quorum, self._job.engine.size)
        self._job.engine.set_quorum(self._channel.handle, self.quorum)

    def _choose(self, step: int) -> None:
        """Choose before a step; it must not raise."""
        try:
            first = max(1, step - EVERY)
            recent = self._job.engine.rounds(self._channel.handle, first, EVERY)
            partial = self._channel.partial
            assert partial is not None
            speeds = speeds_of(recent, partial.options.staleness)
            if speeds:
                self.set(chosen(speeds))
                banner.say(self._job, f"{self._channel.name}: after round {step - 1}: {why(speeds)}")
            self._job.engine.at_step(self._channel.handle, step + EVERY, self._choose)
        except Exception as error:
            logger.warning("%s: its quorum stays at %d: %s", self._channel.name, self.quorum, error)


def computing_s(recent: Rounds) -> np.ndarray:
    """Find how long each rank computed each step whose times rank 0 knows: seconds [ranks, steps]."""
    announced_s = recent.announced_s
    begins_s = np.maximum(announced_s[:-1], recent.finished_s[:-1, None])
    known = (announced_s[1:] > 0).all(1) & (announced_s[:-1] > 0).all(1)
    return np.maximum(announced_s[1:] - begins_s, 0.0)[known].T


def speeds_of(recent: Rounds, staleness: int) -> dict[int, float]:
    """Predict the speed of each quorum. Returns rounds a second by quorum; nothing where too few times are known."""
    step_s = computing_s(recent)
    ranks, steps = step_s.shape
    if steps < _FEWEST:
        return {}
    # the quickest ones: in the others some engine came late
    round_s = float(np.quantile(recent.finished_s - recent.begins_s, 0.25))
    powers = [1 << power for power in range(ranks.bit_length()) if 1 << power < ranks]
    candidates = range(1, ranks + 1) if ranks <= _ALL_UP_TO else [*powers, ranks]
    return {
        quorum: simulated.play(
            step_s, simulated.Rules("quorum", quorum=quorum, staleness=staleness), round_s
        ).rounds_per_s(after=steps // 10)
        for quorum in candidates
    }


def chosen(speeds: dict[int, float]) -> int:
    """Choose the largest quorum whose speed is at least `NEARLY` of the fastest one's."""
    fastest = max(speeds.values())
    return max(quorum for quorum, speed in speeds.items() if speed >= NEARLY * fastest)


def why(speeds: dict[int, float]) -> str:
    """Say what was chosen, and why."""
    ranks, quorum = max(speeds), chosen(speeds)
    gains = {candidate: speed / speeds[ranks] for candidate, speed in speeds.items()}
    others = ", ".join(
        f"{candidate}: {gains[candidate]:.2f}" for candidate in sorted(gains) if candidate not in (quorum, ranks)
    )
    return (
        f"a step waits for {quorum} of {ranks} gradients, {gains[quorum]:.2f} times as fast as for all of them by the "
        f"times of the last rounds{f' ({others})' if others else ''}"
    )
