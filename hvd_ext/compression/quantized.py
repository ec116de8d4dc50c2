"""Quantised gradients with error feedback: numbers of 8, 4 or 1 bits, with a scale for each block of elements."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal, get_args

from hvd_ext.compression.codec import DenseFirst, is_whole
from hvd_ext.errors import InvalidError

Bits = Literal[8, 4, 1]
MOST_BLOCK = 4096  # Quantization::kMostBlock of tf_ops/kernels/quantize.h
_SCALE_BITS = 16


@dataclasses.dataclass(frozen=True)
class Quantized(DenseFirst):
    """Send gradients between hosts as numbers of few bits; what rounding takes enters later steps.

    Pass it to `hvd_ext.DistributedOptimizer` or a tape as `compression`. Inside a host whole gradients are added up.
    Each rank adds its residual to its share of the host's sum and divides the result into blocks. A block has one
    scale, a float16: with 8 and 4 bits the least by which its largest element fits, with 1 bit the mean of the absolute
    values (as in EF-signSGD; Karimireddy et al., ICML 2019). An element is sent as the nearest multiple of the scale,
    and the rank keeps the difference as its new residual.

    With two hosts each value is rounded once, by the host that sends it. With more, the planner may have each rank add
    up a piece and send its sum, rounded a second time, to all (as 1-bit Adam does; Tang et al., ICML 2021); the rank
    keeps that difference, too. All ranks get the same bits.

    Args:
        bits: of a number: 8, 4 or 1. A message has (bits + 16 / block) / 32 of the bytes of float32.
        block: the number of elements that share a scale: a multiple of 64 up to 4096.
        dense_steps: the number of first update steps that send whole gradients.
        height: the levels of the topology in which whole gradients are added up first: 1 for hosts, 2 for racks of
            hosts, and so on; None for the fastest by the cost model.
        min_elements: tensors with fewer elements stay dense.
        vectors: also quantise the gradients of tensors of rank 1 and 0 (biases, scales).
        clip: before anything else, scale a rank's gradients down to a norm of clip / sqrt(number of ranks); None for no
            clipping.

    Raises:
        InvalidError: a value breaks its rule.
    """

    name: ClassVar[str] = "quantized"
    rows: ClassVar[frozenset[str]] = frozenset({"RESELECT"})

    bits: Bits = 8
    block: int = 256
    dense_steps: int = 0
    height: int | None = 1
    min_elements: int = 4096
    vectors: bool = False
    clip: float | None = None

    def __post_init__(self) -> None:
        if not is_whole(self.bits) or self.bits not in get_args(Bits):
            raise InvalidError(f"Quantized, bits ({self.bits!r}): must be 8, 4 or 1")
        if not is_whole(self.block) or not 0 < self.block <= MOST_BLOCK or self.block % 64:
            raise InvalidError(f"Quantized, block ({self.block!r}): must be a multiple of 64 from 64 to {MOST_BLOCK}")
        super().__post_init__()

    @property
    def density(self) -> float:  # type: ignore[override]
        """The share of float32's bytes that are sent."""
        return (self.bits + _SCALE_BITS / self.block) / 32


CODEC = Quantized
