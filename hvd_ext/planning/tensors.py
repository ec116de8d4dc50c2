"""The description of a tensor for the planner and the engine, and the dtypes that the engine reduces."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class DType:
    """A dtype that the engine reduces: its code (tf_ops/kernels/reduce.h) and bytes per element."""

    code: int
    nbytes: int


DTYPES: dict[str, DType] = {
    "float32": DType(0, 4),
    "float64": DType(1, 8),
    "float16": DType(2, 2),
    "bfloat16": DType(3, 2),
    "int32": DType(4, 4),
    "int64": DType(5, 8),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """The description of a gradient or another tensor.

    Args:
        name: for example a variable's path; the ranks compare it.
        shape: the fully known shape.
        dtype: NumPy's name of the dtype; a key of `DTYPES` if the tensor is sent.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size in memory, in bytes."""
        return self.elements * DTYPES[self.dtype].nbytes

    @property
    def text(self) -> str:
        """Dtype and shape, for messages."""
        return f"{self.dtype}{list(self.shape)}"
