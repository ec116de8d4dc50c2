"""The tests of tests/ranks, on two ranks; and that ranks of jobs are forked, which saves their imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import jobs, several

WHERE = """
import os, pathlib, sys
print("forked", "tensorflow" in sys.modules and "fork_server" in pathlib.Path("/proc/self/cmdline").read_text())
print("hands the server on", "HVD_EXT_TEST_SERVER" in os.environ)
"""


@pytest.mark.parametrize("job", several.QUICK)
def test_the_tests_of_ranks_pass_on_two_ranks(job: str, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    several.run(job, pytestconfig.option.markexpr, tmp_path).must_succeed()


@pytest.mark.parametrize(
    ("forked", "changes"),
    [(True, {}), (False, {"TF_USE_LEGACY_KERAS": "1"}), (False, {"PYTHONHASHSEED": "3"})],
)
def test_ranks_are_forked_unless_they_change_what_is_read_at_the_start(
    forked: bool, changes: dict[str, str], tmp_path: Path
) -> None:
    job = jobs.run(tmp_path, WHERE, changes=changes).must_succeed()
    for rank in range(2):
        assert job.says(rank, f"forked {forked}"), job.text()
        assert job.says(rank, "hands the server on False"), job.text()
