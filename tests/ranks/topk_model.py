"""Hierarchical top-k with error feedback in NumPy: all ranks of all hosts in one process, step by step."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

HALVES = {"fp16": np.float16, "fp32": np.float32}


@dataclasses.dataclass
class Share:
    """What one rank keeps of a bucket: elements [begin, end), what waits, and its momentum."""

    begin: int
    end: int
    residual: np.ndarray
    velocity: np.ndarray


class Model:
    """A bucket on several hosts.

    Args:
        hosts: the number of ranks of each host; ranks are numbered host by host.
        elements: of the bucket.
        momentum: 0 for none.
        nesterov: as of keras.optimizers.SGD.
        masks: the momentum of what travels starts empty.
        wire: "fp16" or "fp32".
    """

    def __init__(
        self,
        hosts: Sequence[int],
        elements: int,
        momentum: float = 0.0,
        nesterov: bool = False,
        masks: bool = True,
        wire: str = "fp32",
    ) -> None:
        self.hosts = list(hosts)
        self.momentum, self.nesterov, self.masks, self.wire = np.float32(momentum), nesterov, masks, HALVES[wire]
        self.shares: list[list[Share]] = []
        for ranks in hosts:
            borders = [place * elements // ranks for place in range(ranks + 1)]
            self.shares.append(
                [
                    Share(low, high, np.zeros(high - low, np.float32), np.zeros(high - low, np.float32))
                    for low, high in itertools.pairwise(borders)
                ]
            )

    def step(self, gradients: Sequence[np.ndarray], density: float, dense: bool = False) -> np.ndarray:
        """Take a step.

        Args:
            gradients: float32, one for each rank, such that sums over ranks are exact.
            density: the part that travels.
            dense: all of it does.

        Returns:
            The sum over the ranks.
        """
        total = np.zeros_like(gradients[0])
        first = 0
        for ranks, shares in zip(self.hosts, self.shares, strict=True):
            summed = np.sum(gradients[first : first + ranks], axis=0, dtype=np.float32)
            first += ranks
            for share in shares:
                total[share.begin : share.end] += self._sent(share, summed[share.begin : share.end], density, dense)
        return total

    def waiting(self) -> np.ndarray:
        """Give the sum over the hosts of what waits."""
        return np.sum([np.concatenate([share.residual for share in shares]) for shares in self.shares], axis=0)

    def _sent(self, share: Share, gradient: np.ndarray, density: float, dense: bool) -> np.ndarray:
        step = gradient
        if self.momentum:
            share.velocity = self.momentum * share.velocity + gradient
            step = gradient + self.momentum * share.velocity if self.nesterov else share.velocity
        grown = share.residual + step
        if dense:
            share.residual = np.zeros_like(grown)
            return grown
        # floor(density * e + 0.5) of the first e elements of the bucket
        k = int(np.floor(density * share.end + 0.5) - np.floor(density * share.begin + 0.5))
        picked = np.argsort(-np.abs(grown), kind="stable")[:k]  # ties by lowest index
        sent = np.zeros_like(grown)
        sent[picked] = grown[picked].astype(self.wire).astype(np.float32)
        share.residual = grown - sent
        if self.masks:
            share.velocity[picked] = 0
        return sent


class SignModel(Model):
    """The same with signs in place of the largest elements, and the mean magnitude of a share as their scale."""

    def _sent(self, share: Share, gradient: np.ndarray, density: float, dense: bool) -> np.ndarray:
        grown = share.residual + gradient
        scale = np.float32(np.abs(grown.astype(np.float64)).sum() / max(len(grown), 1))
        sent = grown if dense else np.copysign(scale, grown)
        share.residual = grown - sent
        return sent


class QuantizedModel(Model):
    """The same with numbers of few bits and a scale for each block.

    Args:
        hosts: as of `Model`.
        elements: as of `Model`.
        bits: of a number.
        block: elements with one scale.
        sums: each host adds up a piece of each rank's share, and quantises the sum again; hosts are of one rank.
    """

    def __init__(self, hosts: Sequence[int], elements: int, bits: int, block: int, sums: bool = False) -> None:
        super().__init__(hosts, elements)
        self.bits, self.block, self.sums = bits, block, sums

    def step(self, gradients: Sequence[np.ndarray], density: float, dense: bool = False) -> np.ndarray:
        """Take a step."""
        total = super().step(gradients, density, dense)
        if not self.sums or dense:
            return total
        borders = [place * len(total) // len(self.hosts) for place in range(len(self.hosts) + 1)]
        for host, (low, high) in enumerate(itertools.pairwise(borders)):
            sent = self._quantized(total[low:high])
            self.shares[host][0].residual[low:high] += total[low:high] - sent
            total[low:high] = sent
        return total

    def _sent(self, share: Share, gradient: np.ndarray, density: float, dense: bool) -> np.ndarray:
        grown = share.residual + gradient
        sent = grown if dense else self._quantized(grown)
        share.residual = grown - sent
        return sent

    def _quantized(self, values: np.ndarray) -> np.ndarray:
        sent = np.zeros_like(values)
        for begin in range(0, len(values), self.block):
            part = values[begin : begin + self.block]
            if self.bits == 1:
                scale = np.float32(np.float16(np.abs(part).sum(dtype=np.float32) / np.float32(len(part)) * 1024)) / 1024
                sent[begin : begin + self.block] = np.copysign(scale, part)
                continue
            most = np.float32(2 ** (self.bits - 1) - 1)
            least = np.abs(part).max() / most * np.float32(1024)
            half = np.float16(least)
            half = np.nextafter(half, np.float16(np.inf)) if np.float32(half) < least else half
            scale = np.float32(half) / np.float32(1024)
            inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
            sent[begin : begin + self.block] = np.rint(np.clip(part * inverse, -most, most)) * scale
        return sent
