"""Pictures that are drawn: JPEG files, the same ones in every call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HEIGHT, WIDTH = 375, 500  # of most photographs of ImageNet
QUALITY = 90
GRAIN = 16  # the side, in pixels, of a spot of about one colour
POOL = 251  # pictures that are drawn; a prime, so that no batch has the same ones again
SEED = 18


def write_pictures(folder: Path, count: int, height: int = HEIGHT, width: int = WIDTH) -> list[str]:
    """Draw pictures, spots of colour with noise, and write them as JPEG files; return their paths.

    They are the same in every call, and files that are there are kept. Behind the first `POOL` the same pictures follow
    again, in files of their own.
    """
    import tensorflow as tf

    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(SEED)
    noise = random.normal(0, 6, (2 * height, 2 * width, 3)).astype(np.float32)
    paths = [folder / f"{number:06d}.jpg" for number in range(count)]
    with tf.device("CPU:0"):
        for number, path in enumerate(paths):
            if number >= POOL:
                _write(path, lambda number=number: paths[number % POOL].read_bytes())
                continue
            spots = random.integers(0, 256, (height // GRAIN + 2, width // GRAIN + 2, 3)).astype(np.float32)
            y, x = (int(random.integers(0, most)) for most in (height, width))

            def drawn(spots: Any = spots, part: Any = noise[y : y + height, x : x + width]) -> bytes:
                smooth = tf.image.resize(spots, (height, width), "bilinear")
                picture = tf.cast(tf.clip_by_value(smooth + part, 0, 255), tf.uint8)
                return bytes(tf.io.encode_jpeg(picture, quality=QUALITY).numpy())

            _write(path, drawn)
    return [str(path) for path in paths]


def _write(path: Path, contents: Callable[[], bytes]) -> None:
    """Write a file, whole or not at all, if it is not there."""
    if not path.exists():
        half = path.with_suffix(".part")
        half.write_bytes(contents())
        half.replace(path)


def decoded(contents: Any, side: int) -> Any:
    """Decode a JPEG file and reduce it: a TensorFlow string to uint8 [side, side, 3]."""
    import tensorflow as tf

    picture = tf.image.resize(tf.io.decode_jpeg(contents, channels=3), (side, side))
    return tf.ensure_shape(tf.cast(picture, tf.uint8), (side, side, 3))
