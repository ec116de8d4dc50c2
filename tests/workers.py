"""What the recorded times decide: the order of the files, and which are quick.

The workers of pytest-xdist (`-n auto`) take the longest files first. A file stays with one worker, because its fixtures
are made once.
"""

from __future__ import annotations

import os

import pytest

from tests import timing

# What a file is taken for that the recorded run does not have; shorter ones are left out of the record.
NOT_RECORDED_S = 1.0
# `make check` leaves files out that took longer: seconds of processor in one process, or in both of two ranks.
QUICK_S = 4.0


def slow_files() -> set[str]:
    """Gives the files of tests/unit and tests/ranks that are too long for `make check`."""
    recorded = {**timing.by_file("cpu_s"), **timing.by_file("cpu_s", ranks=2)}
    return {name for name, seconds in recorded.items() if seconds > QUICK_S and not name.startswith("tests/mpi")}


def number() -> int:
    """Gives the number of workers on this machine: one more than cores, because the tests of jobs mostly wait."""
    return (os.cpu_count() or 1) + 1


def sort(items: list[pytest.Item]) -> None:
    """Puts the files first that take longest by the recorded times."""
    recorded = timing.by_file("wall_s")
    items.sort(key=lambda item: -recorded.get(timing.file_of(item.path), NOT_RECORDED_S))
