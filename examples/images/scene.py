"""One image: clutter behind, the object of the class, something in front of it, light over all, then JPEG."""

from __future__ import annotations

import colorsys
import io
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageFilter

from images.classes import COLOURS, SHAPES, TEXTURES, ImageClass
from images.drawing import Array, shape_mask, texture_mask

# Drawn at twice the size and averaged: without it a shape's edge is a staircase that JPEG turns into noise.
OVERSAMPLING = 2


@dataclass(frozen=True)
class _Pose:
    """Where an object stands, in units of the image's side; angle in radians."""

    x: float
    y: float
    radius: float
    angle: float
    aspect: float


def _colour(hue: float, random: np.random.Generator) -> tuple[Array, Array]:
    """Two tones of one hue, float32 [3] each, in random order, so that neither is always the texture's first tone."""
    hue = (hue + random.uniform(-0.06, 0.06)) % 1.0
    saturation, value = random.uniform(0.5, 0.95), random.uniform(0.55, 1.0)
    light = colorsys.hsv_to_rgb(hue, saturation, value)
    dark = colorsys.hsv_to_rgb(hue, min(1.0, saturation * 1.1), value * random.uniform(0.25, 0.5))
    tones = [np.array(light, np.float32), np.array(dark, np.float32)]
    return (tones[0], tones[1]) if random.random() < 0.5 else (tones[1], tones[0])


def _textured(x: Array, y: Array, texture: str, hue: float, period: float, random: np.random.Generator) -> Array:
    """A textured surface, float32 [rows, columns, 3]; period in units of the image's side."""
    angle = random.uniform(0, np.pi)
    p = ((np.cos(angle) * x + np.sin(angle) * y) / period + random.uniform(0, 1)).astype(np.float32)
    q = ((np.cos(angle) * y - np.sin(angle) * x) / period + random.uniform(0, 1)).astype(np.float32)
    first, second = _colour(hue, random)
    return np.where(texture_mask(texture, p, q, random)[..., None], first, second)


def _place(canvas: Array, pose: _Pose, shape: str, texture: str, hue: float, random: np.random.Generator) -> None:
    """Draw one object on the canvas, float32 [side, side, 3], in place."""
    side = canvas.shape[0]
    reach = pose.radius * max(pose.aspect, 1 / pose.aspect)
    top, left = (max(0, int((c - reach) * side)) for c in (pose.y, pose.x))
    bottom, right = (min(side, int((c + reach) * side) + 2) for c in (pose.y, pose.x))
    if top >= bottom or left >= right:
        return
    y, x = np.mgrid[top:bottom, left:right].astype(np.float32) / side
    cosine, sine = np.cos(pose.angle), np.sin(pose.angle)
    dx, dy = x - pose.x, y - pose.y
    u = ((cosine * dx + sine * dy) / (pose.radius * pose.aspect)).astype(np.float32)
    v = ((cosine * dy - sine * dx) / (pose.radius / pose.aspect)).astype(np.float32)
    mask = shape_mask(shape, u, v)
    period = max(pose.radius * random.uniform(0.4, 0.62), 0.07)
    surface = _textured(x, y, texture, hue, period, random)
    window = canvas[top:bottom, left:right]
    window[mask] = surface[mask]


def _pose(random: np.random.Generator, smallest: float, largest: float, margin: float) -> _Pose:
    radius = random.uniform(smallest, largest)
    x, y = random.uniform(margin, 1 - margin, 2)
    return _Pose(x, y, radius, random.uniform(0, 2 * np.pi), float(np.exp(random.uniform(-0.22, 0.22))))


def _occlude(canvas: Array, around: _Pose, random: np.random.Generator) -> None:
    """Put a bar of one tone across a part of the object; it hides a tenth to a quarter of it."""
    side = canvas.shape[0]
    y, x = np.mgrid[0:side, 0:side].astype(np.float32) / side
    angle = random.uniform(0, np.pi)
    offset = (x - around.x) * np.cos(angle) + (y - around.y) * np.sin(angle) - random.uniform(-0.7, 0.7) * around.radius
    canvas[np.abs(offset) < around.radius * random.uniform(0.08, 0.2)] = _colour(random.random(), random)[0]


def _light(canvas: Array, random: np.random.Generator) -> Array:
    """Light from one side, tinted, with the camera's noise; float32 [side, side, 3] in 0..1."""
    side = canvas.shape[0]
    y, x = np.mgrid[0:side, 0:side].astype(np.float32) / side - 0.5
    angle = random.uniform(0, 2 * np.pi)
    slope = random.uniform(0, 0.7)
    gain = random.uniform(0.7, 1.25) * (1 + slope * (np.cos(angle) * x + np.sin(angle) * y))
    tint = random.uniform(0.88, 1.12, 3)
    lit = np.clip(canvas * gain[..., None] * tint, 0, 1) ** random.uniform(0.8, 1.3)
    return lit + random.normal(0, random.uniform(0.005, 0.04), lit.shape)


def draw(image_class: ImageClass, pixels: int, random: np.random.Generator) -> Image.Image:
    """Draw one image of a class.

    The object of the class is the largest one. Clutter has the same shapes, textures and colours, so neither a colour
    nor a texture somewhere in the image tells the class.

    Args:
        image_class: the class.
        pixels: side of the image.
        random: source of everything that varies.

    Returns:
        An RGB image, pixels x pixels.
    """
    side = pixels * OVERSAMPLING
    y, x = np.mgrid[0:side, 0:side].astype(np.float32) / side
    backdrop = TEXTURES[random.integers(len(TEXTURES))]
    canvas = _textured(x, y, backdrop, random.random(), random.uniform(0.1, 0.5), random)
    # A paler backdrop than the objects, as things that stand back are; otherwise the outline is often a guess.
    strength, grey = random.uniform(0.3, 0.7), random.uniform(0.2, 0.6)
    canvas = strength * canvas + (1 - strength) * canvas.mean(axis=(0, 1))
    canvas = (1 - grey) * canvas + grey * canvas.mean(axis=2, keepdims=True)
    for _ in range(random.integers(2, 6)):
        pose = _pose(random, 0.06, 0.13, 0.0)
        shape, texture = SHAPES[random.integers(len(SHAPES))], TEXTURES[random.integers(len(TEXTURES))]
        _place(canvas, pose, shape, texture, random.random(), random)
    main = _pose(random, 0.26, 0.42, 0.32)
    _place(canvas, main, image_class.shape, image_class.texture, COLOURS[image_class.colour], random)
    if random.random() < 0.6:
        _occlude(canvas, main, random)
    lit = _light(canvas, random)
    small = lit.reshape(pixels, OVERSAMPLING, pixels, OVERSAMPLING, 3).mean(axis=(1, 3))
    image = Image.fromarray((np.clip(small, 0, 1) * 255).astype(np.uint8), "RGB")
    return image.filter(ImageFilter.GaussianBlur(random.uniform(0.3, 0.8))) if random.random() < 0.3 else image


def jpeg(image_class: ImageClass, pixels: int, key: tuple[int, ...]) -> bytes:
    """Draw an image and encode it as JPEG.

    Args:
        image_class: the class.
        pixels: side of the image.
        key: the image's own seed: the same key gives the same bytes in any process.

    Returns:
        The bytes of the file. Quality and chroma subsampling vary from image to image.
    """
    random = np.random.default_rng(np.random.SeedSequence(key))
    image = draw(image_class, pixels, random)
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=int(random.integers(40, 96)), subsampling=int(random.choice([0, 2])))
    return stream.getvalue()
