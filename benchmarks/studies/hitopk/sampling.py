"""What a rank of the study of sparse sums does besides timing: bytes on the wire, the time of levels, the check."""

from __future__ import annotations

import dataclasses
import statistics
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_ext.bench.sampling import Contestant, Ranks, Sampler

# Gaussian values in whole numbers of 1/256 sigma: sums of them are exact in float32 for many ranks and steps.
SCALE = 256
# A half-precision wire rounds at every addition between ranks.
TOLERANCE = 4e-3
PROBES = 1009


class Gradient:
    """A rank's gradient: whole numbers with a Gaussian distribution, different on every rank."""

    def __init__(self, rank: int, elements: int) -> None:
        """Draw the elements of one rank."""
        draws = np.random.default_rng(rank).standard_normal(elements, np.float32)
        draws *= SCALE
        self.values: NDArray[np.float32] = np.rint(draws, out=draws)
        self.places = np.linspace(0, max(elements - 1, 0), min(elements, PROBES)).astype(np.int64)

    def total(self) -> float:
        """Give the sum of this rank's elements, which is exact."""
        return float(np.sum(self.values, dtype=np.float64))


class Mass:
    """The check of one way to sum, over all its steps.

    A sparse sum keeps what it does not send: the results of all steps and the residuals of all ranks add up to all
    gradients, exactly.
    """

    def __init__(
        self,
        gradient: Gradient,
        *,
        exact: bool = True,
        most: int = 0,
        residual: Callable[[], float] | None = None,
        sent: Callable[[], tuple[int, int]] = lambda: (0, 0),
        trace: Callable[[Callable[[], None]], tuple[dict[str, float], Any]] | None = None,
        facts: dict[str, Any] | None = None,
    ) -> None:
        """Begin before the first step.

        Args:
            gradient: this rank's.
            exact: whether a dense sum is without rounding.
            most: the most elements of a sparse sum that are not 0.
            residual: gives the sum of this rank's residual; None for dense sums.
            sent: gives the number of entries that this rank has sent so far, and their bytes.
            trace: does a step under the trace, then waits for all ranks by its argument; gives the seconds of each
                level on this rank, and the result.
            facts: of the contestant, for its row.
        """
        self.gradient, self.exact, self.most, self.residual = gradient, exact, most, residual
        self.sent, self.trace, self.facts = sent, trace, dict(facts or {})
        self._steps, self._total = 0, 0.0

    def fault(self, result: Any, ranks: Ranks) -> str:
        """Check the result of one more step, float32 [elements], on all ranks; give what is wrong in words."""
        seen = np.ascontiguousarray(result, np.float32).reshape(-1)
        if seen.shape != self.gradient.values.shape:
            return f"shape {seen.shape}, must be {self.gradient.values.shape}"
        self._steps += 1
        self._total += float(np.sum(seen, dtype=np.float64))
        kept = self.residual() if self.residual is not None else 0.0
        probes = self.gradient.values[self.gradient.places]
        answers = ranks.gather((zlib.crc32(seen.data), self.gradient.total(), kept, probes))
        if len({answer[0] for answer in answers}) > 1:
            return "the ranks have different results"
        if self.residual is None:
            right = np.sum([answer[3] for answer in answers], axis=0)
            tolerance = 0.0 if self.exact else TOLERANCE
            near = np.isclose(seen[self.gradient.places], right, rtol=tolerance, atol=tolerance * SCALE)
            if near.all():
                return ""
            first = int(np.flatnonzero(~near)[0])
            place = int(self.gradient.places[first])
            return f"element {place} is {seen[place]}, must be {right[first]}"
        right_total = self._steps * sum(answer[1] for answer in answers)
        total = self._total + sum(answer[2] for answer in answers)
        if total != right_total:
            return f"results and residuals of {self._steps} steps add up to {total:g}, must be {right_total:g}"
        count = int(np.count_nonzero(seen))
        return f"{count} elements are not 0, must be {self.most} at most" if count > self.most else ""


@dataclasses.dataclass(frozen=True)
class Watched(Contestant):
    """A contestant and the check of its sums."""

    mass: Mass | None = None


def shares_of(rounds: Sequence[Any], levels: Any) -> dict[str, float]:
    """Divide the time of a step among the levels of its plan.

    Args:
        rounds: records of one step of one rank.
        levels: their names, and the first round after each.

    Returns:
        By name, the seconds from the end of the level before to the end of this one; together they are the step's.
    """
    last = min((record.begin_ns for record in rounds), default=0)
    shares: dict[str, float] = {}
    begin = 0
    for name, end in zip(levels.names, levels.ends, strict=True):
        after = max([last, *(record.end_ns for record in rounds if begin <= record.round < end)])
        shares[name] = shares.get(name, 0.0) + (after - last) / 1e9
        last, begin = after, end
    return shares


def wire_bytes(device: str = "eth0", path: str = "/proc/self/net/dev") -> int:
    """Give the bytes that this host has sent on a link so far, frames included; 0 if there is no such link.

    Args:
        device: the link.
        path: the kernel's table for the network namespace of this process.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    found = [line.split(":", 1)[1].split() for line in lines if line.split(":", 1)[0].strip() == device]
    return int(found[0][8]) if found else 0


class MassSampler(Sampler):
    """A sampler that also takes the bytes on the wire and the times of levels, and checks sums with `Mass`."""

    _wire_bytes = 0

    def sample(self, index: int, warm: bool = True) -> dict[str, Any]:
        """Take one sample.

        Args:
            index: of the contestant.
            warm: whether this is a part of the measurement, and no trial before it.

        Returns:
            What the base class gives, and also: wire_bytes of each rank's host during the call; entries and entry_bytes
            that all ranks have sent; levels, the seconds of each by name in one more step, means over the ranks.
        """
        mass = self._mass(index)
        # The check must see every step: there is one call in a sample, and none before it.
        self._calls[index] = 1
        before = self._ranks.gather((wire_bytes(), *mass.sent()))
        found = super().sample(index, warm=False)
        after = self._ranks.gather((self._wire_bytes, *mass.sent()))
        wires, entries, nbytes = (
            [end[place] - begin[place] for begin, end in zip(before, after, strict=True)] for place in range(3)
        )
        found.update(wire_bytes=wires, entries=sum(entries), entry_bytes=sum(nbytes), levels={})
        if warm and mass.trace is not None:
            self._ranks.meet()
            shares, result = mass.trace(self._ranks.meet)
            wrong = self._ranks.gather(mass.fault(result, self._ranks))
            found["wrong"] += [f"rank {rank}: {words}" for rank, words in enumerate(wrong) if words]
            all_shares = self._ranks.gather(shares)
            found["levels"] = {name: statistics.fmean(each[name] for each in all_shares) for name in shares}
        return found

    def facts(self) -> list[dict[str, Any]]:
        """Give the facts of the base class, with those of the contestants."""
        return [{**fact, "facts": self._mass(index).facts} for index, fact in enumerate(super().facts())]

    def _mass(self, index: int) -> Mass:
        one = self._contestants[index]
        assert isinstance(one, Watched)
        assert one.mass is not None
        return one.mass

    def _fault(self, one: Contestant, result: Any) -> str:
        assert isinstance(one, Watched)
        assert one.mass is not None
        # taken here, because what the check sends does not count
        self._wire_bytes = wire_bytes()
        return one.mass.fault(result, self._ranks)
