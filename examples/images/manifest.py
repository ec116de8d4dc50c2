"""The manifest of an image set: how it was made, whether it is whole, and what its bytes must be."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from images.classes import ImageClass, classes

NAME = "manifest.json"
# The drawing's version: it changes whenever the same seed would give other pixels.
DRAWING = 1
SPLITS = ("train", "test")
PIXELS = (16, 512)


class ImageSetError(RuntimeError):
    """The image set cannot be made or read as asked; the message says why and what to do."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides an image set's bytes."""

    train: int = 30_000
    test: int = 10_000
    classes: int = 64
    pixels: int = 64
    seed: int = 1

    def check(self) -> None:
        """Refuse a recipe that no image set can follow.

        Raises:
            ImageSetError: names the option, the rule and the value seen.
        """
        try:
            classes(self.classes)
        except ValueError as error:
            raise ImageSetError(str(error)) from None
        for split in SPLITS:
            count = self.count(split)
            if count < self.classes:
                raise ImageSetError(
                    f"{split} ({count}) must give each of the {self.classes} classes an image; ask for more images"
                )
        if not PIXELS[0] <= self.pixels <= PIXELS[1]:
            raise ImageSetError(
                f"pixels ({self.pixels}) must lie between {PIXELS[0]} and {PIXELS[1]}; choose a side in that range"
            )
        if self.seed < 0:
            raise ImageSetError(f"seed ({self.seed}) must not be negative; choose 0 or more")

    def count(self, split: str) -> int:
        """Number of images of a split ("train" or "test")."""
        return self.train if split == "train" else self.test

    def key(self, split: str, index: int) -> tuple[int, ...]:
        """The own seed of one image, so that no image depends on who draws it, or on how many there are."""
        return (DRAWING, self.seed, SPLITS.index(split), index)

    def class_of(self, index: int) -> ImageClass:
        """The class of one image: classes take turns, so every split is balanced."""
        return classes(self.classes)[index % self.classes]

    def path(self, split: str, index: int) -> str:
        """Where one image lies, relative to the image set."""
        return f"{split}/{self.class_of(index).name}/{index:06d}.jpg"


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is either whole or not there, whatever stops the process.

    Args:
        path: the file; an existing one is replaced.
        data: its bytes.

    Raises:
        OSError: when it cannot be written; no partial file stays behind.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_manifest(folder: Path, recipe: Recipe, **facts: Any) -> dict[str, Any]:
    """Write the manifest of an image set.

    Args:
        folder: the image set.
        recipe: how it is made.
        facts: "complete" and, for a whole set, its digest and sizes.

    Returns:
        The manifest as written.
    """
    names = [one.name for one in classes(recipe.classes)]
    content = {"drawing": DRAWING, "recipe": asdict(recipe), "class_names": names, **facts}
    write_whole(folder / NAME, (json.dumps(content, indent=1) + "\n").encode())
    return content


def read_manifest(folder: Path, *, complete: bool = True) -> dict[str, Any]:
    """Read the manifest of an image set.

    Args:
        folder: the image set.
        complete: refuse a set that is not whole yet.

    Returns:
        The manifest.

    Raises:
        ImageSetError: when there is none, or when the set is not whole.
    """
    path = folder / NAME
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ImageSetError(
            f"image set ({folder}) has no {NAME}; make it: python examples/make_images.py --output {folder}"
        ) from None
    except (OSError, ValueError) as error:
        raise ImageSetError(
            f"manifest ({path}) cannot be read: {error}; remove the folder and make the set again"
        ) from None
    if complete and not content.get("complete"):
        raise ImageSetError(
            f"image set ({folder}) is not whole yet; give the command that began it again, it goes on from there"
        )
    return content
