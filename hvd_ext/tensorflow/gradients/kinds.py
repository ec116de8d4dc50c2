"""One gradient and its variable: its key, name, dtype and kind, what it becomes before it travels, what is refused."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_ext.errors import InvalidError
from hvd_ext.options import compatibility
from hvd_ext.tensorflow.collectives import sparse

# What the ranks have of a gradient: nothing, a dense one, `tf.IndexedSlices`; a local one that stays on its rank; or
# one of a rank that is outside of the process set.
NONE, DENSE, SPARSE, LOCAL, OUTSIDE = "-", "d", "s", "l", "o"


def inner(variable: Any) -> Any:
    """Give TensorFlow's variable inside of one of Keras 3, or the variable itself."""
    found = getattr(variable, "_value", None)
    return variable if found is None else found


def key(variable: Any) -> Any:
    """Give what tells variables apart, of Keras or TensorFlow; a variable of Keras and its value have one key."""
    found = inner(variable)
    return getattr(found, "_unique_id", None) or id(found)


def name(variable: Any) -> str:
    """Give a variable's path, where it has one, or its name."""
    return str(getattr(variable, "path", None) or variable.name)


def dtype(variable: Any) -> tf.DType:
    """Give a variable's dtype."""
    return tf.as_dtype(variable.dtype)


def kind(gradient: Any, dense: bool) -> str:
    """Give this rank's kind of a gradient.

    Args:
        gradient: a dense tensor, `tf.IndexedSlices` or None.
        dense: sparse ones will be made dense.
    """
    if gradient is None:
        return NONE
    return SPARSE if isinstance(gradient, tf.IndexedSlices) and not dense else DENSE


def ready(label: str, gradient: Any, variable: Any, agreed: str, divisor: int) -> Any:
    """Make a gradient what the ranks have agreed on.

    Args:
        label: whose it is, for messages.
        gradient: this rank's.
        variable: that it belongs to.
        agreed: the kind.
        divisor: of local gradients.

    Returns:
        In the variable's dtype: dense, with zeros where only other ranks have it; slices, without rows where only
        others have it; None where no rank has it.

    Raises:
        InvalidError: a gradient that cannot be reduced.
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
        # Keras casts too, but only in its update step: after the reduction
        gradient = tf.cast(tf.convert_to_tensor(gradient), dtype(variable))
    return scaled(gradient, 1 / divisor) if agreed == LOCAL else gradient


def scaled(gradient: Any, factor: float) -> Any:
    """Multiply a gradient by a number, in its dtype.

    Args:
        gradient: dense or slices.
        factor: 1 leaves it as it is.
    """
    if factor == 1:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(scaled(gradient.values, factor), gradient.indices, gradient.dense_shape)
    return gradient * tf.constant(factor, gradient.dtype)


def mark_reduced(gradient: Any, by: Any) -> None:
    """Note that a gradient is that of all ranks: who reduces it again would take a sum of sums.

    Args:
        gradient: dense or slices.
        by: the name of a tape, or an optimizer's `Reducer`.
    """
    gradient._hvd_ext_reduced = by


def reduced_by(gradient: Any) -> Any:
    """Give what `mark_reduced` noted; None for this rank's own gradient, and for what was computed from a marked one.

    Args:
        gradient: dense, slices or None.
    """
    return getattr(gradient, "_hvd_ext_reduced", None)


def reduced_copy(gradient: Any, by: Any) -> Any:
    """Give a copy of a gradient with a note of its own.

    Args:
        gradient: dense or slices.
        by: as for `mark_reduced`; None for no note.
    """
    copied = tf.nest.map_structure(tf.identity, gradient, expand_composites=True)
    mark_reduced(copied, by)
    return copied


def refuse(label: str, gradient: Any, variable: Any) -> None:
    """Refuse what cannot be reduced.

    Args:
        label: whose it is, for messages.
        gradient: this rank's.
        variable: that it belongs to.

    Raises:
        InvalidError: the gradient is not floating, not of its variable's shape, or the variable is overwritten with it.
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
    given = tf.as_dtype(gradient.dtype) if hasattr(gradient, "dtype") else tf.convert_to_tensor(gradient).dtype
    if not given.is_floating:
        raise InvalidError(
            f"{label}: the gradient of {name(variable)!r} must be of a floating dtype; it is {given.name}"
        )
    rows = isinstance(gradient, tf.IndexedSlices)
    shape = tf.TensorShape(gradient.values.shape if rows else getattr(gradient, "shape", None))
    wanted = tf.TensorShape([None, *variable.shape[1:]] if rows else variable.shape)
    if not shape.is_compatible_with(wanted):
        raise InvalidError(
            f"{label}: the gradient of {name(variable)!r} must be of its shape; it is {shape}, not {wanted}"
        )


def refuse_xla(label: str) -> None:
    """Refuse a function that XLA compiles, while it is traced.

    Args:
        label: whose gradients they are, for messages.

    Raises:
        InvalidError: the graph that is built, or one around it, will be compiled.
    """
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        context = graph._get_control_flow_context()
        if context is not None and context.IsXLAContext():
            raise InvalidError(f"{label}: {compatibility.XLA}")
        graph = getattr(graph, "outer_graph", None)
