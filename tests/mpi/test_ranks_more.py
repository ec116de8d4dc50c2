"""The tests of tests/ranks on other numbers of ranks, in a file of their own: it runs beside the job of two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import several


@pytest.mark.parametrize("job", several.LONG)
def test_the_tests_of_ranks_pass_on_so_many_ranks(job: str, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    several.run(job, pytestconfig.option.markexpr, tmp_path).must_succeed()
