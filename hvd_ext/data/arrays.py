"""Arrays as sources: a row of each is a sample, read from memory or from the file that an array is mapped from."""

from __future__ import annotations

import functools
import hashlib
import mmap
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_ext.data import native, rows
from hvd_ext.data.sources import Source, constants, digest_of
from hvd_ext.errors import InvalidError

_DECODED_AS = {"bool": "uint8", "uint32": "int32", "uint64": "int64"}  # `decode_raw` does not know these
_HASHED_AT_ONCE = 64 << 20


class _Arrays(Source):
    kind = "arrays"

    def __init__(self, arrays: Any) -> None:
        self._arrays = tf.nest.map_structure(_array, _as_tuples(arrays))
        self._flat: list[np.ndarray[Any, Any]] = tf.nest.flatten(self._arrays)
        self._samples = rows.number(self._flat, "arrays: they")
        if not self._samples:
            raise InvalidError("arrays: they must have at least one row; they have none")
        shapes = ", ".join(f"{array.dtype} {array.shape}" for array in self._flat)
        self.words = f"arrays: {shapes}"
        self.digest, self.contents = self._digests()

    samples = property(lambda self: self._samples)

    def _digests(self) -> tuple[str, str]:
        """Give the digests with and without the times of change of files."""
        structure = repr(tf.nest.map_structure(lambda array: None, self._arrays))
        dated, undated = [structure], [structure]
        for array in self._flat:
            described = f"{array.dtype.str} {array.shape}"
            file = _file_of(array)
            if file is None:
                undated.append(digest_of(_hashed(array), described))
                dated.append(undated[-1])
            else:  # an array in a file may be larger than memory: its file stands for its bytes
                state = os.stat(file[0])
                place = (described, os.path.basename(file[0]), file[1], state.st_size)
                dated.append(digest_of(hashlib.sha256(), *place, state.st_mtime_ns))
                undated.append(digest_of(hashlib.sha256(), *place))
        return digest_of(hashlib.sha256(), *dated), digest_of(hashlib.sha256(), *undated)

    @property
    def element_spec(self) -> Any:
        return tf.nest.map_structure(lambda array: tf.TensorSpec(array.shape[1:], rows.dtype_of(array)), self._arrays)

    @functools.cached_property
    def _readers(self) -> list[Callable[[tf.Tensor], tf.Tensor]]:
        return [_reader(array) for array in self._flat]

    def read(self, located: Any) -> Any:
        return tf.nest.pack_sequence_as(self._arrays, [reader(located) for reader in self._readers])

    def place_of(self, number: int) -> str:
        return f"row {number} of the arrays"


def as_source(value: Any) -> Source:
    """Give what a user passed as a source: itself, or one whose samples are the rows of arrays.

    An array that `np.memmap` or `np.load(mmap_mode="r")` gave stays in its file.

    Args:
        value: a source; an array, or a nest (tuples, lists, dictionaries) of arrays that are equal in their first
            dimension.

    Returns:
        The source.

    Raises:
        InvalidError: it is neither, or the arrays have no rows, or unequal numbers of rows.
    """
    if isinstance(value, Source):
        return value
    if isinstance(value, tf.data.Dataset):
        raise InvalidError(
            "source (a tf.data.Dataset): its samples cannot be read by number; put the cache behind it instead: "
            "dataset.apply(hvd.data.cached(name))"
        )
    if isinstance(value, str | bytes | os.PathLike):
        raise InvalidError(
            f"source ({os.fspath(value)!r}): say what lies there: hvd.data.folder(path), hvd.data.tfrecord(files) or "
            "hvd.data.tar(files)"
        )
    return _Arrays(value)


def _as_tuples(data: Any) -> Any:
    """Make lists tuples, because a list of arrays is no array."""
    if isinstance(data, Mapping):
        return {name: _as_tuples(value) for name, value in data.items()}
    return tuple(map(_as_tuples, data)) if isinstance(data, list | tuple) else data


def _array(value: Any) -> np.ndarray[Any, Any]:
    if not hasattr(value, "shape"):
        raise InvalidError(
            f"arrays ({type(value).__name__}): must be arrays, or tuples, lists or dictionaries of arrays; other data "
            "come from hvd.data.folder, hvd.data.tfrecord or hvd.data.tar, or go through "
            "dataset.apply(hvd.data.cached(name))"
        )
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor) or rows.is_sparse_of_scipy(value):
        raise InvalidError(
            f"arrays ({type(value).__name__}): must be dense; make a data set of it, of a sparse array of SciPy as a "
            "tf.SparseTensor: tf.data.Dataset.from_tensor_slices(tensor).apply(hvd.data.cached(name))"
        )
    array = rows.dense(value, "arrays")
    if not array.shape:
        raise InvalidError("arrays (a scalar): each array needs a first dimension, the samples")
    return array


def _reader(array: np.ndarray[Any, Any]) -> Callable[[tf.Tensor], tf.Tensor]:
    file = _file_of(array)
    if file is None:
        values = constants({"rows": array})["rows"]
        return lambda number: tf.gather(values, number)

    path, begin = file
    nbytes, shape, dtype = array.nbytes // len(array), array.shape[1:], rows.dtype_of(array)

    def read(number: tf.Tensor) -> tf.Tensor:
        data = native.read_range(tf.constant(path), begin + number * nbytes, tf.constant(nbytes, tf.int64))
        raw = tf.io.decode_raw(data, _DECODED_AS.get(dtype.name, dtype))
        return tf.reshape(tf.cast(raw, dtype) if dtype == tf.bool else tf.bitcast(raw, dtype), shape)

    return read


def _file_of(array: np.ndarray[Any, Any]) -> tuple[str, int] | None:
    """Give the file of an array that lies in one, and where its rows begin there; None for all other arrays."""
    mapped = getattr(array, "_mmap", None)
    name = getattr(array, "filename", None)
    plain = array.dtype.kind in "biuf" and array.dtype.isnative and array.flags.c_contiguous and array.size
    if not isinstance(array, np.memmap) or not isinstance(mapped, mmap.mmap) or name is None or not plain:
        return None
    if array.mode == "c":  # the array may differ from its file
        return None
    # A slice keeps the offset of the whole array: its place follows from where its bytes lie in the mapping.
    start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    within = array.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    return os.path.abspath(name), start + within


def _hashed(array: np.ndarray[Any, Any]) -> Any:
    digest = hashlib.sha256()
    if array.dtype.kind == "O":
        for text in array.ravel():
            digest.update(b"%d\0" % len(text) + text)
        return digest
    count = max(1, _HASHED_AT_ONCE // max(1, array.nbytes // len(array)))
    for begin in range(0, len(array), count):
        digest.update(np.ascontiguousarray(array[begin : begin + count]).tobytes())
    return digest
