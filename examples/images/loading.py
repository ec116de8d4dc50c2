"""Read an image set into memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from images.classes import classes
from images.manifest import Recipe, read_manifest


def load(folder: Path, split: str, limit: int | None = None) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Read one split of an image set.

    Args:
        folder: the image set.
        split: "train" or "test".
        limit: read only the first images; classes take turns, so the part is balanced too.

    Returns:
        The images, uint8 [count, pixels, pixels, 3], and their labels, int32 [count].

    Raises:
        ImageSetError: when there is no whole image set.
    """
    recipe = Recipe(**read_manifest(folder)["recipe"])
    count = min(limit or recipe.count(split), recipe.count(split))
    place = {one.name: label for label, one in enumerate(classes(recipe.classes))}
    images = np.empty((count, recipe.pixels, recipe.pixels, 3), np.uint8)

    def read(index: int) -> None:
        with Image.open(folder / recipe.path(split, index)) as image:
            images[index] = np.asarray(image.convert("RGB"))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(read, range(count)))
    labels = np.array([place[recipe.class_of(index).name] for index in range(count)], np.int32)
    return images, labels
