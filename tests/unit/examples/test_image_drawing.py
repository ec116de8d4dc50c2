"""What the images show: classes that need shape, texture and colour, and no single pixel statistic that tells them."""

from __future__ import annotations

import io
import itertools
from collections import Counter

import numpy as np
import pytest
from images.classes import COLOURS, MAX_CLASSES, SHAPES, TEXTURES, ImageClass, classes
from images.manifest import Recipe
from images.scene import draw, jpeg
from PIL import Image


def test_a_set_of_64_is_a_full_cube_so_that_two_attributes_never_tell_the_class() -> None:
    found = classes(64)
    assert len(set(found)) == 64
    for attributes in itertools.combinations(("shape", "texture", "colour"), 2):
        pairs = Counter(tuple(getattr(one, name) for name in attributes) for one in found)
        assert set(pairs.values()) == {4}


@pytest.mark.parametrize("count", [2, 50, 64, 100, MAX_CLASSES])
def test_classes_are_different_and_every_split_is_balanced(count: int) -> None:
    names = [one.name for one in classes(count)]
    assert len(set(names)) == count
    assert names == sorted(names)
    recipe = Recipe(train=200, test=128, classes=count)
    for split in ("train", "test"):
        counts = Counter(recipe.class_of(index) for index in range(recipe.count(split)))
        assert max(counts.values()) - min(counts.values()) <= 1
    assert Recipe(seed=1).key("train", 0) != Recipe(seed=2).key("train", 0)
    for wrong in (0, 1, MAX_CLASSES + 1):
        with pytest.raises(ValueError, match=f"classes \\({wrong}\\)"):
            classes(wrong)


@pytest.mark.parametrize("pixels", [16, 33, 64])
def test_the_same_key_gives_the_same_bytes_of_a_square_and_another_key_another_image(pixels: int) -> None:
    one = classes(64)[7]
    image = Image.open(io.BytesIO(jpeg(one, pixels, (1, 2, 0, 5))))
    assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (pixels, pixels))
    assert jpeg(one, pixels, (1, 2, 0, 5)) == jpeg(one, pixels, (1, 2, 0, 5)) != jpeg(one, pixels, (1, 2, 0, 6))


def test_the_three_attributes_each_change_the_image() -> None:
    first = ImageClass(SHAPES[0], TEXTURES[0], "red")
    others = (
        ImageClass(SHAPES[1], TEXTURES[0], "red"),
        ImageClass(SHAPES[0], TEXTURES[1], "red"),
        ImageClass(SHAPES[0], TEXTURES[0], list(COLOURS)[2]),
    )
    plain = np.asarray(draw(first, 64, np.random.default_rng(4)), np.int32)
    for other in others:
        assert (np.abs(np.asarray(draw(other, 64, np.random.default_rng(4)), np.int32) - plain) > 40).mean() > 0.02


def test_the_mean_colour_of_an_image_does_not_tell_its_class() -> None:
    recipe = Recipe(train=320, test=320, classes=16, pixels=16)
    means, labels = {}, np.arange(320) % 16
    for split in ("train", "test"):
        images = [draw(recipe.class_of(i), 16, np.random.default_rng(recipe.key(split, i))) for i in range(320)]
        means[split] = np.stack([np.asarray(image, np.float64).mean(axis=(0, 1)) for image in images])
    centres = np.stack([means["train"][labels == label].mean(axis=0) for label in range(16)])
    nearest = np.argmin(((means["test"][:, None] - centres) ** 2).sum(axis=2), axis=1)
    # A guess is right in 6 % of cases; knowing the colour alone would make it 25 %.
    assert (nearest == labels).mean() < 0.2
