"""The jobs that run the tests of tests/ranks on several ranks."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.mpi import jobs

FOLDER = jobs.ROOT / "tests" / "ranks"
# The mark of a file of tests/ranks: on how many ranks the suite runs it.
MARK = re.compile(r"pytest\.mark\.ranks\(([\d, ]+)\)")
WITHOUT_MARK = (1, 2, 3)
# The files that also run as users of Keras 2 run their scripts, with TF_USE_LEGACY_KERAS=1: in a job of their own.
LEGACY = "2, Keras 2"
# The jobs: those of `make check`, and the others, the longest first.
QUICK = ("2",)
LONG = ("3", "1", LEGACY, "8")
# Jobs that other tests hold up, on a slow machine, end in this time all the same.
LIMIT_S = 3600


def numbers(file: Path) -> tuple[int, ...]:
    """Gives the numbers of ranks on which the suite runs the tests of a file of tests/ranks."""
    mark = MARK.search(file.read_text(encoding="utf-8"))
    return tuple(int(number) for number in mark.group(1).split(",")) if mark else WITHOUT_MARK


def files(name: str) -> list[Path]:
    """Gives the files that a job runs."""
    legacy = sorted(FOLDER.glob("test_*keras2.py"))
    if name == LEGACY:
        return legacy
    return [file for file in sorted(FOLDER.glob("test_*.py")) if file not in legacy and int(name) in numbers(file)]


def runs_in(items: list[pytest.Item]) -> bool:
    """Tells whether a session with these tests runs jobs; without mpirun it skips them."""
    job = any(item.path.name.startswith("test_ranks") and "job" in item.callspec.params for item in items)
    return job and shutil.which("mpirun") is not None


def run(name: str, marks: str, folder: Path) -> jobs.Job:
    """Runs a job to its end.

    Args:
        name: one of `QUICK` or `LONG`: the number of ranks, and with which Keras.
        marks: what the session leaves out by marks (`-m`), the job leaves out too.
        folder: an empty folder for its files.

    Returns:
        How it ended.
    """
    ranks = int(name[0])
    # The temporary folders of the ranks stay in the job's.
    own = {"PYTEST_DEBUG_TEMPROOT": str(folder)}
    if name == LEGACY:
        own["TF_USE_LEGACY_KERAS"] = "1"
    options = ["-m", "pytest", "-m", marks, "-x", "-q", "-rs", "-p", "no:cacheprovider", "--rootdir", str(jobs.ROOT)]
    launcher = jobs.MPIRUN if ranks > 1 else []
    return jobs.run(
        folder, [*options, *map(str, files(name))], ranks=ranks, launcher=launcher, changes=own, limit_s=LIMIT_S
    )
