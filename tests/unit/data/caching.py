"""What the tests of caches and sources share: pictures, records, a load that counts how often it runs, epochs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_ext.data import sources

RECORDS = [bytes([index % 251]) * (index * 37) for index in range(50)]
SIDE = 8
CLASSES = ("a", "b", "c")


def write_pictures(root: Path, number: int, broken: tuple[int, ...] = ()) -> Path:
    """Write JPEG files, each of another grey, into class folders of a new folder; broken numbers are no JPEG files."""
    for index in range(number):
        folder = root / CLASSES[index * len(CLASSES) // number]
        folder.mkdir(parents=True, exist_ok=True)
        picture = np.full((SIDE, SIDE, 3), 2 * index, np.uint8)
        data = b"no picture" if index in broken else tf.io.encode_jpeg(picture, quality=100).numpy()
        (folder / f"{index:04}.jpg").write_bytes(data)
    return root


def decode(contents: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Decode a picture of `write_pictures`."""
    picture = tf.io.decode_jpeg(contents, channels=3)
    picture.set_shape((SIDE, SIDE, 3))
    return picture, label


class Counted:
    """Counts how often each sample is loaded, as a function inside of a graph."""

    def __init__(self) -> None:
        self.times: Counter[int] = Counter()

    def __call__(self, number: tf.Tensor) -> tf.Tensor:
        """Count a sample, and give its number again."""

        def count(number: np.ndarray) -> np.ndarray:
            self.times[int(number)] += 1
            return number

        same = tf.numpy_function(count, [number], number.dtype)
        same.set_shape(())
        return same


def numbered(counted: Counted, width: int = 64) -> Callable[[tf.Tensor], dict[str, tf.Tensor]]:
    """Make a load of numbers that gives a vector of the number and the number."""

    def load(number: tf.Tensor) -> dict[str, tf.Tensor]:
        same = counted(number)
        return {"row": tf.fill([width], tf.cast(same, tf.int32)), "number": same}

    return load


def epoch(dataset: tf.data.Dataset) -> list[Any]:
    """Give the batches of an epoch, in NumPy."""
    return list(dataset.as_numpy_iterator())


def flip_a_bit(path: Path, place: int) -> None:
    """Damage the byte of a file at a place."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def numbers_of(batches: list[Any]) -> list[int]:
    """Give the numbers of the samples of `numbered`, and check their rows."""
    found: list[int] = []
    for batch in batches:
        assert np.array_equal(batch["row"], np.repeat(batch["number"][:, None], batch["row"].shape[1], 1))
        found += batch["number"].tolist()
    return found


def read_all(source: sources.Source) -> list[Any]:
    """Read the samples as a cache does: in a graph that captures the index."""
    numbers = tf.data.Dataset.range(source.samples).batch(max(1, source.samples))
    located = numbers.map(source.locate).unbatch()
    # a tuple that says where a sample lies is one argument
    return list(located.map(lambda *parts: source.read(parts if len(parts) > 1 else parts[0])).as_numpy_iterator())
