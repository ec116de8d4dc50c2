"""The options of top-k gradients: which elements are sent, and what happens to the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, get_args

from hvd_ext.compression import selectors
from hvd_ext.compression.codec import Codec, Where, is_number, is_whole
from hvd_ext.compression.density import Auto, Schedule
from hvd_ext.errors import InvalidError

Wire = Literal["fp16", "bf16", "fp32"]
Indices = Literal["auto", "int32", "delta", "bitmap"]

WIRES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_VALUE_NBYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
_INDEX_NBYTES = 2.0  # about; at densities of about 0.001
INDICES = get_args(Indices)
# The place in INDICES is HvdExtSelection.indices of tf_ops/engine/spec.def, so their order must agree.

# In docs/topk_performance.md (Convergence) it is nearly as good as a dense warm-up, and better than falling densities.
WARMUP_DENSITIES = (0.25,)


@dataclasses.dataclass(frozen=True)
class Warmup:
    """The densities of the first steps.

    The steps are divided into equal parts, one for each density; densities that are not above that of `TopK` are left
    out. Three tenths of a training, while the learning rate is high, are a good number of steps. Deep Gradient
    Compression (Lin et al., 2018, section 3.3) has (0.25, 0.0625, 0.015625, 0.004, 0.001) in the first four epochs.

    Args:
        steps: the number of update steps, at least 1.
        densities: falling densities, each above 0 and at most 1.
        dense: make all these steps dense; then densities must not be given.

    Raises:
        InvalidError: a value breaks its rule.
    """

    steps: int
    densities: Sequence[float] = WARMUP_DENSITIES
    dense: bool = False

    def __post_init__(self) -> None:
        if not is_whole(self.steps) or self.steps < 1:
            raise InvalidError(f"Warmup, steps ({self.steps!r}): must be a whole number of update steps, at least 1")
        if not isinstance(self.dense, bool):
            raise InvalidError(f"Warmup, dense ({self.dense!r}): must be True or False")
        if not isinstance(self.densities, (list, tuple)) or not self.densities:
            raise InvalidError(f"Warmup, densities ({self.densities!r}): must be a list of numbers")
        for density in self.densities:
            if not is_number(density) or not 0 < density <= 1:
                raise InvalidError(f"Warmup, densities ({density!r}): each must be a number above 0 and at most 1")
        falling = tuple(float(density) for density in self.densities)
        if list(falling) != sorted(set(falling), reverse=True):
            raise InvalidError(f"Warmup, densities ({list(falling)}): each must be below the one before")
        if self.dense and falling != WARMUP_DENSITIES:
            raise InvalidError(
                "Warmup, dense (True): makes all of its steps dense, but densities are given too; give one of the two"
            )
        object.__setattr__(self, "densities", (1.0,) if self.dense else falling)
        object.__setattr__(self, "dense", False)  # the densities say it now, so that equal schedules compare equal


@dataclasses.dataclass(frozen=True)
class TopK(Codec):
    """Send only the largest elements of the gradients between hosts; the rest is added to the gradients of later steps.

    Pass it to `hvd_ext.DistributedOptimizer` or a tape as `compression`. Inside a host whole gradients are added up.
    Each rank adds its residual to its share of the host's sum, selects elements from the result, and keeps the rest as
    its new residual (error feedback; CommLib, section 3.2, and Stich et al., 2018, algorithm 1).

    Args:
        density: the fraction of elements that is sent, above 0 and at most 1; "auto" chooses it by the change of the
            gradients' norm (`hvd_ext.compression.density.Auto`).
        selector: how elements are selected: "exact" takes the largest; "mstopk", "dgc", "threshold" and "random" are
            for comparisons.
        per_tensor: select from each tensor separately, instead of from a rank's whole share of a bucket.
        height: for "hitopk", the levels of the topology in which whole gradients are added up before the selection: 1
            for hosts, 2 for racks of hosts, and so on; None for the fastest by the cost model.
        min_elements: tensors with fewer elements stay dense.
        vectors: also sparsify tensors of rank 1 and 0 (biases, scales).
        warmup: the densities of the first steps; None for no warm-up.
        momentum_correction: take over the momentum of the optimizer (`keras.optimizers.SGD`,
            `hvd_ext.optimizers.LARS`): on each rank's share, gradients go through this momentum before the selection
            (DGC, equation 4), each multiplied by the learning rate of its own step, as in Keras. "auto" does so with
            SGD if it has a momentum that can be taken over.
        masks: with momentum_correction, set the velocity of sent elements to 0 (DGC, equation 5). The more elements are
            sent, the less momentum is left.
        clip: before anything else, scale a rank's gradients down to a norm of clip / sqrt(number of ranks); None for no
            clipping.
        wire: the dtype in which selected values are sent, "fp16", "bf16" or "fp32"; the rounding error stays in the
            residual.
        indices: the encoding of indices, "int32", "delta" or "bitmap"; "auto" takes the smallest.
        seed: the seed of the selectors that draw random numbers.
        samplings: the number of samplings of "mstopk" (CommLib, algorithm 1).
        threshold: the least absolute value that the selector "threshold" sends.
        where: "everywhere" selects from all gradients that may be sparsified; "needed" only from as few elements as
            bring the predicted step within 5 % of that, once the times of a step are known (until then everywhere).
        until: the number of update steps after which gradients are sent whole, as without `TopK`, at least 2; None to
            select until the end. The last step before sends all residuals; then a momentum that was taken over is back
            in the optimizer's slots.

    Raises:
        InvalidError: a value breaks its rule, or two of them exclude each other.
    """

    name: ClassVar[str] = "topk"
    rows: ClassVar[frozenset[str]] = frozenset({"PACK", "TAKE", "MERGE"})

    density: float | Literal["auto"] = 0.01
    selector: selectors.Native = "exact"
    per_tensor: bool = False
    height: int | None = 1
    min_elements: int = 4096
    vectors: bool = False
    warmup: Warmup | None = None
    momentum_correction: bool | Literal["auto"] = "auto"
    masks: bool = False
    clip: float | None = None
    wire: Wire = "fp16"
    indices: Indices = "auto"
    seed: int = 0
    samplings: int = 30
    threshold: float = 0.0
    where: Where = "everywhere"
    until: int | None = None

    def __post_init__(self) -> None:
        if self.density != "auto" and (not is_number(self.density) or not 0 < self.density <= 1):
            raise InvalidError(f"TopK, density ({self.density!r}): must be a number above 0 and at most 1, or 'auto'")
        for field, known in (
            ("selector", selectors.names(native=True)),
            ("wire", tuple(WIRES)),
            ("indices", INDICES),
            ("where", get_args(Where)),
        ):
            if getattr(self, field) not in known:
                raise InvalidError(f"TopK, {field} ({getattr(self, field)!r}): must be one of {', '.join(known)}")
        for field in ("per_tensor", "masks"):
            if not isinstance(getattr(self, field), bool):
                raise InvalidError(f"TopK, {field} ({getattr(self, field)!r}): must be True or False")
        if not isinstance(self.momentum_correction, bool) and self.momentum_correction != "auto":
            raise InvalidError(
                f"TopK, momentum_correction ({self.momentum_correction!r}): must be True, False or 'auto'"
            )
        self._check_common()
        for field, least in (("seed", 0), ("samplings", 1)):
            if not is_whole(getattr(self, field)) or getattr(self, field) < least:
                raise InvalidError(f"TopK, {field} ({getattr(self, field)!r}): must be a whole number from {least}")
        if self.seed >= 1 << 63:
            raise InvalidError(f"TopK, seed ({self.seed}): must be below 2 to the power of 63")
        if self.warmup is not None and not isinstance(self.warmup, Warmup):
            raise InvalidError(f"TopK, warmup ({self.warmup!r}): must be a hvd_ext.Warmup, or None")
        if self.until is not None and (not is_whole(self.until) or self.until < 2):
            raise InvalidError(
                f"TopK, until ({self.until!r}): must be a whole number of update steps, at least 2, or None; to send "
                "whole gradients from the first step on, leave TopK out"
            )
        if self.until is not None and self.warmup is not None and self.warmup.steps > self.until - 2:
            raise InvalidError(
                f"TopK, until ({self.until}): the warm-up has {self.warmup.steps} steps, and no step with the density "
                "itself would be left; give the warm-up fewer steps, or a later until"
            )
        if not is_number(self.threshold) or self.threshold < 0:
            raise InvalidError(f"TopK, threshold ({self.threshold!r}): must be a number from 0")
        if (self.selector == "threshold") != (self.threshold > 0):
            raise InvalidError(
                f"TopK, threshold ({self.threshold!r}): selector 'threshold' needs one above 0, the others take none; "
                f"the selector is {self.selector!r}"
            )
        if self.momentum_correction is True and self.selector == "random":
            raise InvalidError(
                "TopK, momentum_correction (True): selector 'random' does not prefer large elements, so the "
                "velocities would grow without bound; use another selector"
            )

    @property
    def schedule(self) -> Schedule:
        """The warm-up's densities, each for an equal part of its steps, and then the density; for "auto" its lower."""
        target = Auto.densities[1] if self.density == "auto" else float(self.density)
        if self.warmup is None:
            return Schedule((0,), (target,))
        kept = [density for density in self.warmup.densities if density > target]
        # with few steps a part may be empty; of densities with the same first step, the last one counts
        firsts = [index * self.warmup.steps // len(kept) for index in range(len(kept))] if kept else []
        steps = dict(zip(firsts, kept, strict=True))
        steps[self.warmup.steps if kept else 0] = target
        return Schedule(tuple(steps), tuple(steps.values()))

    @property
    def entry_nbytes(self) -> float:
        """The mean number of bytes of a value and its index, as sent."""
        return _VALUE_NBYTES[self.wire] + _INDEX_NBYTES

    def selection(self) -> dict[str, Any]:
        """Return what the engine has in another form."""
        return {
            "selector": selectors.find(self.selector).number,
            "value_wire": None if self.wire == "fp32" else WIRES[self.wire],
            "indices": INDICES.index(self.indices),
        }

    def described(self) -> dict[str, Any]:
        """Return the options by name as plain values; the warm-up is a list [steps, densities]."""
        values = super().described()
        if self.warmup is not None:
            values["warmup"] = [self.warmup.steps, list(self.warmup.densities)]
        return values

    @classmethod
    def _parsed(cls, field: str, value: str) -> Any:
        if field != "warmup":
            return super()._parsed(field, value)
        steps, _, kind = value.partition("/")
        if kind not in ("", "dense"):
            raise InvalidError(f"compression, warmup ({value!r}): must be a number of steps, or 'steps/dense'")
        return Warmup(super()._parsed(field, steps), dense=bool(kind))


CODEC = TopK
