"""Waiting in a test until something has happened."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

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


def ended(process: subprocess.Popen[bytes], output: Path, limit_s: float = LIMIT_S) -> None:
    """Waits until a process has ended in order; fails with what it has printed, also if it does not end."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(limit_s)
    assert process.poll() == 0, output.read_text(errors="replace")
