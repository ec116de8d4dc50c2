"""The play of partial rounds: which gradient of which rank is in which round, and when; no plans, no messages.

A round is one allreduce of a whole step's gradients in which every rank takes part, also one that still computes its
own. Step s of every rank takes the result of round s. The rules are those of `tf_ops/engine/rounds.cc`: rank 0 hears
which gradients are there and opens the rounds; every rank decides for itself when it takes part in an open round. A
round runs when the last rank takes part and the round before it is over. A rank that has taken all its steps leaves: no
round waits for it, and it takes the rounds that are left without a gradient.

Source: Li et al., "Taming Unbalanced Training Workloads in Deep Learning with Partial Collective Operations"
(eager-SGD), sections 4 and 5.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from hvd_ext.errors import InvalidError
from hvd_ext.simulation.modes import MODES

_BITS = (1 << 64) - 1

Seconds = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rules:
    """When rounds begin; the arguments of `hvd_ext.DistributedOptimizer`.

    Args:
        mode: one of `MODES`: whose gradients a round waits for: all, the first, that of a drawn rank, or `quorum`.
        quorum: with "quorum", how many gradients a round waits for, from 1 to the number of ranks.
        staleness: the largest number of rounds by which a gradient may come late.
        seed: decides which ranks are drawn with "majority", in [0, 2^64).
        before: rounds that came before round 1; they shift the draws.
        delay: 1: a step takes the result of the round before its own, so that the next step's computation hides the
            round; only with "full".

    Raises:
        InvalidError: an argument is outside of its range.
    """

    mode: str = "full"
    quorum: int = 1
    staleness: int = 4
    seed: int = 0
    before: int = 0
    delay: int = 0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InvalidError(f"mode ({self.mode!r}): must be one of {', '.join(map(repr, MODES))}")
        for name, value, most in (
            ("quorum", self.quorum - 1, None),
            ("staleness", self.staleness, None),
            ("seed", self.seed, _BITS),
            ("before", self.before, None),
            ("delay", self.delay, 1 if self.mode == "full" else 0),
        ):
            if value < 0 or (most is not None and value > most):
                raise InvalidError(f"{name} ({getattr(self, name)}) with mode {self.mode!r}: outside of its range")


def active(arrived: Numbers) -> Numbers:
    """Count the ranks that gave the gradient of the very step to each round [rounds]; `arrived` is as in `Played`."""
    return np.count_nonzero(arrived >= np.arange(1, len(arrived) + 1)[:, None], 1).astype(np.int64)


def staleness(arrived: Numbers, steps: Sequence[int] | Numbers | None = None) -> Numbers:
    """Count the gradients that were in a round 0, 1, ... rounds after their own.

    Args:
        steps: how many steps each rank took with a gradient [ranks]; if a rank took any without one. Gradients that are
            still held do not count.

    Returns:
        Counts [largest staleness + 1].
    """
    late: list[Numbers] = [np.zeros(0, np.int64)]
    for rank, column in enumerate(arrived.T):
        most = int(column.max(initial=0)) if steps is None else min(int(column.max(initial=0)), int(steps[rank]))
        numbers = np.arange(1, most + 1)
        late.append(np.searchsorted(column, numbers) + 1 - numbers)
    return np.bincount(np.concatenate(late), minlength=1)


@dataclass(frozen=True)
class Played:
    """Rounds that have been played. Times are seconds from the begin of the first step; round t has the row t - 1.

    Args:
        opened_s: when rank 0 opened each round [rounds].
        begins_s: when the last rank took part and the round before was over [rounds].
        finished_s: when the round was over [rounds].
        arrived: for each rank the newest step whose gradient is in the round or was in one before it [rounds, ranks],
            as the engine records it.
        steps: how many steps each rank took [ranks].
        gradients_s: when each gradient was there; NaN after a rank's last step [ranks, steps].
        ends_s: when each step had its result; NaN after a rank's last step [ranks, steps].
    """

    opened_s: Seconds
    begins_s: Seconds
    finished_s: Seconds
    arrived: Numbers
    steps: Numbers
    gradients_s: Seconds
    ends_s: Seconds

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return len(self.finished_s)

    @property
    def waited_s(self) -> Seconds:
        """How long each rank waited for results in all [ranks]."""
        return np.asarray(np.nansum(self.ends_s - self.gradients_s, 1))

    @property
    def active(self) -> float:
        """The mean number of ranks whose gradient of the very step is in its round."""
        return float(active(self.arrived).mean())

    @property
    def staleness(self) -> Numbers:
        """How many gradients were in a round later than their own by 0, 1, ... rounds [largest staleness + 1]."""
        return staleness(self.arrived, self.steps)

    def rounds_per_s(self, after: int = 0) -> float:
        """Give the speed.

        Args:
            after: rounds at the begin that do not count.
        """
        since_s = self.finished_s[after - 1] if after else 0.0
        return float((self.rounds - after) / (self.finished_s[-1] - since_s))


def drawn_for(seed: int, number: int, candidates: int) -> int:
    """Draw the rank that a round of mode "majority" waits for, as `DrawnFor` of `tf_ops/engine/rounds.cc` does.

    Args:
        seed: in [0, 2^64).

    Returns:
        The place of the rank among the candidates.
    """
    drawn = _mixed(_mixed(seed) ^ number)
    while drawn >= _BITS - _BITS % candidates:
        drawn = _mixed(drawn)
    return drawn % candidates


def _mixed(x: int) -> int:
    x = x + 0x9E3779B97F4A7C15 & _BITS
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _BITS
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _BITS
    return x ^ x >> 31


def play(
    step_s: npt.ArrayLike,
    rules: Rules,
    round_s: float = 0.0,
    *,
    steps: Sequence[int] | None = None,
    word_s: float | Sequence[float] = 0.0,
    flushed: Collection[int] = (),
) -> Played:
    """Play the steps of all ranks.

    A gradient that comes at the very time at which a rank takes part is on time.

    Args:
        step_s: how long each rank computes until its gradient of the step is there, seconds [ranks, steps].
        round_s: of the allreduce, from the time at which the last rank takes part, seconds.
        steps: how many steps each rank takes; all by default.
        word_s: how long a word takes between rank 0 and each other rank, of a gradient or of an open round, seconds.
        flushed: the steps whose round waits for all ranks, whatever the mode.

    Raises:
        InvalidError: an argument has another shape, or is outside of its range.
    """
    times_s = np.array(step_s, np.float64)
    if times_s.ndim != 2 or not times_s.size:
        raise InvalidError(f"step_s {times_s.shape}: must be [ranks, steps], at least 1 of each")
    ranks, most = times_s.shape
    counts = np.array([most] * ranks if steps is None else steps, np.int64)
    if counts.shape != (ranks,) or counts.min() < 1 or counts.max() != most:
        raise InvalidError(f"steps {counts.tolist()}: must have a number in [1, {most}] for each rank, {most} for one")
    words_s = np.array([0.0] + [word_s] * (ranks - 1) if np.isscalar(word_s) else word_s, np.float64)
    if words_s.shape != (ranks,):
        raise InvalidError(f"word_s {words_s.shape}: must have a time for each of {ranks} ranks, or be one")
    for name, value in (("step_s", times_s), ("round_s", np.array(round_s)), ("word_s", words_s)):
        if not (np.isfinite(value) & (value >= 0)).all():
            raise InvalidError(f"{name}: must be finite, 0 or more")
    if rules.quorum > ranks:
        raise InvalidError(f"quorum ({rules.quorum}): must be in [1, {ranks}]")
    return _Play(times_s, counts, rules, float(round_s), words_s, frozenset(flushed)).played()


class _Opener:
    """On rank 0: which rounds are open (`RoundOpener` of rounds.cc)."""

    def __init__(self, rules: Rules, ranks: int) -> None:
        self._rules = rules
        self._arrived = np.zeros(ranks, np.int64)
        self._left = np.zeros(ranks, np.bool_)
        self._opened = self._full = 0

    def arrive(self, rank: int, step: int, full: bool) -> None:
        self._arrived[rank] = step
        if full:
            self._full = max(self._full, step)

    def leave(self, rank: int) -> None:
        self._left[rank] = True

    def opened(self) -> int:
        while self._may_open(self._opened + 1):
            self._opened += 1
        return self._opened

    def _may_open(self, number: int) -> bool:
        there = self._arrived >= number
        arrived = int(np.count_nonzero(there))
        if not arrived:
            return False
        rules = self._rules
        if rules.mode == "solo" and number > self._full:
            return True
        here = there[there | ~self._left]  # of the ranks that give a gradient to this round, now or later
        if rules.mode == "full" or number <= self._full:
            return arrived == len(here)
        if rules.mode == "majority":
            return bool(here[drawn_for(rules.seed, rules.before + number, len(here))])
        return arrived >= min(rules.quorum, len(here))


@dataclass
class _Rank:
    """Where a rank is, and which rounds it takes part in (`RoundGate` of rounds.cc)."""

    step: int = 1  # the one that it computes, or waits for
    arrived: int = 0
    opened: int = 0
    begun: int = 0
    waits: bool = False  # for the result of its step
    left: bool = False

    def takes_part(self, staleness: int) -> bool:
        return self.begun < self.opened and (self.left or self.begun + 1 - self.arrived <= staleness)


# Events: a gradient is there; rank 0 hears of it, or that a rank has left (0); a rank hears of an open round; a round
# is over. Of those at one time the first kind comes first.
_GRADIENT, _HEARD, _OPEN, _OVER = 0, 1, 2, 3


class _Play:
    def __init__(
        self,
        times_s: Seconds,
        counts: Numbers,
        rules: Rules,
        round_s: float,
        words_s: Seconds,
        flushed: frozenset[int],
    ) -> None:
        self._times_s, self._counts, self._rules, self._round_s = times_s, counts.tolist(), rules, round_s
        self._words_s, self._flushed = words_s.tolist(), flushed
        ranks, most = times_s.shape
        self._ranks = [_Rank() for _ in range(ranks)]
        self._opener = _Opener(rules, ranks)
        self._opened_s: list[float] = []
        self._begins_s = np.zeros(most)
        self._finished_s = np.full(most, np.inf)
        self._over = 0
        self._taking_part = [0] * (most + 1)
        self._arrived = np.zeros((most, ranks), np.int64)
        self._gradients_s = np.full((ranks, most), np.nan)
        self._ends_s = np.full((ranks, most), np.nan)
        self._events: list[tuple[float, int, int, int, int]] = []
        self._made = 0

    def played(self) -> Played:
        for rank in range(len(self._ranks)):
            self._push(float(self._times_s[rank, 0]), _GRADIENT, rank, 1)
        events = self._events
        while events:
            now_s, kind, _, rank, number = heappop(events)
            if kind == _GRADIENT:
                self._gradient(rank, number, now_s)
            elif kind == _HEARD:
                self._heard(rank, number, now_s)
            elif kind == _OPEN:
                self._ranks[rank].opened = max(self._ranks[rank].opened, number)
                self._begin_rounds(rank, now_s)
            else:
                self._end_round(number, now_s)
        return Played(
            np.array(self._opened_s),
            self._begins_s,
            self._finished_s,
            self._arrived,
            np.array(self._counts, np.int64),
            self._gradients_s,
            self._ends_s,
        )

    def _push(self, at_s: float, kind: int, rank: int, number: int) -> None:
        heappush(self._events, (at_s, kind, self._made, rank, number))
        self._made += 1

    def _gradient(self, rank: int, step: int, now_s: float) -> None:
        state = self._ranks[rank]
        state.arrived = step
        self._gradients_s[rank, step - 1] = now_s
        self._push(now_s + self._words_s[rank], _HEARD, rank, step)
        self._begin_rounds(rank, now_s)  # the bound may have waited for it
        state.waits = True
        self._go_on(rank, now_s)

    def _go_on(self, rank: int, now_s: float) -> None:
        """Ends the rank's step if its result is there, and begins the next one."""
        state = self._ranks[rank]
        if not state.waits or state.step - self._rules.delay > self._over:
            return
        self._ends_s[rank, state.step - 1] = now_s
        state.waits = False
        if state.step < self._counts[rank]:
            state.step += 1
            self._push(now_s + float(self._times_s[rank, state.step - 1]), _GRADIENT, rank, state.step)
            return
        state.left = True
        state.arrived = max(state.arrived, self._over)
        self._push(now_s + self._words_s[rank], _HEARD, rank, 0)
        self._begin_rounds(rank, now_s)

    def _heard(self, rank: int, step: int, now_s: float) -> None:
        if step:
            self._opener.arrive(rank, step, step in self._flushed)
        else:
            self._opener.leave(rank)
        opened = self._opener.opened()
        if opened == len(self._opened_s):
            return
        self._opened_s += [now_s] * (opened - len(self._opened_s))
        for other, word_s in enumerate(self._words_s):
            self._push(now_s + word_s, _OPEN, other, opened)

    def _begin_rounds(self, rank: int, now_s: float) -> None:
        state = self._ranks[rank]
        while state.takes_part(self._rules.staleness):
            state.begun += 1
            number = state.begun
            # with a delay the gradient of the next step may be there too, which is not in this round
            self._arrived[number - 1, rank] = min(state.arrived, number)
            self._taking_part[number] += 1
            if self._taking_part[number] == len(self._ranks):
                # the round before has all ranks too, so that its end is known
                begin_s = now_s if number == 1 else max(now_s, float(self._finished_s[number - 2]))
                self._begins_s[number - 1] = begin_s
                self._finished_s[number - 1] = begin_s + self._round_s
                self._push(begin_s + self._round_s, _OVER, 0, number)

    def _end_round(self, number: int, now_s: float) -> None:
        self._over = number
        for rank, state in enumerate(self._ranks):
            if state.left:
                state.arrived = max(state.arrived, number)  # it takes the round without a gradient
            self._go_on(rank, now_s)
