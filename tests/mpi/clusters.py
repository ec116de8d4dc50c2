"""What the tests of rehearsed clusters share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LIMIT_S = 120


def run_command(short: Path, *arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run `cluster run` to its end, with its folders in a folder of the test."""
    command = [*prefix, sys.executable, "-m", "hvd_ext", "cluster", "run", *arguments]
    environment = {**os.environ, "TMPDIR": str(short)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT_S, check=False)
