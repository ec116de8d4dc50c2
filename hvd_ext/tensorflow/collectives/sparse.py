"""Sparse gradients: the rows of a table that the ranks have touched are gathered and added up.

Every rank first adds up its own repeated rows, so that it sends each row once; then it gathers the rows of all ranks
and adds them in the order of ranks. All ranks compute the same sums in the same order on the same values, on the CPU,
and therefore get equal bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from hvd_ext.options import Compression, Sum
from hvd_ext.tensorflow import ops
from hvd_ext.tensorflow.collectives import backward

if TYPE_CHECKING:
    from hvd_ext.job.runtime import Runtime
    from hvd_ext.options.gradients import GradientOptions

# These dtypes are added in float32, because a sum drifts if it is rounded to 8 bits after every addition.
_HALVES = (tf.float16, tf.bfloat16)
# The indices of tables with fewer rows are sent in 4 bytes.
_INT32_ROWS = 1 << 31


@ops.plain
def empty(shape: Sequence[int], dtype: tf.DType | str) -> tf.IndexedSlices:
    """Make slices without rows (int64 indices [0], values [0, ...]) for a rank that lacks a sparse gradient."""
    shape = tuple(int(dimension) for dimension in shape)
    return tf.IndexedSlices(
        tf.zeros((0, *shape[1:]), dtype), tf.zeros(0, tf.int64), tf.constant(shape, tf.int64, shape=[len(shape)])
    )


def row_nbytes(slices: tf.IndexedSlices) -> int:
    """The bytes of a row and its index, where they are sent as they are."""
    return math.prod(slices.values.shape[1:]) * slices.values.dtype.size + slices.indices.dtype.size


@ops.plain
def reduce(
    job: Runtime,
    name: str,
    slices: tf.IndexedSlices,
    options: GradientOptions,
    *,
    shape: Sequence[int] | None = None,
    dtype: tf.DType | str | None = None,
    count: tf.Variable | None = None,
) -> tf.IndexedSlices:
    """Sum or average one sparse gradient over the ranks, eagerly or in a graph; all ranks call it.

    Args:
        name: matches the ranks' calls; unique for each tensor of each channel. A second use in one `tf.function` gets
            a number.
        slices: this rank's rows, in any order and with repetitions, with int32 or int64 indices; those of `empty` if
            this rank has no gradient. Integer rows can only be summed.
        options: only op, compression and gradient_predivide_factor are used. With a compression, float32 rows are sent
            in 16 bits and added in float32; other dtypes are sent as they are.
        shape: the table's shape, the same on all ranks; with it, the indices of tables below 2^31 rows are sent in 4
            bytes.
        dtype: the dtype of the result, the same on all ranks; None for the dtype of the slices.
        count: becomes the number of rows that all ranks have sent.

    Returns:
        Ascending indices without repetition, with the sums or averages of their rows; equal bits on all ranks. The
        indices have the dtype of this rank's slices.

    Raises:
        MismatchError: the ranks' rows differ in dtype or shape; on all ranks.
    """
    dtype = slices.values.dtype if dtype is None else tf.as_dtype(dtype)
    before, after = _divisors(job, options)
    with tf.name_scope("hvd_ext_sparse"), tf.device("CPU:0"), ops.translated():
        indices, values = _summed(slices.indices, _wide(tf.cast(slices.values, dtype)))
        every_index, every_row = (
            _gathered(job, f"{name}.indices", tf.cast(indices, _index_dtype(shape))),
            _gathered(job, f"{name}.values", tf.cast(_divided(values, before), _wire(dtype, job, options))),
        )
        if count is not None:
            count.assign(tf.size(every_index, tf.int64))
        total_indices, total = _summed(every_index, tf.cast(every_row, values.dtype))
        return tf.IndexedSlices(
            tf.cast(_divided(total, after), dtype),
            tf.cast(total_indices, slices.indices.dtype),
            slices.dense_shape if shape is None else tf.constant(tuple(shape), tf.int64, shape=[len(shape)]),
        )


def _summed(indices: tf.Tensor, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Sort rows by index, and add rows of equal index in their order."""
    indices = tf.ensure_shape(indices, [None])  # in a graph the shape may be unknown
    order = tf.argsort(indices, stable=True)
    ascending = tf.gather(indices, order)
    first = tf.ones(tf.minimum(tf.size(ascending), 1)[tf.newaxis], tf.bool)
    begins = tf.concat([first, tf.not_equal(ascending[1:], ascending[:-1])], 0)
    segments = tf.cumsum(tf.cast(begins, tf.int32)) - 1
    return tf.boolean_mask(ascending, begins), tf.math.segment_sum(tf.gather(values, order), segments)


def _gathered(job: Runtime, name: str, part: tf.Tensor) -> tf.Tensor:
    return ops.allgather(ops.call_name("allgather", name, job), part, **backward.one_class(job.all_gather))


def _divisors(job: Runtime, options: GradientOptions) -> tuple[float, float]:
    """Return the divisors of the rows before they are sent, and after they are added."""
    if options.op == Sum:
        return 1.0, 1.0
    predivide = float(options.gradient_predivide_factor)
    return predivide, job.engine.size / predivide


def _divided(values: tf.Tensor, divisor: float) -> tf.Tensor:
    return values if divisor == 1.0 else values / tf.constant(divisor, values.dtype)


def _wide(values: tf.Tensor) -> tf.Tensor:
    return tf.cast(values, tf.float32) if values.dtype in _HALVES else values


def _wire(dtype: tf.DType, job: Runtime, options: GradientOptions) -> tf.DType:
    compression = options.for_channel(job.options).compression
    return tf.as_dtype(compression.value) if dtype == tf.float32 and compression != Compression.none else dtype


def _index_dtype(shape: Sequence[int] | None) -> tf.DType:
    return tf.int32 if shape is not None and shape[0] < _INT32_ROWS else tf.int64
