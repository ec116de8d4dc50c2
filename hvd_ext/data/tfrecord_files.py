"""TFRecord files as sources: where their records lie is found by their heads, and no record is read."""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_ext.data import native
from hvd_ext.data.record_files import Columns, RecordFiles, opened, smallest
from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    import tensorflow as tf

# The framing of a TFRecord (tensorflow/core/lib/io/record_writer.h): uint64 length, masked CRC-32C of the length, the
# data, masked CRC-32C of the data.
_HEAD = struct.Struct("<QI")
_LENGTH_NBYTES = 8
_FOOT_NBYTES = 4
_GZIP = b"\x1f\x8b"


def _records(path: str) -> Iterator[tuple[int, int]]:
    """Yield where the data of each record begin, and their length."""
    crc32c = native.load().hvd_ext_cache_crc32c
    with opened("tfrecord", path) as descriptor:
        end, at = os.fstat(descriptor).st_size, 0
        while at < end:
            head = os.pread(descriptor, _HEAD.size, at)
            if len(head) < _HEAD.size:
                raise InvalidError(
                    f"tfrecord ({path}): it is torn: a record begins at byte {at:,}, and the file ends there"
                )
            length, crc = _HEAD.unpack(head)
            if _masked(crc32c(0, head, _LENGTH_NBYTES)) != crc:
                if at == 0 and head.startswith(_GZIP):
                    raise InvalidError(
                        f"tfrecord ({path}): it is compressed (gzip), and its records cannot be found; unpack it"
                    )
                raise InvalidError(
                    f"tfrecord ({path}): the head of the record at byte {at:,} is damaged, or this is no TFRecord "
                    "file: the checksum of its length is wrong"
                )
            begin = at + _HEAD.size
            if begin + length + _FOOT_NBYTES > end:
                raise InvalidError(
                    f"tfrecord ({path}): it is torn: the record at byte {at:,} has {length:,} bytes, and the file "
                    f"ends at byte {end:,}; write the file again"
                )
            yield begin, length
            at = begin + length + _FOOT_NBYTES


def _masked(crc: int) -> int:
    return (crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF


class _TFRecord(RecordFiles):
    kind = "tfrecord"

    def _scan(self, paths: Sequence[str]) -> Columns:
        # arrays and not lists, whose objects would take ten times as much memory for a million records
        first, begins, lengths = [0], array("q"), array("q")
        for path in paths:
            for begin, length in _records(path):
                begins.append(begin)
                lengths.append(length)
            first.append(len(begins))
        return {"first": np.array(first, np.int64), "offset": smallest(begins), "nbytes": smallest(lengths)}

    @property
    def element_spec(self) -> Any:
        import tensorflow as tf

        return tf.TensorSpec((), tf.string)

    def locate(self, numbers: tf.Tensor) -> Any:
        import tensorflow as tf

        ranges = (tf.cast(tf.gather(self.tensors[name], numbers), tf.int64) for name in ("offset", "nbytes"))
        return self.path_of(numbers), *ranges

    def read(self, located: Any) -> Any:
        return native.read_range(*located, checked=True)


def tfrecord(files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> _TFRecord:
    """Take each record of TFRecord files as a sample: its bytes, a string scalar.

    Args:
        files: a file, a pattern such as "train/*.tfrecord", or a list of them, on a local or mounted file system. They
            are taken in the order of their names, each once, and must not be compressed.

    Returns:
        The source.

    Raises:
        InvalidError: there are no such files, or they are not local. When the records are first looked for: a file is
            torn, compressed, or no TFRecord file.
    """
    return _TFRecord(files)
