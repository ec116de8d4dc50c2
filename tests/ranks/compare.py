"""How tests compare lists of variables or of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def assert_close(got: Sequence[Any], expected: Sequence[Any], rtol: float = 2e-5, atol: float = 2e-6) -> None:
    """Check variables or arrays up to rounding."""
    for value, wanted in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.asarray(value), np.asarray(wanted), rtol=rtol, atol=atol)


def assert_equal(got: Sequence[Any], expected: Sequence[Any]) -> None:
    """Check that variables or arrays are equal, each in all its elements."""
    for value, wanted in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(value), np.asarray(wanted))


def are_equal(got: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Whether variables or arrays are equal, each in all its elements."""
    return all(np.array_equal(value, wanted) for value, wanted in zip(got, expected, strict=True))
