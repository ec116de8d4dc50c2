"""By how much the steps of ranks differ, as a few words describe it, and what steps that do not wait for all gain."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvd_ext.errors import InvalidError
from hvd_ext.simulation.modes import MODES
from hvd_ext.simulation.rounds import Rules, Seconds, play

STEPS = 1000
_WARM_UP = STEPS // 10
_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_TIME = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(us|ms|s)")

KINDS = {
    "one": "one:200ms: a random rank of each step",
    "uniform": "uniform:50ms,400ms: each rank, evenly between two times",
    "shifting": "shifting:50ms,400ms: each rank, by equal distances from least to most, a rank further after each step",
    "lognormal": "lognormal:55ms,116ms: each rank, by mean and standard deviation",
    "ranks": "ranks:0ms,0ms,30ms: each rank by its own time, in every step",
}
_NUMBERS = {"one": 1, "uniform": 2, "shifting": 2, "lognormal": 2}


@dataclass(frozen=True)
class Skew:
    """What steps take longer than their computation; see `KINDS`."""

    kind: str
    times_s: tuple[float, ...]

    @classmethod
    def read(cls, text: str) -> Skew:
        """Read what a user writes.

        Raises:
            InvalidError: the text is none of `KINDS`, or its times do not fit.
        """
        kind, _, rest = text.partition(":")
        matches = [_TIME.fullmatch(part.strip()) for part in rest.split(",")]
        if kind not in KINDS or None in matches or len(matches) != _NUMBERS.get(kind, len(matches)):
            raise InvalidError(f"skew {text!r}: must be one of: " + "; ".join(KINDS.values()))
        times_s = tuple(float(match[1]) * _UNITS_S[match[2]] for match in matches if match)
        if kind in ("uniform", "shifting") and times_s[0] > times_s[1]:
            raise InvalidError(f"skew {text!r}: the first time must not be longer than the second one")
        if kind == "lognormal" and not times_s[0]:
            raise InvalidError(f"skew {text!r}: the mean must be above 0")
        return cls(kind, times_s)

    def seconds(self, ranks: int, steps: int, seed: int = 0) -> Seconds:
        """Draw by how much each step of each rank is longer, seconds [ranks, steps].

        Raises:
            InvalidError: there is not one time for each rank.
        """
        random, shape = np.random.default_rng(seed), (ranks, steps)
        if self.kind == "ranks":
            if len(self.times_s) != ranks:
                raise InvalidError(f"skew of {len(self.times_s)} ranks: must have a time for each of {ranks}")
            return np.repeat(np.array(self.times_s)[:, None], steps, 1)
        if self.kind == "one":
            delays = np.zeros(shape)
            delays[random.integers(ranks, size=steps), np.arange(steps)] = self.times_s[0]
            return delays
        first, second = self.times_s
        if self.kind == "uniform":
            return random.uniform(first, second, shape)
        if self.kind == "shifting":
            places = (np.arange(ranks)[:, None] + np.arange(steps)) % ranks
            return np.asarray(first + (second - first) * places / max(1, ranks - 1))
        variance = np.log1p((second / first) ** 2)
        return random.lognormal(np.log(first) - variance / 2, np.sqrt(variance), shape)


@dataclass(frozen=True)
class Gain:
    """A mode of `sync=` on ranks whose steps differ.

    Args:
        step_s: of a step, in the mean.
        speedup: over full steps.
        active: the mean number of gradients that are on time.
        staleness: how many gradients were late by 0, 1, ... rounds, as shares [largest staleness + 1].
        waited_s: how long a rank waited in a step, in the mean over ranks and steps.
    """

    ranks: int
    mode: str
    step_s: float
    speedup: float
    active: float
    staleness: tuple[float, ...]
    waited_s: float

    @property
    def mean_staleness(self) -> float:
        """How many rounds a gradient was late, in the mean."""
        return float(np.dot(self.staleness, np.arange(len(self.staleness))))


def rules_of(mode: str, staleness: int, ranks: int) -> Rules:
    """Give the rules of a mode as the user writes it: "full", "delay", "solo", "majority", or "quorum:Q".

    Raises:
        InvalidError: there is no such mode, or the quorum does not fit.
    """
    name, colon, rest = mode.partition(":")
    if name not in (*MODES, "delay") or bool(colon) != (name == "quorum"):
        raise InvalidError(f"sync {mode!r}: must be full, delay, solo, majority or quorum:Q")
    if name == "quorum" and not (rest.isdecimal() and 1 <= int(rest) <= ranks):
        raise InvalidError(f"sync {mode!r}: must be a number of ranks, in [1, {ranks}]")
    if name in ("full", "delay"):
        return Rules(delay=int(name == "delay"))
    return Rules(name, int(rest) if rest else 1, staleness)


def gains(
    ranks: int,
    computing_s: float,
    full_s: float,
    round_s: float,
    skew: Skew,
    modes: Sequence[str],
    staleness: int = 4,
    seed: int = 0,
) -> list[Gain]:
    """Play `STEPS` steps in each mode.

    Args:
        computing_s: of a step without skew and communication, seconds.
        full_s: the communication of a full step that computation does not hide, seconds.
        round_s: the communication of the whole gradient after the computation, as rounds that do not wait have it.

    Raises:
        InvalidError: an argument is outside of its range.
    """
    step_s = computing_s + skew.seconds(ranks, STEPS, seed)
    full = play(step_s, Rules(), full_s)
    gains_of_modes = []
    for mode in modes:
        rules = rules_of(mode, staleness, ranks)
        played = full if mode == "full" else play(step_s, rules, round_s)
        counts = played.staleness / played.staleness.sum()
        # with a delay a gradient is in the round of its step, whose result is taken one step later
        late = np.concatenate([np.zeros(rules.delay), counts])
        gains_of_modes.append(
            Gain(
                ranks,
                mode,
                1 / played.rounds_per_s(_WARM_UP),
                played.rounds_per_s(_WARM_UP) / full.rounds_per_s(_WARM_UP),
                0.0 if rules.delay else played.active,
                tuple(late.tolist()),
                float(played.waited_s.mean()) / STEPS,
            )
        )
    return gains_of_modes
