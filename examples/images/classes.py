"""The classes of the data set: every class is one shape, one texture and one colour."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

SHAPES = ("triangle", "square", "star", "disc", "cross", "ring", "crescent", "heart")
TEXTURES = ("stripes", "checks", "dots", "blobs", "waves", "bricks", "circles", "grid")
# Hue in turns. The families are a quarter turn apart, because lighting and jitter move a hue by up to a twelfth.
COLOURS = {"red": 0.0, "lime": 0.25, "cyan": 0.5, "violet": 0.75}

MAX_CLASSES = len(SHAPES) * len(TEXTURES) * len(COLOURS)
MIN_CLASSES = 2


@dataclass(frozen=True)
class ImageClass:
    """One class: an image shows a large object with this shape, texture and colour."""

    shape: str
    texture: str
    colour: str

    @property
    def name(self) -> str:
        """Name of the class, which is also the name of its folder."""
        return f"{self.shape}_{self.texture}_{self.colour}"


@cache
def classes(count: int) -> tuple[ImageClass, ...]:
    """Choose the classes of a data set.

    The classes fill a cube (shape x texture x colour) from one corner, so a set of 64 is the full cube of four shapes,
    four textures and four colours: knowing two of the three never tells the class.

    Args:
        count: number of classes, 2 to 256.

    Returns:
        The classes; their order is the order of the labels and of the alphabet of their names.

    Raises:
        ValueError: when there are not that many classes.
    """
    if not MIN_CLASSES <= count <= MAX_CLASSES:
        raise ValueError(
            f"classes ({count}) must lie between {MIN_CLASSES} and {MAX_CLASSES}; choose a number in that range"
        )
    cube = product(range(len(SHAPES)), range(len(TEXTURES)), range(len(COLOURS)))
    chosen = sorted(cube, key=lambda corner: (max(corner[:2]), corner))[:count]
    names = tuple(COLOURS)
    return tuple(sorted((ImageClass(SHAPES[s], TEXTURES[t], names[c]) for s, t, c in chosen), key=lambda one: one.name))
