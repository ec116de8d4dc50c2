"""What a rank does besides timing when sparse sums are measured: bytes on the wire, the four steps, and the mass."""

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
    """A rank's gradient: whole numbers with a Gaussian distribution, other ones on every rank."""

    def __init__(self, rank: int, elements: int) -> None:
        """Draw it.

        Args:
            rank: this rank.
            elements: how many.
        """
        draws = np.random.default_rng(rank).standard_normal(elements, np.float32)
        draws *= SCALE
        self.values: NDArray[np.float32] = np.rint(draws, out=draws)
        self.places = np.linspace(0, max(elements - 1, 0), min(elements, PROBES)).astype(np.int64)

    def total(self) -> float:
        """The sum of this rank's elements; exact."""
        return float(np.sum(self.values, dtype=np.float64))


class Mass:
    """What has gone in and come out of one way to sum, over all its steps.

    A sparse sum keeps what it does not send: all its results and what the ranks keep add up to all gradients, exactly.
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
            exact: whether a dense sum has no rounding.
            most: elements that a sparse sum may have.
            residual: of sparse sums: the sum of all elements that this rank keeps.
            sent: entries that this rank has sent so far, and their bytes.
            trace: does a step under the trace, then waits for all ranks by its argument; gives the seconds of each
                level on this rank, and the result.
            facts: for the row.
        """
        self.gradient, self.exact, self.most, self.residual = gradient, exact, most, residual
        self.sent, self.trace, self.facts = sent, trace, dict(facts or {})
        self._steps, self._total = 0, 0.0

    def fault(self, result: Any, ranks: Ranks) -> str:
        """Check the result of one more step; all ranks do it alike.

        Args:
            result: of the step, float32 [elements].
            ranks: all.

        Returns:
            What is wrong, in words; empty where all is right.
        """
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
    """A contestant and its mass."""

    mass: Mass | None = None


def shares_of(rounds: Sequence[Any], levels: Any) -> dict[str, float]:
    """Divide the time of a step among the levels of its plan.

    Args:
        rounds: records of one step of one rank.
        levels: names, and the first round behind each.

    Returns:
        By name, seconds from the end of the level before to the end of this one; all add up to the step.
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
    """Count what this host has sent on its link.

    Args:
        device: the link.
        path: the kernel's table, of the network namespace of this process.

    Returns:
        Bytes with their frames; 0 where there is no such link.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    found = [line.split(":", 1)[1].split() for line in lines if line.split(":", 1)[0].strip() == device]
    return int(found[0][8]) if found else 0


class MassSampler(Sampler):
    """A sampler that checks sums by their mass, and keeps the bytes on the wire and the levels' times."""

    _wire_bytes = 0

    def sample(self, index: int, warm: bool = True) -> dict[str, Any]:
        """Take one sample.

        Args:
            index: of the contestant.
            warm: this is no trial before the measurement.

        Returns:
            As the base's, and besides: wire_bytes of each rank's host in the call; entries and entry_bytes that all
            ranks have sent; levels, seconds by name in one more step, means over the ranks.
        """
        mass = self._mass(index)
        # Every step is looked at, else its mass would be missing: one call in a sample, and none to warm up.
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
        """As the base's, with those of the contestants."""
        return [{**fact, "facts": self._mass(index).facts} for index, fact in enumerate(super().facts())]

    def _mass(self, index: int) -> Mass:
        one = self._contestants[index]
        assert isinstance(one, Watched)
        assert one.mass is not None
        return one.mass

    def _fault(self, one: Contestant, result: Any) -> str:
        assert isinstance(one, Watched)
        assert one.mass is not None
        # what the checks send does not count
        self._wire_bytes = wire_bytes()
        return one.mass.fault(result, self._ranks)
