"""The data of the convergence study: procedural images at half their size, and the text of Python's documentation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_ext.errors import InvalidError

IMAGES, TEXT = "images", "text"
# The ASCII characters; the last one stands for all others too.
VOCABULARY = 128
# Every tenth topic of the documentation is for testing; whole topics, so that no sentence is in both parts.
TEST_TOPIC = 10


@dataclass(frozen=True)
class Split:
    """Examples and their labels.

    Args:
        inputs: images uint8 [count, side, side, 3], or characters int32 [count, length].
        labels: int32: the shape, texture and colour of an image [count, 3], or the characters that follow [count,
            length].
    """

    inputs: NDArray[Any]
    labels: NDArray[np.int32]

    def first(self, count: int) -> Split:
        """Give the first `count` examples; all if it is 0."""
        return self if count == 0 else Split(self.inputs[:count], self.labels[:count])


@dataclass(frozen=True)
class Data:
    """A data set; the digest of all of it has 16 hexadecimal digits."""

    train: Split
    test: Split
    digest: str


def images(folder: Path) -> Data:
    """Read the image set of examples/make_images.py at half its side: classes take turns in both splits.

    The shape, the texture and the colour of an image are three labels. With one label of 64 classes, a small network
    has a third of the images right after some minutes, and seeds are 4 points apart: nobody could see half a point.

    Returns:
        Images uint8 [count, side / 2, side / 2, 3], means of four pixels, and their labels.

    Raises:
        InvalidError: there is no whole set in the folder.
    """
    from PIL import Image

    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        recipe, names = manifest["recipe"], manifest["class_names"]
    except (OSError, ValueError, KeyError) as error:
        raise InvalidError(
            f"images ({folder}): must be an image set: python examples/make_images.py --output {folder}; {error}"
        ) from error
    splits = []
    labels = parts_of(names)
    for split in ("train", "test"):
        places = {name: sorted((folder / split / name).glob("*.jpg")) for name in names}
        found = sorted((path.name, label, path) for label, name in enumerate(names) for path in places[name])
        if len(found) != recipe[split]:
            raise InvalidError(f"images ({folder}): must have {recipe[split]} of {split}; there are {len(found)}")
        side = recipe["pixels"] // 2
        halved = np.empty((len(found), side, side, 3), np.uint8)

        def read(index: int, found: Any = found, halved: Any = halved, side: int = side) -> None:
            with Image.open(found[index][2]) as image:
                pixels = np.asarray(image.convert("RGB"), np.uint16)[: 2 * side, : 2 * side]
            halved[index] = (pixels.reshape(side, 2, side, 2, 3).sum(axis=(1, 3)) + 2) // 4

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(read, range(len(found))))
        splits.append(Split(halved, labels[[label for _, label, _ in found]]))
    return Data(splits[0], splits[1], _digest(splits))


def parts_of(names: Sequence[str]) -> NDArray[np.int32]:
    """Number the parts of names such as "star_dots_red", all of which have as many parts.

    Returns:
        int32 [names, parts]: the places of the parts among all that stand at the same position, sorted.
    """
    parts = np.array([name.split("_") for name in names])
    return np.stack([np.unique(column, return_inverse=True)[1] for column in parts.T], axis=1).astype(np.int32)


def text(length: int, topics: Mapping[str, str] | None = None) -> Data:
    """Cut the language reference that comes with Python into windows; a character's label is the next character.

    Args:
        length: characters of a window.
        topics: texts by name; None for those of `pydoc_data.topics`.

    Returns:
        Windows int32 [count, length] and, at every place, the character that follows.
    """
    if topics is None:
        from pydoc_data import topics as documentation

        topics = documentation.topics
    splits = []
    for test in (False, True):
        chosen = [words for place, (_, words) in enumerate(sorted(topics.items())) if (place % TEST_TOPIC == 0) == test]
        codes = np.minimum(np.array([ord(one) for one in "\n".join(chosen)], np.int32), VOCABULARY - 1)
        count = (len(codes) - 1) // length
        inputs, labels = (codes[begin : begin + count * length].reshape(count, length) for begin in (0, 1))
        splits.append(Split(inputs, labels))
    return Data(splits[0], splits[1], _digest(splits))


def _digest(splits: list[Split]) -> str:
    digest = hashlib.sha256()
    for split in splits:
        digest.update(np.ascontiguousarray(split.inputs).tobytes() + split.labels.tobytes())
    return digest.hexdigest()[:16]


def save(path: Path, data: Data) -> None:
    """Write a data set into one file, whole or not at all."""
    half = path.with_name(path.name + ".part")
    with half.open("wb") as file:
        np.savez(
            file,
            train_inputs=data.train.inputs,
            train_labels=data.train.labels,
            test_inputs=data.test.inputs,
            test_labels=data.test.labels,
            digest=np.array(data.digest),
        )
    half.replace(path)


def load(path: Path) -> Data:
    """Read a file that `save` has written."""
    with np.load(path) as file:
        splits = [Split(file[f"{split}_inputs"], file[f"{split}_labels"]) for split in ("train", "test")]
        return Data(splits[0], splits[1], str(file["digest"]))
