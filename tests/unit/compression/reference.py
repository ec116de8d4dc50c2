"""The selection and its error feedback in NumPy: a readable version of the contract of tf_ops/kernels/topk.h."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def keys(x: NDArray[Any]) -> NDArray[Any]:
    """Return the integers by which elements are ordered: their bits without the sign.

    Args:
        x: an array of a floating dtype of 2, 4 or 8 bytes.

    Returns:
        Unsigned integers of the same size: 0 = -0 < denormals < normals < infinity < NaN.
    """
    unsigned = _UNSIGNED[x.dtype.itemsize]
    magnitude = np.array(np.iinfo(unsigned).max >> 1, dtype=unsigned)
    bits: NDArray[Any] = np.ascontiguousarray(x).view(unsigned) & magnitude
    return bits


def top_k(x: NDArray[Any], k: int) -> NDArray[np.int64]:
    """Return the indices of the k elements of greatest magnitude.

    Args:
        x: an array of one dimension.
        k: the number of elements to select, from 0 to the number of elements.

    Returns:
        Exactly k distinct indices, ascending; of elements with equal keys those of lowest index are selected.
    """
    # the complement of the keys orders elements from greatest to least, and a stable sort keeps ties in their order
    order = np.argsort(~keys(x), kind="stable")
    return np.sort(order[:k]).astype(np.int64)


def top_k_of_segments(x: NDArray[Any], k: list[int], segments: list[int]) -> NDArray[np.int64]:
    """Return the selected indices of several segments, one segment after another.

    Args:
        x: an array of one dimension.
        k: the number of elements to select from each segment.
        segments: the number of elements of each segment; together they cover x.

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
    """Add a gradient to the residual of earlier steps (Deep Gradient Compression, section 3.2).

    Every operation is rounded to float32.

    Args:
        residual: float32, one dimension.
        gradient: float32, the same shape.
        velocity: float32, the same shape; None without momentum.
        momentum: the coefficient of the velocity.
        nesterov: whether to look one step ahead, as SGD with nesterov=True does.

    Returns:
        The sum to select from, and the next velocity before masking.
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
    """Do one step of error feedback: accumulate, select, and keep the rest as the residual.

    Args:
        residual: float32, one dimension.
        gradient: float32, the same shape.
        k: the number of elements to select.
        velocity: float32, the same shape; None without momentum.
        momentum: the coefficient of the velocity.
        nesterov: see `feed`.
        masks: whether the velocity of selected elements becomes 0 (momentum factor masking).

    Returns:
        Values, indices, the next residual and the next velocity; the arguments are not changed.
    """
    accumulated, moved = feed(residual, gradient, velocity, momentum, nesterov)
    indices = top_k(accumulated, k)
    values = accumulated[indices]
    accumulated[indices] = 0
    if moved is not None and masks:
        moved[indices] = 0
    return values, indices, accumulated, moved
