"""Benchmarks and other commands as a user starts them: alone, by a launcher or on a rehearsed cluster."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.mpi import jobs

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 280
HOROVOD = importlib.util.find_spec("horovod") is not None
BENCH = [sys.executable, "-m", "hvd_ext", "bench"]


def done(command: Sequence[str], status: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and check its status."""
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == status, ended.stderr + ended.stdout
    return ended


def rehearsal(
    short: Path, *arguments: str, prefix: Sequence[str] = (), status: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run `cluster run` to its end, with its folders in a folder of the test."""
    command = [*prefix, sys.executable, "-m", "hvd_ext", "cluster", "run", *arguments]
    return done(command, status, TMPDIR=str(short))


def bench(
    folder: Path,
    *words: str,
    before: Sequence[str] = (),
    status: int = 0,
    forked: bool = False,
    program: Sequence[str] = BENCH,
    **more: str,
) -> tuple[Any, str]:
    """Run a benchmark.

    Args:
        folder: of the file with its result.
        words: the name of the benchmark, and its options.
        before: the words of a launcher, or of a rehearsed cluster.
        status: the exit status that it must have.
        forked: see `jobs.forking`.
        program: the command of which the benchmark is a part.
        more: variables of its environment.

    Returns:
        The result and what was shown.
    """
    path = folder / "result.json"
    if forked:
        more |= jobs.forking(folder)
    ended = done([*before, *program, *words, "--json", str(path)], status, **more)
    assert before or ended.stderr == ""  # the progress is for terminals
    return json.loads(path.read_text()), ended.stdout


def few_pictures(folder: Path) -> Path:
    """Make a set of pictures for a short training of the recipe, and give its folder."""
    counts = ("--train", "96", "--test", "40", "--classes", "16", "--pixels", "32")
    done([sys.executable, str(ROOT / "examples" / "make_images.py"), "--output", str(folder), *counts])
    return folder


def rehearsed(hosts: str, rate: str) -> list[str]:
    """Give the words that start a command on a rehearsed cluster."""
    return [sys.executable, "-m", "hvd_ext", "cluster", "run", "--hosts", hosts, "--rate", rate, "--"]
