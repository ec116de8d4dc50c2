"""The options of low-rank gradients: a matrix is sent as the product of two thin ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from hvd_ext.compression.codec import Codec, Described, is_number
from hvd_ext.errors import InvalidError


@dataclasses.dataclass(frozen=True)
class LowRank(Described):
    """Send gradients between hosts as products of two thin matrices; what they leave out enters later steps.

    Pass it to `hvd_ext.DistributedOptimizer` or a tape as `compression` (PowerSGD; Vogels, Karimireddy and Jaggi,
    NeurIPS 2019, algorithms 1 and 2). A gradient is viewed as a matrix M of n rows and m columns, where m is its last
    dimension. With the Q of the step before (m, rank), all ranks add up P = M Q and orthogonalise the sum; then they
    add up Q = M^T P. The result is P Q^T, and a rank keeps M - P P^T M for the next step (error feedback). Both sums
    are ordinary allreduces of thin matrices, so their cost does not grow with the number of ranks. All ranks must have
    the same kind of processor, because each computes P and the result for itself; `check_every` finds a difference.

    Tensors of rank 1 and 0, and matrices that would not get smaller, are sent whole. So are all gradients in a job of
    one host, where nothing would be gained.

    Args:
        rank: of the products, at least 1.
        start: the number of first update steps that send whole gradients.
        saving: matrices are factorised if their factors have at most 1 / saving of their elements.
        seed: of the first Q.

    Raises:
        InvalidError: a value breaks its rule.
    """

    name: ClassVar[str] = "lowrank"
    feature: ClassVar[str] = "low rank"
    refuses: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("compression", "top-k", "top-k until"), Codec.refuses["compression"]),
        "Keras 2": (
            "compression=hvd_ext.LowRank(...) works with optimizers of Keras 3, and with a tape; use keras.optimizers, "
            "or a hvd_ext.DistributedGradientTape with the plain optimizer of tf_keras"
        ),
        "partial rounds": (
            "sync: with compression=hvd_ext.LowRank(...) it must be 'full', because the second factor of a step is "
            "computed from the first one of all ranks; leave one of the two out"
        ),
        "delay": (
            "delay (1): with compression=hvd_ext.LowRank(...) it must be 0, because the second factor of a step is "
            "computed from the first one of all ranks; leave one of the two out"
        ),
    }

    rank: int = 4
    start: int = 0
    saving: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_whole(rank=1, start=0, seed=0)
        if not is_number(self.saving) or self.saving < 0:
            raise InvalidError(f"LowRank, saving ({self.saving!r}): must be a number from 0")

    def factors(self, shape: Sequence[int], dtype: str) -> tuple[int, int, int] | None:
        """Give the rows, the columns and the rank of a gradient's product; None if it is sent whole.

        Args:
            shape: the shape of the gradient.
            dtype: NumPy's name of its dtype; only float32 may be factorised.
        """
        if dtype != "float32" or len(shape) < 2 or 0 in shape:
            return None
        rows, columns = math.prod(shape[:-1]), shape[-1]
        rank = min(self.rank, rows, columns)
        return (rows, columns, rank) if (rows + columns) * rank * self.saving <= rows * columns else None
