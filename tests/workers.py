"""In which order the workers of pytest-xdist (`-n auto`) take the files of tests: the longest first.

A file stays with one worker, because its fixtures are made once.
"""

from __future__ import annotations

import os

import pytest

from tests import timing

# What a file is taken for that the recorded run does not have; shorter ones are left out of the record.
NOT_RECORDED_S = 1.0


def number() -> int:
    """Gives the number of workers on this machine: one more than cores, because the tests of jobs mostly wait."""
    return (os.cpu_count() or 1) + 1


def sort(items: list[pytest.Item]) -> None:
    """Puts the files first that take longest by the recorded times."""
    recorded = timing.seconds(timing.recorded())
    items.sort(key=lambda item: -recorded.get(timing.file_of(item.path), NOT_RECORDED_S))
