"""IndexedSlices that a user reduces: rows of a table, compared, gathered and added up."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from hvd_ext.errors import InvalidError
from hvd_ext.options import Average, ReduceOp, Sum
from hvd_ext.options.gradients import GradientOptions
from hvd_ext.tensorflow.collectives import calls, dtypes, sparse
from hvd_ext.tensorflow.collectives.reductions import Reduction


def checked(kind: str, slices: tf.IndexedSlices, op: ReduceOp, algorithm: str | None = None) -> tf.IndexedSlices:
    """Check a user's slices.

    Args:
        kind: the collective, for messages.
        slices: this rank's rows.
        op: must be `Average` or `Sum`.
        algorithm: must be None.

    Returns:
        The same, all of tensors.

    Raises:
        InvalidError: another op, an algorithm is given, or a dtype that cannot be reduced.
    """
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
    """Allreduce slices on their own.

    Args:
        request: the user's reduction.
        slices: from `checked`.

    Returns:
        Ascending indices, each once, and the sums or averages of their rows.

    Raises:
        MismatchError: the ranks' values, op, compression or factors differ; on all ranks.
    """
    values = calls.described(slices.values, free=True)
    done = calls.agree(request.call, request.full_signature("allreduce of IndexedSlices", values))
    with tf.control_dependencies([] if done is None else [done]):
        return gathered(request, slices, "rows")


def gathered(request: Reduction, slices: tf.IndexedSlices, suffix: Any) -> tf.IndexedSlices:
    """Gather rows and add them up, after the ranks have compared them.

    Args:
        request: the user's reduction.
        slices: from `checked`.
        suffix: what makes a name of its own of the call's.

    Returns:
        Ascending indices, each once, and the sums or averages of their rows; averages of whole numbers are float32 for
        those of 8 and 16 bits and float64 for wider ones, as in Horovod.

    Raises:
        InvalidError: a sum that does not fit into a narrow dtype.
    """
    call = dataclasses.replace(request.call, name=f"{request.call.name}/{suffix}")
    dtype = slices.values.dtype
    divided = dtype.is_integer and request.op != Sum  # whole numbers are added up, and divided at the end
    wide, _ = dtypes.widened(slices.values)
    scaled = tf.IndexedSlices(dtypes.scaled(wide, request.prescale), slices.indices, slices.dense_shape)
    options = GradientOptions(op=Sum if divided else request.op, compression=request.compression)
    result = sparse.reduce(call.job, call.name, scaled, options)
    if divided:
        floating = tf.float32 if dtype.size <= 2 else tf.float64  # as TensorFlow divides them
        values = dtypes.scaled(tf.cast(result.values / call.job.engine.size, floating), request.postscale)
    else:
        values = dtypes.narrowed(str(call), dtypes.scaled(result.values, request.postscale), dtype)
    return tf.IndexedSlices(values, result.indices, result.dense_shape)
