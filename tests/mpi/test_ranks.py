"""The tests of tests/ranks, on several ranks."""

from __future__ import annotations

import pytest

from tests.mpi import several

JOBS = ["2", *(pytest.param(job, marks=pytest.mark.slow) for job in ("3", "8", "1", several.LEGACY))]


@pytest.mark.beside
@pytest.mark.parametrize("job", JOBS)
def test_the_tests_of_ranks_pass_on_so_many_ranks(
    job: str, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> None:
    several.begin(job, pytestconfig, tmp_path_factory).result().must_succeed()
