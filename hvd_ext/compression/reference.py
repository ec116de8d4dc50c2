"""The selection and its error feedback in NumPy: the contract of tf_ops/kernels/topk.h, written to be read."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def keys(x: NDArray[Any]) -> NDArray[Any]:
    """Give the numbers by which elements are ordered: their bits without the sign.

    Args:
        x: of a floating dtype of 2, 4 or 8 bytes.

    Returns:
        Unsigned integers of the same size: 0 = -0 < denormals < normals < infinity < NaN.
    """
    unsigned = _UNSIGNED[x.dtype.itemsize]
    magnitude = np.array(np.iinfo(unsigned).max >> 1, dtype=unsigned)
    bits: NDArray[Any] = np.ascontiguousarray(x).view(unsigned) & magnitude
    return bits


def top_k(x: NDArray[Any], k: int) -> NDArray[np.int64]:
    """Give the indices of the k elements of greatest magnitude.

    Args:
        x: one dimension.
        k: from 0 to the number of elements.

    Returns:
        Exactly k distinct indices, ascending; of elements with equal keys those of lowest index.
    """
    # keys are below the sign bit, so their complement orders them from greatest to least, and a stable sort keeps ties
    order = np.argsort(~keys(x), kind="stable")
    return np.sort(order[:k]).astype(np.int64)


def top_k_of_segments(x: NDArray[Any], k: list[int], segments: list[int]) -> NDArray[np.int64]:
    """Give the picks of several segments, one after the other.

    Args:
        x: one dimension.
        k: picks of each segment.
        segments: elements of each segment; they cover x.

    Returns:
        Positions in x.
    """
    begins = np.cumsum([0, *segments])
    picks = [top_k(x[b : b + n], count) + b for b, n, count in zip(begins[:-1], segments, k, strict=True)]
    return np.concatenate(picks) if picks else np.zeros(0, np.int64)


def feed(
    residual: NDArray[np.float32],
    gradient: NDArray[np.float32],
    velocity: NDArray[np.float32] | None = None,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """Accumulate a gradient with what earlier steps left; every operation is rounded to float32 for itself.

    Args:
        residual: float32, one dimension.
        gradient: float32, the same shape.
        velocity: float32, the same shape; None without momentum.
        momentum: its factor.
        nesterov: look one step ahead, as SGD with nesterov=True does.

    Returns:
        What is selected from, and the next velocity before masking. Deep Gradient Compression, section 3.2.
    """
    if velocity is None:
        return residual + gradient, None
    factor = np.float32(momentum)
    moved = factor * velocity + gradient
    return residual + (gradient + factor * moved if nesterov else moved), moved


def error_feedback(
    residual: NDArray[np.float32],
    gradient: NDArray[np.float32],
    k: int,
    velocity: NDArray[np.float32] | None = None,
    momentum: float = 0.0,
    nesterov: bool = False,
    masks: bool = True,
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32], NDArray[np.float32] | None]:
    """Do one step of error feedback: accumulate, select, keep the rest.

    Args:
        residual: float32, one dimension.
        gradient: float32, the same shape.
        k: picks.
        velocity: float32, the same shape; None without momentum.
        momentum: its factor.
        nesterov: see `feed`.
        masks: the velocity becomes 0 at the picks (momentum factor masking).

    Returns:
        Values, indices, next residual, next velocity; the arguments are left as they are.
    """
    accumulated, moved = feed(residual, gradient, velocity, momentum, nesterov)
    indices = top_k(accumulated, k)
    values = accumulated[indices]
    accumulated[indices] = 0
    if moved is not None and masks:
        moved[indices] = 0
    return values, indices, accumulated, moved
