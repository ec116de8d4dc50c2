"""The user's reductions of IndexedSlices: the ranks compare them, gather the rows and add them up."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from hvd_ext.errors import InvalidError
from hvd_ext.options import Average, ReduceOp, Sum
from hvd_ext.options.gradients import GradientOptions
from hvd_ext.tensorflow.collectives import calls, dtypes, sparse
from hvd_ext.tensorflow.collectives.reductions import Reduction

_UNIT = 1 << 32  # of the upper half of an int64


def checked(kind: str, slices: tf.IndexedSlices, op: ReduceOp, algorithm: str | None = None) -> tf.IndexedSlices:
    """Return a user's slices as tensors; `InvalidError` for a wrong op or dtype, or an algorithm."""
    kind = f"{kind} of IndexedSlices"
    if op not in (Average, Sum):
        raise InvalidError(
            f"{kind}: op ({op!r}): must be hvd_ext.Average or hvd_ext.Sum; a row that a rank lacks counts as zeros; "
            "convert the slices with tf.convert_to_tensor for the others"
        )
    if algorithm is not None:
        raise InvalidError(f"{kind}: algorithm ({algorithm!r}): rows are gathered; leave it out")
    shape = slices.dense_shape
    return tf.IndexedSlices(
        dtypes.converted(kind, slices.values, dtypes.ALLREDUCED),
        dtypes.converted(f"{kind}, indices", slices.indices, ("int32", "int64")),
        None if shape is None else tf.convert_to_tensor(shape),
    )


def allreduced(request: Reduction, slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Allreduce slices from `checked` outside of a group: ascending indices, each once, and the reduced rows."""
    values = calls.described(slices.values, free=True)
    agreed = calls.agree(request.call, request.full_signature("allreduce of IndexedSlices", values))
    with tf.control_dependencies(agreed):
        return gathered(request, slices, "rows")


def gathered(request: Reduction, slices: tf.IndexedSlices, suffix: Any) -> tf.IndexedSlices:
    """Gather rows and add them up, after the ranks have compared their descriptions.

    Returns:
        Ascending indices without repetition, and the sums or averages of their rows. As in Horovod, averages of 8-bit
        and 16-bit integers are float32, and averages of wider integers are float64.

    Raises:
        InvalidError: a sum does not fit into a narrow dtype.
    """
    call = dataclasses.replace(request.call, name=f"{request.call.name}/{suffix}")
    dtype = slices.values.dtype
    divided = dtype.is_integer and request.op != Sum  # integers are added up first, and divided at the end
    plain = request.op == Sum and request.prescale == request.postscale == 1.0
    wide, _ = dtypes.widened(slices.values, plain)
    wide = dtypes.scaled(wide, request.prescale)
    halves = divided and wide.dtype == tf.int64  # whose sums do not leave int64
    rows = tf.stack([_high(wide), wide - _high(wide) * _UNIT], -1) if halves else wide
    scaled = tf.IndexedSlices(rows, slices.indices, slices.dense_shape)
    options = GradientOptions(op=Sum if divided else request.op, compression=request.compression)
    result = sparse.reduce(call.job, call.name, scaled, options)
    if divided:
        floating = tf.float32 if dtype.size <= 2 else tf.float64  # the dtypes of TensorFlow's division
        sums = result.values
        if halves:
            high, low = sums[..., 0], sums[..., 1]
            carried = high + _high(low)
            sums = tf.cast(carried, tf.float64) * float(_UNIT) + tf.cast(low - _high(low) * _UNIT, tf.float64)
        values = dtypes.scaled(tf.cast(sums / call.job.engine.size, floating), request.postscale)
    else:
        values = dtypes.narrowed(str(call), result.values, dtype, request.postscale)
    return tf.IndexedSlices(values, result.indices, result.dense_shape)


def _high(values: tf.Tensor) -> tf.Tensor:
    """Give the upper half of int64 values: floor(value / 2^32)."""
    return tf.bitwise.right_shift(values, tf.constant(32, tf.int64))
