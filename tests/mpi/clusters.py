"""What the tests of rehearsed clusters share."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

LIMIT_S = 120


def wait_for(condition: Callable[[], object], words: str) -> None:
    """Wait until a condition is true; a machine under load gets its time."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"it did not come true: {words}"
        time.sleep(0.05)


def run_command(short: Path, *arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run `cluster run` to its end, with its folders in a folder of the test."""
    command = [*prefix, sys.executable, "-m", "hvd_ext", "cluster", "run", *arguments]
    environment = {**os.environ, "TMPDIR": str(short)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT_S, check=False)
