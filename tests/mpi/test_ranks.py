"""The tests of tests/ranks, on several ranks."""

from __future__ import annotations

import pytest

from tests.mpi import several

SLOW, BESIDE = pytest.mark.slow, pytest.mark.beside
JOBS = [
    pytest.param("2", marks=BESIDE),
    *(pytest.param(ranks, marks=SLOW) for ranks in ("3", "4", "8")),
    pytest.param(several.SAME, marks=[SLOW, BESIDE]),
]


@pytest.mark.parametrize("job", JOBS)
def test_the_tests_of_ranks_pass_on_so_many_ranks(job: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    several.begin(job, tmp_path_factory).result().must_succeed()
