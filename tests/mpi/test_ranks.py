"""The tests of tests/ranks, on several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import jobs

SLOW = pytest.mark.slow


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=SLOW) for n in (3, 4, 8))])
def test_the_tests_of_ranks_pass_on_so_many_ranks(ranks: int, tmp_path: Path) -> None:
    folder = str(jobs.ROOT / "tests" / "ranks")
    arguments = ["-m", "pytest", "-x", "-q", "-rs", "-p", "no:cacheprovider", "--rootdir", str(jobs.ROOT), folder]
    # Several tests compile models on every rank; 8 of them share two cores.
    jobs.run(tmp_path, arguments, ranks=ranks, limit_s=600 + 300 * ranks).must_succeed()
