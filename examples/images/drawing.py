"""Shapes and textures as functions of coordinates: everything an image is made of before light falls on it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Mask = NDArray[np.bool_]


def _polygon(u: Array, v: Array, corners: int) -> Mask:
    angle = 2 * np.pi / corners
    # Folding the angle into one sector turns a regular polygon into one half-plane.
    folded = np.mod(np.arctan2(u, v) + angle / 2, angle) - angle / 2
    return np.hypot(u, v) * np.cos(folded) < np.cos(angle / 2)


def _star(u: Array, v: Array) -> Mask:
    sector = np.pi / 5
    folded = np.abs(np.mod(np.arctan2(u, v) + sector, 2 * sector) - sector)
    # A point of the star: the line from (1, 0) to the inner corner at radius 0.45.
    radius, along, across = np.hypot(u, v), 0.45 * np.cos(sector), 0.45 * np.sin(sector)
    return radius * np.cos(folded) * across + radius * np.sin(folded) * (1 - along) < across


def _cross(u: Array, v: Array) -> Mask:
    width, across = np.abs(u), np.abs(v)
    return (np.maximum(width, across) < 0.92) & (np.minimum(width, across) < 0.32)


def _ring(u: Array, v: Array) -> Mask:
    radius = np.hypot(u, v)
    return (radius < 1) & (radius > 0.5)


def _crescent(u: Array, v: Array) -> Mask:
    return (np.hypot(u, v) < 1) & (np.hypot(u - 0.5, v) > 0.72)


def _heart(u: Array, v: Array) -> Mask:
    x, y = 1.2 * u, 0.1 - 1.2 * v
    return (x * x + y * y - 1) ** 3 < x * x * y**3


SHAPE_MASKS: dict[str, Callable[[Array, Array], Mask]] = {
    "triangle": lambda u, v: _polygon(u, v, 3),
    "square": lambda u, v: _polygon(u, v, 4),
    "star": _star,
    "disc": lambda u, v: np.hypot(u, v) < 0.9,
    "cross": _cross,
    "ring": _ring,
    "crescent": _crescent,
    "heart": _heart,
}


def shape_mask(name: str, u: Array, v: Array) -> Mask:
    """Draw a shape.

    Args:
        name: one of `images.classes.SHAPES`.
        u: first coordinate, any shape; the object fits into the unit circle.
        v: second coordinate, shape of u.

    Returns:
        Where the shape is, bool, shape of u.
    """
    return SHAPE_MASKS[name](u, v)


def _dots(p: Array, q: Array) -> Mask:
    return np.hypot(np.mod(p, 1) - 0.5, np.mod(q, 1) - 0.5) < 0.33


def _bricks(p: Array, q: Array) -> Mask:
    row = np.floor(1.4 * q)
    return (np.mod(1.4 * q, 1) > 0.25) & (np.mod(0.7 * p + 0.5 * np.mod(row, 2), 1) > 0.15)


def _grid(p: Array, q: Array) -> Mask:
    return (np.mod(p, 1) < 0.28) | (np.mod(q, 1) < 0.28)


def texture_mask(name: str, p: Array, q: Array, random: np.random.Generator) -> Mask:
    """Draw a texture of two tones.

    Args:
        name: one of `images.classes.TEXTURES`.
        p: first coordinate, any shape, in periods of the texture.
        q: second coordinate, shape of p.
        random: source of phases.

    Returns:
        Where the first tone is, bool, shape of p.
    """
    if name == "stripes":
        return np.mod(p, 1) < 0.5
    if name == "checks":
        return (np.mod(p, 1) < 0.5) ^ (np.mod(q, 1) < 0.5)
    if name == "dots":
        return _dots(1.2 * p, 1.2 * q)
    if name == "waves":
        return np.mod(p + 0.3 * np.sin(4.5 * q), 1) < 0.5
    if name == "bricks":
        return _bricks(p, q)
    if name == "circles":
        return np.mod(np.hypot(p + random.uniform(-1, 1), q + random.uniform(-1, 1)), 1) < 0.5
    if name == "grid":
        return _grid(p, q)
    if name == "blobs":
        angles, phases = random.uniform(0, np.pi, 6), random.uniform(0, 2 * np.pi, 6)
        waves = [np.cos(4.5 * (np.cos(a) * p + np.sin(a) * q) + phase) for a, phase in zip(angles, phases, strict=True)]
        return np.sum(waves, axis=0) > 0
    raise KeyError(name)
