"""Data of the tests: they depend on the rank and the index, and sums over ranks are exact in every dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

# How a function may run.
WAYS: dict[str, Callable[..., Any]] = {"eager": lambda function: function, "traced": tf.function}


def eagerly_and(traced: Iterable[str], dtypes: Iterable[str]) -> list[tuple[str, str]]:
    """Give rows of a way and a dtype: every dtype eagerly, and some traced, which takes long."""
    return [*(("eager", dtype) for dtype in dtypes), *(("traced", dtype) for dtype in traced)]


def values(rank: int, shape: tuple[int, ...], salt: int = 0) -> npt.NDArray[np.int64]:
    """Give one rank's whole numbers, small enough that 8 ranks' sum is exact in bfloat16.

    Args:
        rank: whose.
        shape: of the result.
        salt: makes several tensors of one rank differ.

    Returns:
        int64 in [0, 15]: the sum of 16 ranks is at most 240, below bfloat16's 256.
    """
    count = int(np.prod(shape, dtype=np.int64))
    return ((np.arange(count) * 7 + rank * 3 + salt * 5 + rank * rank) % 16).reshape(shape)


def total(size: int, shape: tuple[int, ...], salt: int = 0) -> npt.NDArray[np.int64]:
    """Give the sum of `values` over the ranks."""
    return np.sum([values(rank, shape, salt) for rank in range(size)], axis=0, dtype=np.int64).reshape(shape)
