"""The tests of tests/ranks, on several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import jobs
from tests.ranks.conftest import SAME_ON_ANY_NUMBER

FOLDER = jobs.ROOT / "tests" / "ranks"
SLOW = pytest.mark.slow


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=SLOW) for n in (3, 4, 8))])
def test_the_tests_of_ranks_pass_on_so_many_ranks(ranks: int, tmp_path: Path) -> None:
    run(tmp_path, ranks, [*(f"--ignore={FOLDER / name}" for name in SAME_ON_ANY_NUMBER), str(FOLDER)])


@pytest.mark.slow
def test_the_tests_that_are_the_same_on_any_number_pass_on_two_ranks(tmp_path: Path) -> None:
    run(tmp_path, 2, [str(FOLDER / name) for name in SAME_ON_ANY_NUMBER])


def run(folder: Path, ranks: int, arguments: list[str]) -> None:
    """Run tests on several ranks; the temporary folders of the ranks stay in this test's."""
    own = {"PYTEST_DEBUG_TEMPROOT": str(folder)}
    options = ["-m", "pytest", "-x", "-q", "-rs", "-p", "no:cacheprovider", "--rootdir", str(jobs.ROOT)]
    jobs.run(folder, [*options, *arguments], ranks=ranks, changes=own, limit_s=600 + 300 * ranks).must_succeed()
