"""Selections that other libraries use, and the passes over memory with which every selection is compared."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_ext.engine import native

FLOAT32 = 0  # DType::kFloat32 of tf_ops/kernels/reduce.h
SAMPLINGS = 30  # N of Algorithm 1; the paper's own
SAMPLE_SHARE = 0.01  # of DGC's first selection: Lin et al. (2018) sample 0.1 % to 1 %
MEMORY_ERROR = "buffer: it must be float32 and contiguous"

Answer = tuple[NDArray[np.float32], NDArray[Any]]


def pointer(x: NDArray[np.float32]) -> Any:
    """Give a pointer to a contiguous float32 array; refuse any other."""
    if x.dtype != np.float32 or not x.flags["C_CONTIGUOUS"]:
        raise ValueError(MEMORY_ERROR)
    return native.pointer(x)


def read_pass(x: NDArray[np.float32], threads: int = 1) -> float:
    """Read a buffer once with prefetched wide loads, which is the least work of any selection; give the sum of |x|.

    Args:
        x: float32, contiguous.
        threads: at least 1; all but the caller's are started for the call.
    """
    total = ctypes.c_double()
    native.call("hvd_ext_test_read_pass", pointer(x), x.size, threads, ctypes.byref(total))
    return total.value


def bare_add(accumulator: NDArray[np.float32], x: NDArray[np.float32]) -> None:
    """Add a float32 buffer to another of the same length in one thread: error feedback without the selection."""
    native.call("hvd_ext_test_add", FLOAT32, pointer(accumulator), pointer(x), x.size)


def written(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Give a writable array over the memory of another one, which must be contiguous float32 and outlive the result."""
    memory = (ctypes.c_float * x.size).from_address(ctypes.addressof(pointer(x).contents))
    return np.frombuffer(memory, np.float32)


class Algorithm1:
    """MSTopK as the CommLib paper prints it (Algorithm 1), in C++, in one thread, with memory for all calls."""

    def __init__(self, x: NDArray[np.float32], k: int) -> None:
        """Allocate the memory.

        Args:
            x: float32, contiguous.
            k: how many to select; where the thresholds fail, more are returned.
        """
        self._x, self._k, self._seed = x, k, 0
        # filled, so that no call pays for the first touch of a page
        self._magnitudes = np.full(x.size, np.float32(0))
        self._values = np.full(x.size, np.float32(0))
        self._indices = np.full(x.size, np.int32(0))

    def __call__(self) -> Answer:
        """Select once; every call has another seed for the random part."""
        picked = ctypes.c_int64()
        self._seed += 1
        indices = native.pointer(self._indices)
        native.call(
            "hvd_ext_test_algorithm_1",
            *(pointer(self._x), self._x.size, self._k, SAMPLINGS, self._seed),
            *(pointer(self._magnitudes), indices, pointer(self._values), ctypes.byref(picked)),
        )
        return self._values[: picked.value], self._indices[: picked.value]


def algorithm_1_tf(x: tf.Tensor, k: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Select with MSTopK as the CommLib paper prints it, written with TensorFlow's operations.

    Returns:
        Values float32 and indices int64, both [picked].
    """
    a = tf.abs(x)
    mean, largest = tf.reduce_mean(a), tf.reduce_max(a)
    zero = tf.constant(0.0)

    def trial(i: Any, low: Any, high: Any, k1: Any, k2: Any, above: Any, below: Any) -> tuple[Any, ...]:
        ratio = low + (high - low) / 2
        threshold = mean + ratio * (largest - mean)
        count = tf.math.count_nonzero(a >= threshold, dtype=tf.int32)
        few = count <= k
        better1, better2 = few & (count > k1), ~few & (count < k2)
        return (
            i + 1,
            tf.where(few, low, ratio),
            tf.where(few, ratio, high),
            tf.where(better1, count, k1),
            tf.where(better2, count, k2),
            tf.where(better1, threshold, above),
            tf.where(better2, threshold, below),
        )

    start = (tf.constant(0), zero, tf.constant(1.0), tf.constant(0), tf.size(x), zero, zero)
    found = tf.while_loop(lambda i, *_: i < SAMPLINGS, trial, start, parallel_iterations=1)
    k1, above, below = found[3], found[5], found[6]
    first = tf.reshape(tf.where(a >= above), [-1])
    second = tf.reshape(tf.where((a < above) & (a >= below)), [-1])
    places = tf.maximum(tf.size(second) - (k - k1) + 1, 1)
    begin = tf.random.uniform([], 0, places, tf.int32)
    indices = tf.concat([first, second[begin : begin + k - k1]], 0)
    return tf.gather(x, indices), indices


def dgc_tf(x: tf.Tensor, k: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Select at most k with DGC's double sampling: a threshold from a sample, and the largest of what passes it.

    Returns:
        Values float32 and indices int64, both [picked].
    """
    a = tf.abs(x)
    elements = tf.size(x)
    sampled = tf.maximum(tf.cast(SAMPLE_SHARE * tf.cast(elements, tf.float32), tf.int32), 1)
    sample = tf.gather(a, tf.random.uniform([sampled], 0, elements, tf.int32))
    wanted = tf.maximum(tf.cast(SAMPLE_SHARE * tf.cast(k, tf.float32), tf.int32), 1)
    threshold = tf.reduce_min(tf.math.top_k(sample, wanted, sorted=False).values)
    indices = tf.reshape(tf.where(a >= threshold), [-1])
    best = tf.math.top_k(tf.gather(a, indices), tf.minimum(k, tf.size(indices)), sorted=False).indices
    indices = tf.gather(indices, best)
    return tf.gather(x, indices), indices


def top_k_tf(x: tf.Tensor, k: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Select exactly with `tf.math.top_k` of |x|, unsorted; give values float32 and indices int32, both [k]."""
    indices = tf.math.top_k(tf.abs(x), k, sorted=False).indices
    return tf.gather(x, indices), indices
