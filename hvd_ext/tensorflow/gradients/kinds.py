"""One gradient and its variable: key, name, dtype and kind, its form before it is sent, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_ext.errors import InvalidError
from hvd_ext.options import compatibility
from hvd_ext.tensorflow.collectives import sparse

# The kinds of a gradient: there is none, it is dense, or it is sparse (`tf.IndexedSlices`); it is local, so that it
# stays on its rank; or its rank is outside of the process set.
NONE, DENSE, SPARSE, LOCAL, OUTSIDE = "-", "d", "s", "l", "o"
# The mark of a variable of a layer whose forward pass waits for all ranks.
MEETING = "waits for all ranks"


def inner(variable: Any) -> Any:
    """Return the TensorFlow variable inside a Keras 3 variable; any other variable is returned as it is."""
    value = getattr(variable, "_value", None)
    return variable if value is None else value


def key(variable: Any) -> Any:
    """Return a key that identifies a variable; a Keras variable and its TensorFlow variable have the same key."""
    value = inner(variable)
    return getattr(value, "_unique_id", None) or id(value)


def name(variable: Any) -> str:
    """Return a variable's path if it has one, else its name."""
    return str(getattr(variable, "path", None) or variable.name)


def dtype(variable: Any) -> tf.DType:
    """Return a variable's dtype as TensorFlow's."""
    return tf.as_dtype(variable.dtype)


def kind(gradient: Any, dense: bool) -> str:
    """Return this rank's kind of a gradient; `dense`: sparse ones will be made dense."""
    if gradient is None:
        return NONE
    return SPARSE if isinstance(gradient, tf.IndexedSlices) and not dense else DENSE


def joint(ranks: Sequence[str]) -> str:
    """Combine the ranks' kinds of each gradient.

    Args:
        ranks: for each rank, one letter per gradient, from `kind`.

    Returns:
        For each gradient "-" if no rank has it, "s" if every rank that has it has it sparse, else "d".
    """
    return "".join("d" if "d" in kinds else "s" if "s" in kinds else "-" for kinds in zip(*ranks, strict=True))


def ready(label: str, gradient: Any, variable: Any, agreed: str, divisor: int) -> Any:
    """Convert a gradient to the kind that the ranks have agreed on.

    Args:
        divisor: what a local gradient is divided by.

    Returns:
        A gradient in the variable's dtype. If only other ranks have the gradient, it is a tensor of zeros or slices
        without rows; if no rank has it, None.

    Raises:
        InvalidError: the gradient cannot be reduced.
    """
    if agreed == NONE or (agreed == LOCAL and gradient is None):
        return None
    if gradient is None:
        shape = tuple(variable.shape)
        return tf.zeros(shape, dtype(variable)) if agreed == DENSE else sparse.empty(shape, dtype(variable))
    refuse(label, gradient, variable)
    if isinstance(gradient, tf.IndexedSlices) and gradient.dense_shape is None:
        gradient = tf.IndexedSlices(gradient.values, gradient.indices, tf.constant(tuple(variable.shape), tf.int64))
    if agreed == SPARSE or (agreed == LOCAL and isinstance(gradient, tf.IndexedSlices)):
        gradient = tf.IndexedSlices(tf.cast(gradient.values, dtype(variable)), gradient.indices, gradient.dense_shape)
    else:
        # Keras casts too, but only in its update step, after the reduction
        gradient = tf.cast(tf.convert_to_tensor(gradient), dtype(variable))
    return scaled(gradient, 1 / divisor) if agreed == LOCAL else gradient


def scaled(gradient: Any, factor: float) -> Any:
    """Multiply a gradient by a number, in its dtype; 1 gives the gradient itself."""
    if factor == 1:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(scaled(gradient.values, factor), gradient.indices, gradient.dense_shape)
    return gradient * tf.constant(factor, gradient.dtype)


def mark_reduced(gradient: Any, by: Any) -> None:
    """Mark a gradient as reduced by a tape of this name or a `Reducer`: a second reduction is refused."""
    gradient._hvd_ext = by


def reduced_by(gradient: Any) -> Any:
    """Return the mark of `mark_reduced`; None for an unmarked gradient, even if it was computed from a marked one."""
    return getattr(gradient, "_hvd_ext", None)


def reduced_copy(gradient: Any, by: Any) -> Any:
    """Copy a gradient and mark the copy as `mark_reduced` does; None for no mark."""
    copied = tf.nest.map_structure(tf.identity, gradient, expand_composites=True)
    mark_reduced(copied, by)
    return copied


def refuse(label: str, gradient: Any, variable: Any) -> None:
    """Refuse a gradient that cannot be reduced.

    Raises:
        InvalidError: the gradient has been reduced already, is not of a floating dtype, or has not its variable's
            shape; or the variable is overwritten with its gradient.
    """
    if getattr(variable, "overwrite_with_gradient", False):
        raise InvalidError(
            f"{label}: variable {name(variable)!r} is overwritten with its gradient (float8 training), "
            "which cannot be reduced yet; train in float32 or bfloat16"
        )
    if gradient is None:
        return
    by = reduced_by(gradient)
    if by is not None:
        raise InvalidError(
            f"{label}: the gradient of {name(variable)!r} has been reduced by "
            + (
                f"a {by} already; use such a tape with a plain optimizer, or a plain tape with this one"
                if isinstance(by, str)
                else f"the compute_gradients of another optimizer, {by.label!r}, already; apply it with that one"
            )
        )
    dtype_here = tf.as_dtype(gradient.dtype) if hasattr(gradient, "dtype") else tf.convert_to_tensor(gradient).dtype
    if not dtype_here.is_floating:
        raise InvalidError(
            f"{label}: the gradient of {name(variable)!r} must be of a floating dtype; it is {dtype_here.name}"
        )
    rows = isinstance(gradient, tf.IndexedSlices)
    shape = tf.TensorShape(gradient.values.shape if rows else getattr(gradient, "shape", None))
    expected = tf.TensorShape([None, *variable.shape[1:]] if rows else variable.shape)
    if not shape.is_compatible_with(expected):
        raise InvalidError(
            f"{label}: the gradient of {name(variable)!r} must be of its shape; it is {shape}, not {expected}"
        )


def mark_meeting(variable: Any) -> None:
    """Mark a variable of a layer whose forward pass waits for all ranks."""
    variable._hvd_ext = MEETING


def meets(variable: Any) -> bool:
    """Tell whether a variable is of a layer whose forward pass waits for all ranks (`mark_meeting`)."""
    return getattr(variable, "_hvd_ext", None) is MEETING


def refuse_meeting(label: str, variable: Any, feature: str) -> None:
    """Refuse a variable that `mark_meeting` has marked: with some features no pass may wait for all ranks."""
    if meets(variable):
        raise InvalidError(f"{label}: {compatibility.words(feature, 'SyncBatchNormalization')}")
