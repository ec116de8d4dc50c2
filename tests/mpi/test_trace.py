"""The files of a traced job, also where a rank does not live to write its own."""

from __future__ import annotations

import json
from pathlib import Path

from hvd_ext.trace import merge
from tests.mpi import jobs

PROGRAM = """
    import os, signal
    import hvd_ext as hvd

    hvd.init()
    hvd.allgather_object("before")
    if hvd.rank() == 1:
        HOW
    hvd.allgather_object("after")
"""


def traced(tmp_path: Path, name: str, how: str, folder: Path) -> jobs.Job:
    """Runs a job of three ranks with HVD_EXT_TRACE."""
    (tmp_path / name).mkdir()
    program = PROGRAM.replace("HOW", how)
    return jobs.run(tmp_path / name, program, ranks=3, changes={"HVD_EXT_TRACE": str(folder)})


def test_a_rank_that_is_killed_leaves_no_torn_file_and_earlier_files_stay(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    traced(tmp_path, "whole", "pass", folder).must_succeed()
    whole = merge.read(folder)
    assert whole.problems == []
    assert sorted(whole.ranks) == [0, 1, 2]
    assert {event["pid"] for event in whole.events if event.get("cat") == "call"} == {0, 1, 2}
    of_rank_1 = (folder / "rank_1.json").read_text()
    traced(tmp_path, "killed", "os.kill(os.getpid(), signal.SIGKILL)", folder).must_fail()
    assert (folder / "rank_1.json").read_text() == of_rank_1
    for rank in (0, 2):
        merge.checked(json.loads((folder / f"rank_{rank}.json").read_text()), rank)
    assert merge.read(folder).ranks


def test_a_rank_that_fails_writes_its_file_before_it_ends_the_job(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    job = traced(tmp_path, "failed", "raise ValueError('told to fail')", folder).must_fail()
    path = folder / "rank_1.json"
    assert path.exists(), job.text()
    merge.checked(json.loads(path.read_text()), 1)
