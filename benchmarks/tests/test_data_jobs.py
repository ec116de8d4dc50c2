"""The parts of the study of data that are jobs of several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import jobs

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("ranks", [1, 2])
def test_parts_that_are_jobs_measure_on_so_many_ranks(ranks: int, tmp_path: Path) -> None:
    file = Path(__file__).with_name("data_on_ranks.py")
    options = ["-p", "tests.ranks.conftest", "-p", "no:cacheprovider", "-x", "-q", "--rootdir", str(jobs.ROOT)]
    launcher = None if ranks > 1 else []
    jobs.run(tmp_path, ["-m", "pytest", *options, str(file)], ranks=ranks, launcher=launcher).must_succeed()
