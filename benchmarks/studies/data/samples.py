"""Samples that are a function of their number, and files behind a slow source."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_ext.bench.pictures import POOL, SEED

Bytes = NDArray[np.uint8]


class Numbered:
    """Samples that are a function of their number: a picture, and the number as its label.

    The picture is one of a pool, with its bits changed so that no two samples are equal.
    """

    def __init__(self, side: int, pool: int = POOL) -> None:
        """Draw a pool of pictures uint8 [side, side, 3]."""
        self.side, self.nbytes = side, 3 * side * side
        self.pool: Bytes = np.random.default_rng(SEED).integers(0, 256, (pool, self.nbytes), np.uint8)
        self._constant: Any = None

    def pictures(self, numbers: Sequence[int] | NDArray[Any]) -> Bytes:
        """Give pictures, uint8 [numbers, side, side, 3]."""
        numbers = np.asarray(numbers)
        changed = self.pool[numbers % len(self.pool)] ^ (numbers // len(self.pool) % 256).astype(np.uint8)[:, None]
        return changed.reshape(-1, self.side, self.side, 3)

    def load(self, number: Any) -> tuple[Any, Any]:
        """Give the picture and the label of a number, an int64 scalar, as TensorFlow does."""
        import tensorflow as tf

        if self._constant is None:
            with tf.init_scope(), tf.device("CPU:0"):
                self._constant = tf.constant(self.pool)
        row = tf.gather(self._constant, number % len(self.pool))
        changed = tf.bitwise.bitwise_xor(row, tf.cast(number // len(self.pool) % 256, tf.uint8))
        return tf.reshape(changed, (self.side, self.side, 3)), tf.cast(number, tf.int32)

    def fault(self, pictures: Any, labels: Any) -> str:
        """Say which picture of a batch is not that of its label; "" if all are."""
        pictures, labels = np.asarray(pictures), np.asarray(labels)
        wrong = np.flatnonzero((pictures != self.pictures(labels)).reshape(len(labels), -1).any(1))
        return f"the picture of sample {labels[wrong[0]]} is another one" if wrong.size else ""


class Source:
    """Reads files as from a slow store: all readers of a host share its rate, and each file takes a while.

    Readers agree by a file that holds when the store will be free again. It works between processes of one machine,
    whose clocks are one.
    """

    def __init__(self, path: Path, rate: float, file_s: float) -> None:
        """Take the file, the rate in bytes per second, and the seconds that a file takes beside its bytes."""
        self._path, self._rate, self._file_s = path, rate, file_s
        self.files = self.bytes = 0

    def read(self, path: bytes | str) -> bytes:
        """Read a file, not faster than the source allows; count it."""
        begin_s = time.monotonic()
        contents = Path(os.fsdecode(path)).read_bytes()
        over_s = max(self._taken(begin_s, len(contents)), begin_s + self._file_s)
        while (left := over_s - time.monotonic()) > 0:
            time.sleep(left)
        self.files, self.bytes = self.files + 1, self.bytes + len(contents)
        return contents

    def _taken(self, now_s: float, nbytes: int) -> float:
        """Take a place in the queue of the store; give when its last byte is there."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            kept = os.pread(descriptor, 8, 0)
            free_s = struct.unpack("<d", kept)[0] if len(kept) == 8 else 0.0
            over_s = float(max(now_s, free_s)) + nbytes / self._rate
            os.pwrite(descriptor, struct.pack("<d", over_s), 0)
        finally:
            os.close(descriptor)
        return over_s
