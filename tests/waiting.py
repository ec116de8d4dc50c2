"""Waiting in a test until something has happened."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

LIMIT_S = 200
LOOK_S = 0.05


def until(condition: Callable[[], object], words: str = "a condition", limit_s: float = LIMIT_S) -> None:
    """Waits; looks are counted and not seconds, so that a machine that stands still for a while does not matter."""
    for _ in range(int(limit_s / LOOK_S)):
        if condition():
            return
        time.sleep(LOOK_S)
    pytest.fail(f"not within {limit_s} s: {words}")
