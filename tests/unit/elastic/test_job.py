"""A job under the supervisor that loses a worker in the middle of an epoch, and takes its successor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_training_continues_from_the_commit_and_takes_a_new_worker(tmp_path: Path) -> None:
    program = Path(__file__).with_name("training_job.py")
    job = subprocess.run(
        [
            *(sys.executable, "-m", "hvd_ext", "run", "-np", "2", "--min-np", "1", "--"),
            *(sys.executable, str(program), str(tmp_path)),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HVD_EXT_PROBE": "off"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    events = [json.loads(line) for line in (tmp_path / "log").read_text(encoding="utf-8").splitlines()]
    of_oldest = [event for event in events if event["worker"] == 0]
    assert [event["begin"] for event in of_oldest[:2]] == [[0, 0], [0, 4]]  # batches 5 and 6 are computed again
    assert [event["size"] for event in of_oldest[:3]] == [2, 1, 2]
    successor = next(event for event in events if event["worker"] > 1)
    assert successor["begin"] == of_oldest[2]["begin"] == [0, 8]
    assert successor["iterations"] == of_oldest[2]["iterations"] == 8
    ends = [event for event in events if "end" in event]
    assert len(ends) == 2
    assert ends[0]["weights"] == ends[1]["weights"]
    assert {tuple(end["end"]) for end in ends} == {(3, 0)}
    assert {end["iterations"] for end in ends} == {36}
