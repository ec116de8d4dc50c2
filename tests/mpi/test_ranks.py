"""The tests of tests/ranks, on several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import several

# `make check` runs the job of two ranks.
JOBS = [name if name == "2" else pytest.param(name, marks=pytest.mark.slow) for name in several.NAMES]


@pytest.mark.parametrize("job", JOBS)
def test_the_tests_of_ranks_pass_on_so_many_ranks(job: str, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    several.run(job, pytestconfig.option.markexpr, tmp_path).must_succeed()
