"""Sources of samples for a cache: samples that are read by number. Each kind of source has a file of its own."""

from __future__ import annotations

import abc
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    import tensorflow as tf


class Source(abc.ABC):
    """Samples that can be read by their numbers, 0 to `samples` - 1, by any process at any time.

    Attributes:
        kind: what the source is, for messages: "folder", "tfrecord", "tar" or "arrays".
        words: the source in words.
        left_out: what was there and is no sample, in words; "" for nothing.
        digest: identifies the data on this host: names, sizes and times of change of files, or the bytes of arrays.
        contents: must be the same on all ranks: names and sizes, without times, which copies on other hosts may lose.
    """

    kind: str
    words: str
    left_out = ""
    digest: str
    contents: str

    @property
    @abc.abstractmethod
    def samples(self) -> int:
        """The number of samples."""

    @property
    @abc.abstractmethod
    def element_spec(self) -> Any:
        """The nest of `tf.TensorSpec` that `read` gives."""

    def locate(self, numbers: tf.Tensor) -> Any:
        """Say where samples lie, as a pure function of TensorFlow: once for many of them, because this costs much less.

        Args:
            numbers: int64 [n].

        Returns:
            A nest of tensors with n rows, from which `read` reads.
        """
        return numbers

    @abc.abstractmethod
    def read(self, located: Any) -> Any:
        """Read a sample, as a pure function of TensorFlow.

        Args:
            located: one row of what `locate` gives.

        Returns:
            A nest of tensors as `element_spec` has it.
        """

    @abc.abstractmethod
    def place_of(self, number: int) -> str:
        """Say where a sample lies, for messages.

        Args:
            number: the sample.
        """

    def open(self, folder: Path | None = None) -> None:  # noqa: B027 - most sources have nothing to open
        """Find the samples, if that takes a walk through the data.

        Args:
            folder: where the index is kept for the next job; None: nowhere.
        """


def local_path(kind: str, path: Any) -> str:
    """Give the absolute path of what a user has named.

    Args:
        kind: of the source, for messages.
        path: what the user has passed.

    Raises:
        InvalidError: it is no path, or the address of an object store.
    """
    try:
        text = os.fspath(path)
    except TypeError:
        raise InvalidError(f"{kind} ({path!r}): must be a path") from None
    text = os.fsdecode(text)
    scheme, separator, _ = text.partition("://")
    if separator and scheme.isalnum():
        raise InvalidError(
            f"{kind} ({text}): must be on a local or mounted file system; for others give the cache an array of paths "
            "and read them in load, with tf.io.read_file"
        )
    return os.path.abspath(text)


def why_no_file(path: str) -> str:
    """Say in words why a path is not that of a file, for messages.

    Args:
        path: something that is there, and is neither a file nor a folder.
    """
    if os.path.islink(path) and not os.path.exists(path):
        return f"it is a link to {os.readlink(path)!r}, which is missing or leads back to itself; mend or remove it"
    return "it is neither a file nor a folder, but a pipe, a socket or a device; remove it"


def constants(columns: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    """Make eager tensors in the CPU's memory, which graphs capture and do not copy.

    Args:
        columns: arrays, and lists of bytes, by their names.
    """
    import tensorflow as tf

    with tf.init_scope(), tf.device("CPU:0"):
        return {name: tf.constant(column) for name, column in columns.items()}


def digest_of(hashed: Any, *more: Any) -> str:
    """Give the digest of what was hashed and of further values.

    Args:
        hashed: a hash of `hashlib`, which stays as it is.
        *more: values that JSON can hold.

    Returns:
        Hexadecimal digits.
    """
    hashed = hashed.copy()
    hashed.update(json.dumps(more).encode())
    return str(hashed.hexdigest())
