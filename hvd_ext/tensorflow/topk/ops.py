"""The selection of the k elements of greatest magnitude: `mstopk`, and `topk_error_feedback` with error feedback.

Neither needs `hvd_ext.init()`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_ext.compression import selectors
from hvd_ext.engine import gpus
from hvd_ext.errors import InvalidError
from hvd_ext.tensorflow import ops
from hvd_ext.tensorflow.collectives import dtypes

DTYPES = ("float32", "float64", "float16", "bfloat16")
_INDEX_DTYPES = (tf.int32, tf.int64)


@ops.plain
def mstopk(
    x: Any,
    k: int | Sequence[int] | tf.Tensor,
    *,
    mode: selectors.Mode = "exact",
    segments: Sequence[int] | tf.Tensor | None = None,
    index_dtype: tf.DType = tf.int32,
    samplings: int = 30,
    seed: int | tf.Tensor = 0,
    threshold: float = 0.0,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Select the k elements of greatest magnitude.

    The default mode has a unique result, for any number of threads and any instruction set: elements are ordered by
    their bits without the sign (0 = -0 < denormals < normals < infinity < NaN), and of equal elements those of lowest
    index are selected. `mode="mstopk"` is the algorithm of CommLib (MLSys 2021), section 3.1. The values are
    differentiable with respect to x.

    Args:
        x: a tensor of any shape, float32, float64, float16 or bfloat16; it is flattened.
        k: the number of elements to select, from 0 to the number of elements; with segments, one number for each
            segment. Integers or an integer tensor.
        mode: a name of `hvd_ext.compression.selectors`; "dgc" and "threshold" may select fewer than k elements.
        segments: the lengths of the parts of x that are selected from separately; they must add up to the length of x.
        index_dtype: tf.int32, or tf.int64 for 2**31 elements and more.
        samplings: the N of "mstopk".
        seed: for "mstopk", "dgc" and "random": an integer or an integer scalar tensor, at least 0.
        threshold: the magnitude for "threshold", at least 0.

    Returns:
        Values and indices, both of one dimension, one segment after another, each in ascending order of indices.
        Indices are positions in the flat x.

    Raises:
        InvalidError: an argument breaks its rule; a running graph raises TensorFlow's InvalidArgumentError.
    """
    chosen = selectors.find(mode)
    if samplings < 0:
        raise InvalidError(f"samplings ({samplings}): must be at least 0")
    if not threshold >= 0:
        raise InvalidError(f"threshold ({threshold}): must be at least 0")
    tensor = dtypes.converted("mstopk", x, DTYPES)
    dtype = _index_dtype(index_dtype)
    picks, offsets = _parts(tensor, k, segments)
    number = _known(seed) if type(seed) is int else _seed(seed)
    if chosen.number is None:
        return _by_tensorflow(tensor, picks, offsets, dtype)
    with ops.translated(), _where(tensor, chosen):
        values, indices, counts = ops.library().hvd_ext_top_k(
            tensor,
            picks,
            offsets,
            number,
            Tindices=dtype,
            selector=chosen.number,
            samplings=samplings,
            threshold=threshold,
        )
    if chosen.fills:
        return values, indices
    used = _used(picks, counts)
    return tf.boolean_mask(values, used), tf.boolean_mask(indices, used)


@ops.plain
def topk_error_feedback(
    residual: Any,
    gradient: Any,
    k: int | Sequence[int] | tf.Tensor,
    *,
    segments: Sequence[int] | tf.Tensor | None = None,
    index_dtype: tf.DType = tf.int32,
) -> tuple[tf.Tensor, ...]:
    """Add a gradient to a residual, select from the sum, and keep the rest as the residual, in one pass over memory.

    The values at their indices plus the new residual equal the old residual plus the gradient, bit for bit.

    Args:
        residual: a float32 `tf.Variable`, which is updated, or a tensor.
        gradient: a float32 tensor of the same shape.
        k: as for `mstopk`.
        segments: as for `mstopk`.
        index_dtype: as for `mstopk`.

    Returns:
        Values and indices as from `mstopk`; and, if the residual is a tensor, the new residual.

    Raises:
        InvalidError: an argument breaks its rule; a running graph raises TensorFlow's InvalidArgumentError.
    """
    added = dtypes.converted("topk_error_feedback", gradient, ("float32",))
    dtype = _index_dtype(index_dtype)
    picks, offsets = _parts(added, k, segments)
    # a Keras variable holds a TensorFlow variable
    variable = residual if hasattr(residual, "handle") else getattr(residual, "value", residual)
    library = ops.library()
    with ops.translated():
        if hasattr(variable, "handle"):
            values, indices, _ = library.hvd_ext_resource_top_k_error_feedback(
                variable.handle, added, picks, offsets, Tindices=dtype
            )
            return values, indices
        left = dtypes.converted("topk_error_feedback", residual, ("float32",))
        left, values, indices, _ = library.hvd_ext_top_k_error_feedback(left, added, picks, offsets, Tindices=dtype)
    return values, indices, left


def _where(x: tf.Tensor, selector: Any) -> contextlib.AbstractContextManager[Any]:
    """Select where x is, if the selector has a kernel for GPUs; else on the host.

    In a graph x may have no device yet; then TensorFlow places the selection, on a GPU if there is one.
    """
    if selector.name != "exact" or x.device.endswith(ops.HOST) or not gpus.LIBRARY.is_file():
        return tf.device(ops.HOST)
    return tf.device(x.device) if x.device else contextlib.nullcontext()


def _index_dtype(dtype: Any) -> tf.DType:
    index_dtype = tf.as_dtype(dtype)
    if index_dtype not in _INDEX_DTYPES:
        raise InvalidError(f"index_dtype ({index_dtype.name}): must be int32 or int64")
    return index_dtype


def _parts(x: tf.Tensor, k: Any, segments: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Return k and the segments' offsets as int64 vectors on the host, where an op on a GPU reads them too.

    Where they are known they take no op, which would be as slow as the selection from a small x.
    """
    known = x.shape.num_elements()
    if type(k) is int and segments is None and known is not None and 0 <= k <= known:
        return _known((k,)), _known((0, known))
    with tf.device(ops.HOST):
        picks = _integers("k", k)
        if segments is None:
            if _length(picks) not in (None, 1):
                raise InvalidError(f"k ({_length(picks)} numbers): must be one number where there are no segments")
            if known is not None:
                return _tensor(picks), _known((0, known))
            return _tensor(picks), tf.stack([tf.zeros([], tf.int64), tf.size(x, out_type=tf.int64)])
        lengths = _integers("segments", segments)
        numbers = _length(picks), _length(lengths)
        if None not in numbers and numbers[0] != numbers[1]:
            raise InvalidError(f"k ({numbers[0]} numbers): must be one for each segment; there are {numbers[1]}")
        if isinstance(lengths, np.ndarray):
            return _tensor(picks), tf.constant(np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))
        return _tensor(picks), tf.concat([tf.zeros([1], tf.int64), tf.cumsum(lengths)], 0)


def _seed(seed: Any) -> tf.Tensor:
    with tf.device(ops.HOST):
        return tf.cast(seed, tf.int64) if tf.is_tensor(seed) else tf.constant(seed, tf.int64)


def _known(numbers: int | tuple[int, ...]) -> tf.Tensor:
    """Return int64 numbers as a tensor on the host. Eager calls share tensors, since making one takes microseconds."""
    return _kept(numbers) if tf.executing_eagerly() else _made(numbers)


def _made(numbers: int | tuple[int, ...]) -> tf.Tensor:
    with tf.device(ops.HOST):
        return tf.constant(numbers, tf.int64)


_kept = functools.lru_cache(maxsize=256)(_made)


def _integers(name: str, value: Any) -> Any:
    """Return integers as an int64 vector: of NumPy if they are known now, else a tensor."""
    if tf.is_tensor(value):
        if not value.dtype.is_integer:
            raise InvalidError(f"{name} ({value.dtype.name}): must be whole numbers")
        if not (tf.executing_eagerly() and hasattr(value, "numpy")):
            return tf.reshape(tf.cast(value, tf.int64), [-1])
        value = value.numpy()
    try:
        numbers = np.asarray(value)
    except ValueError as error:
        raise InvalidError(f"{name} ({value!r}): must be whole numbers") from error
    if numbers.size and not np.issubdtype(numbers.dtype, np.integer):
        raise InvalidError(f"{name} ({value!r}): must be whole numbers")
    return numbers.astype(np.int64).reshape(-1)


def _length(numbers: Any) -> int | None:
    return numbers.size if isinstance(numbers, np.ndarray) else numbers.shape.num_elements()


def _tensor(numbers: Any) -> tf.Tensor:
    return tf.constant(numbers) if isinstance(numbers, np.ndarray) else numbers


def _used(picks: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
    """Return, for every place of the output, whether an element was selected for it."""
    begins = tf.cumsum(picks, exclusive=True)
    places = tf.range(tf.reduce_sum(picks))
    return places < tf.repeat(begins + counts, picks)


def _by_tensorflow(x: tf.Tensor, picks: tf.Tensor, offsets: tf.Tensor, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
    if picks.shape.num_elements() is None:
        raise InvalidError('mode ("tf"): the number of segments must be known when the function is traced')
    flat = tf.reshape(x, [-1])
    if tf.executing_eagerly():
        lengths = np.diff(offsets)
        if np.any(picks < 0) or np.any(picks > lengths) or lengths.min(initial=0) < 0 or sum(lengths) != len(flat):
            words = "must be from 0 to the number of elements, and segments add up to x's"
            raise InvalidError(f"k ({picks.numpy()}): {words}")
    by_segment: list[tf.Tensor] = []
    for segment in range(picks.shape.num_elements()):
        part = tf.abs(flat[offsets[segment] : offsets[segment + 1]])
        _, places = tf.math.top_k(part, tf.cast(picks[segment], tf.int32), sorted=False)
        by_segment.append(tf.sort(tf.cast(places, dtype)) + tf.cast(offsets[segment], dtype))
    indices = tf.concat(by_segment, 0) if by_segment else tf.zeros([0], dtype)
    return tf.gather(flat, indices), indices


@tf.RegisterGradient("HvdExt>TopK")
def _to_the_picks(op: Any, values: tf.Tensor, *_: Any) -> list[Any]:
    x, indices = op.inputs[0], tf.cast(op.outputs[1], tf.int64)
    used = indices >= 0
    size = tf.size(x, out_type=tf.int64)
    places = tf.where(used, indices, size)[:, tf.newaxis]  # unused places are scattered behind the end, and cut off
    flat = tf.scatter_nd(places, values, [size + 1])[:-1]
    return [tf.reshape(flat, tf.shape(x)), None, None, None]


@tf.RegisterGradient("HvdExt>TopKErrorFeedback")
@tf.RegisterGradient("HvdExt>ResourceTopKErrorFeedback")
def _refuse(op: Any, *_: Any) -> Sequence[Any]:
    raise InvalidError(
        "topk_error_feedback: it changes its residual, and has no gradient; differentiate hvd_ext.mstopk, or stop the "
        "gradient before it: tf.stop_gradient"
    )
