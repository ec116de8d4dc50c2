"""Rows of what Keras' `fit` takes as arrays: dense, ragged and sparse ones, of NumPy, TensorFlow and SciPy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_ext.errors import InvalidError

_TEXT = "OSU"  # the kinds of NumPy's dtypes that hold strings: objects, bytes, text
_INSTEAD = {
    "M": "give dates as numbers: array.astype('datetime64[s]').astype('int64')",
    "m": "give times as numbers: array / np.timedelta64(1, 's')",
    "O": "make an array of numbers or of strings of it",
    "V": "give its fields as arrays of their own: {name: array[name] for name in array.dtype.names}",
}


def dtype_of(array: np.ndarray[Any, Any]) -> tf.DType:
    """Give TensorFlow's dtype of an array of `dense`."""
    return tf.string if array.dtype.kind in _TEXT else tf.as_dtype(array.dtype.newbyteorder("="))


def dense(value: Any, subject: str) -> np.ndarray[Any, Any]:
    """Make a NumPy array of what holds numbers or strings in rows.

    Args:
        value: what has a shape: an array or tensor of any library.
        subject: whose arrays they are, for messages.

    Returns:
        The array, with strings that were objects or of variable width as objects of bytes. A NumPy array of other
        values is the array itself, such as one that lies in a file.

    Raises:
        InvalidError: TensorFlow has no such values, such as dates.
    """
    try:
        array = value if isinstance(value, np.ndarray) else np.asarray(value)
    except (TypeError, ValueError) as error:
        raise InvalidError(f"{subject} ({type(value).__name__}): cannot be made an array: {error}") from None
    if array.dtype.kind in "OT":
        return _of_bytes(array, subject)
    try:
        dtype_of(array)
    except TypeError:
        instead = _INSTEAD.get(array.dtype.kind, "cast it: array.astype('float64')")
        raise InvalidError(
            f"{subject} ({array.dtype}): must hold numbers or strings that TensorFlow has; {instead}"
        ) from None
    return array


def _of_bytes(array: np.ndarray[Any, Any], subject: str) -> np.ndarray[Any, Any]:
    texts = np.empty(array.shape, object)
    for place, value in enumerate(array.flat):
        if not isinstance(value, str | bytes):
            raise InvalidError(
                f"{subject} (objects: {type(value).__name__}): must hold numbers or strings; {_INSTEAD['O']}"
            )
        texts.flat[place] = value.encode() if isinstance(value, str) else value
    return texts


def of(value: Any, subject: str) -> Any:
    """Make of what Keras' `fit` takes as an array something whose rows can be taken.

    Args:
        value: what has a shape: an array or tensor of any library, a `tf.RaggedTensor` or `tf.SparseTensor`, or a
            sparse array of SciPy.
        subject: whose arrays they are, for messages.

    Returns:
        A NumPy array, a `tf.RaggedTensor`, or a `tf.SparseTensor` in the order of its rows.

    Raises:
        InvalidError: TensorFlow has no such values.
    """
    if is_sparse_of_scipy(value):
        entries = value.tocoo()
        places = entries.coords if hasattr(entries, "coords") else (entries.row, entries.col)  # before SciPy 1.13
        value = tf.SparseTensor(np.stack(places, 1).astype(np.int64), dense(entries.data, subject), entries.shape)
    if isinstance(value, tf.SparseTensor):
        if len(value.shape) < 2:
            raise InvalidError(f"{subject} (SparseTensor): must have two dimensions or more; it has {len(value.shape)}")
        return tf.sparse.reorder(value)
    return value if isinstance(value, tf.RaggedTensor) else dense(value, subject)


def is_sparse_of_scipy(value: Any) -> bool:
    """Tell whether a value is a sparse matrix or array of SciPy, which is not imported for it."""
    scipy = sys.modules.get("scipy.sparse")
    return scipy is not None and bool(scipy.issparse(value))


def number(arrays: Sequence[Any], subject: str) -> int:
    """Give the number of rows that all arrays have, each of which `of` has made; 0 for scalars.

    Args:
        arrays: some arrays.
        subject: whose arrays they are, for messages.

    Raises:
        InvalidError: there are no arrays, or they have unequal numbers of rows.
    """
    numbers = set(map(_number, arrays))
    if len(numbers) != 1:
        words = ", ".join(map(str, sorted(numbers))) or "no arrays"
        raise InvalidError(f"{subject} must have the same number of rows; they have {words}")
    return numbers.pop()


def _number(array: Any) -> int:
    if isinstance(array, tf.RaggedTensor):
        return int(array.nrows())
    return int(array.shape[0]) if len(array.shape) else 0


def spec(rows: Any, count: int | None) -> Any:
    """Give the spec of some rows.

    Args:
        rows: what `of` has made.
        count: how many; None where this varies.

    Returns:
        A `tf.TypeSpec`.
    """
    if isinstance(rows, tf.RaggedTensor):
        return tf.RaggedTensorSpec((count, *rows.shape[1:]), rows.dtype, rows.ragged_rank, rows.row_splits.dtype)
    if isinstance(rows, tf.SparseTensor):
        return tf.SparseTensorSpec((count, *rows.shape[1:]), rows.dtype)
    return tf.TensorSpec((count, *rows.shape[1:]), dtype_of(rows))


def taker(rows: Any) -> Callable[[Any], Any]:
    """Make a function that takes rows, of ragged and sparse tensors also in a graph.

    Args:
        rows: what `of` has made.

    Returns:
        A function of the numbers of rows, int64 [n], that gives them as an array or tensor of the same kind.
    """
    if isinstance(rows, np.ndarray):
        return lambda numbers: rows[numbers]
    if isinstance(rows, tf.RaggedTensor):
        return lambda numbers: tf.gather(rows, numbers)
    # the entries of each row follow each other
    places = tf.RaggedTensor.from_value_rowids(rows.indices[:, 1:], rows.indices[:, 0], rows.dense_shape[0])
    values = places.with_values(rows.values)

    def take(numbers: Any) -> tf.SparseTensor:
        inside, taken = tf.gather(places, numbers), tf.gather(values, numbers)
        indices = tf.concat([inside.value_rowids()[:, None], inside.values], 1)
        shape = tf.concat([tf.shape(numbers, tf.int64), rows.dense_shape[1:]], 0)
        return tf.SparseTensor(indices, taken.values, shape)

    return take
