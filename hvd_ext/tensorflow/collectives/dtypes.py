"""The dtypes that the collectives take: the engine's own, and others, which are converted for the way."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_ext.compression.codec import is_number
from hvd_ext.errors import InvalidError

# The dtypes that the engine reduces (HVD_EXT_REDUCED in tf_ops/ops/collective.cc).
REDUCED = ("float32", "float64", "float16", "bfloat16", "int32", "int64")
# These dtypes are added in a wider one, and the sum is checked before it is converted back. So is int32 where it is
# averaged or multiplied; its plain sums wrap around, like those of int64.
WIDENED = {"int8": "int32", "int16": "int32", "uint8": "int32", "uint16": "int32", "uint32": "int64"}
ALLREDUCED = (*REDUCED, *WIDENED)
# These dtypes are moved bit by bit, or in a wider dtype if the engine has none of their size.
CARRIER = {
    "bool": "uint8",
    "int8": "uint8",
    "int16": "int32",
    "uint16": "int32",
    "uint32": "int32",
    "uint64": "int64",
}
MOVED = (*REDUCED, "uint8", *CARRIER)

_HALVES = ("float16", "bfloat16")
_ADVICE = {
    "bool": "a sum of booleans is not a boolean; cast to int32, and compare the sum with 0 or with size()",
    "complex64": "reduce or move the real and the imaginary part: tf.math.real(x), tf.math.imag(x)",
    "complex128": "reduce or move the real and the imaginary part: tf.math.real(x), tf.math.imag(x)",
    "string": "use hvd_ext.allgather_object or hvd_ext.broadcast_object",
}


def converted(kind: str, value: Any, dtypes: tuple[str, ...]) -> tf.Tensor:
    """Convert an argument to a tensor; `InvalidError` for IndexedSlices, another dtype, or no conversion."""
    if isinstance(value, tf.IndexedSlices):
        raise InvalidError(f"{kind} (IndexedSlices): make it dense first: tf.convert_to_tensor(value)")
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError, tf.errors.OpError) as error:
        raise InvalidError(f"{kind} ({type(value).__name__}): it cannot be converted to one tensor: {error}") from error
    name = tensor.dtype.name
    if name not in dtypes:
        raise InvalidError(
            f"{kind} ({name}): the dtype must be one of {', '.join(dtypes)}; {_ADVICE.get(name, 'cast it')}"
        )
    return tensor


def with_rows(kind: str, tensor: tf.Tensor, verb: str) -> tf.Tensor:
    """Return a tensor that can be "joined" or "divided" along its first dimension; `InvalidError` for a scalar."""
    if tensor.shape.rank == 0:
        raise InvalidError(
            f"{kind} ({tensor.dtype.name} scalar): tensors are {verb} along their first dimension and a scalar has "
            "none; give it one: tf.expand_dims(tensor, 0)"
        )
    return tensor


def carried(tensor: tf.Tensor) -> tuple[tf.Tensor, str]:
    """Convert a tensor to the engine's dtype in which it is moved, and name its own; "" if the engine has it."""
    name = tensor.dtype.name
    if name not in CARRIER:
        return tensor, name if name == "uint8" else ""  # the engine calls it bytes
    carrier = tf.as_dtype(CARRIER[name])
    same_bits = name != "bool" and carrier.size == tensor.dtype.size
    return (tf.bitcast(tensor, carrier) if same_bits else tf.cast(tensor, carrier)), name


def unpacked(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Undo `carried`."""
    if tensor.dtype == dtype:
        return tensor
    same_bits = dtype != tf.bool and tensor.dtype.size == dtype.size
    return tf.bitcast(tensor, dtype) if same_bits else tf.cast(tensor, dtype)


def widened(tensor: tf.Tensor, plain_sum: bool) -> tuple[tf.Tensor, str]:
    """Convert a tensor to the engine's dtype in which it is added, and name its own; "" if the engine has it."""
    name = tensor.dtype.name
    wide = "int64" if name == "int32" and not plain_sum else WIDENED.get(name)
    return (tensor, "") if wide is None else (tf.cast(tensor, wide), name)


def divided(quotients: tf.Tensor, remainders: tf.Tensor, divisor: int) -> tf.Tensor:
    """Divide a sum whose terms were divided before they were added, so that no partial sum leaves the dtype.

    Args:
        quotients: the sum of the terms' quotients, int64.
        remainders: the sum of their remainders, int64.

    Returns:
        The sum of the terms divided by the divisor: int64, truncated toward zero.
    """
    floor = quotients + tf.math.floordiv(remainders, divisor)
    rest = tf.math.floormod(remainders, divisor)
    return floor + tf.cast(tf.logical_and(floor < 0, rest > 0), tf.int64)


def narrowed(what: str, tensor: tf.Tensor, dtype: tf.DType, by: float = 1.0) -> tf.Tensor:
    """Undo `widened`, and refuse a result that does not fit; all ranks have the same result, so all of them raise.

    Args:
        tensor: the result in a dtype of the engine; or float64 for an integer dtype, or float32 for float16.
        by: multiplies the result first; integers are multiplied in float64, and then truncated toward zero.

    Raises:
        InvalidError: the result is outside the dtype's range; a running graph raises TensorFlow's
            InvalidArgumentError.
    """
    if not dtype.is_integer:
        return tf.cast(scaled(tensor, by), dtype)
    if by != 1.0:
        tensor = tf.cast(tensor, tf.float64) * by
    if tensor.dtype == dtype:
        return tensor
    low, high = int(dtype.min), int(dtype.max)
    if tensor.dtype.is_floating:
        tensor = tf.sign(tensor) * tf.floor(tf.abs(tensor))
        outside = tf.logical_not(tf.logical_and(tensor >= float(low), tensor < float(high + 1)))
    else:
        outside = tf.logical_or(tensor < low, tensor > high)
    words = (
        f"{what}: the result does not fit into {dtype.name} ({low} to {high}); cast to a wider dtype before the call"
    )
    if tf.executing_eagerly():
        if bool(tf.reduce_any(outside)):
            raise InvalidError(words)
        return tf.cast(tensor, dtype)
    with tf.control_dependencies([tf.debugging.Assert(tf.logical_not(tf.reduce_any(outside)), [words])]):
        return tf.cast(tensor, dtype)


def factor(kind: str, name: str, value: Any) -> float:
    """Check a prescale or postscale factor; `InvalidError` if the value is not a finite number."""
    if not is_number(value):
        raise InvalidError(f"{kind}: {name} ({value!r}): must be a finite number")
    return float(value)


def scaled(tensor: tf.Tensor, by: float) -> tf.Tensor:
    """Multiply in the tensor's dtype; halves in float32, integers in float64 and then truncated; differentiable."""
    if by == 1.0:
        return tensor
    wide = tf.float32 if tensor.dtype.name in _HALVES else tf.float64 if tensor.dtype.is_integer else tensor.dtype
    return tf.cast(tf.cast(tensor, wide) * tf.constant(by, wide), tensor.dtype)
