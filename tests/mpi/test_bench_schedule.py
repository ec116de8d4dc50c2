"""The schedule benchmark with real ranks: end to end, and with a wrong result."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvd_ext.runner.launcher import mpirun

TIMEOUT_S = 280
SCHEDULE = [sys.executable, "-m", "hvd_ext", "bench", "schedule"]
MODEL = """forward_seconds,0.02
update_seconds,0.01
name,elements,backward_seconds
head/bias,10,0.001
head/kernel,40000,0.004
empty,0,0
body/kernel,3000,0.02
stem/kernel,160000,0.01
"""

# A worker like ours, but rank 1 spoils a result of every step.
SPOILT = """
import sys
import hvd_ext.bench.schedule_worker as worker
right = worker.Stage._fault
def spoil(self):
    if self._ranks.rank == 1:
        self._outputs[1][7] += 1
    return right(self)
worker.Stage._fault = spoil
worker.main(sys.argv[-1])
"""


def schedule(tmp_path: Path, *options: str, status: int = 0) -> tuple[dict[str, Any], str]:
    model, path = tmp_path / "tiny.csv", tmp_path / "result.json"
    model.write_text(MODEL)
    command = [*SCHEDULE, "--model", str(model), "--scale", "1", "--repetitions", "2", "--json", str(path), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == status, done.stderr + done.stdout
    assert done.stderr == ""  # the progress is for terminals
    return json.loads(path.read_text()), done.stdout


@pytest.mark.slow
def test_every_bucketer_is_replayed_and_checked(tmp_path: Path) -> None:
    bucketers = "auto,wfbp,single,by_size,mgwfbp,optimal,delay"
    kept, shown = schedule(tmp_path, "--ranks", "2", "--ratio", "0,0.5", "--bucketers", bucketers)
    rows = kept["rows"]
    assert [(row["ratio"] == 0.5, row["bucketer"]) for row in rows] == [
        (scaled, name) for scaled in (False, True) for name in bucketers.split(",")
    ]
    for row in rows:
        assert (row["ranks"], row["hosts"], row["ranks_per_host"], row["model"]) == (2, 1, [2], "tiny")
        assert (row["tensors"], row["bytes"], row["correct"]) == (5, 4 * 203_010, True)
        assert len(row["samples"]) == 2
        assert row["predicted_seconds"] >= row["compute_seconds"]
        assert row["seconds_min"] >= row["compute_seconds"] - 1e-4
        assert row["x_predicted"] == pytest.approx(row["seconds_median"] / row["predicted_seconds"])
        assert sum(tensors for tensors, _ in row["buckets"]) == 5
        assert 0 <= row["late_seconds"] <= row["late_seconds_p99"]
    told = rows[:7]
    assert [row["compute_seconds"] for row in told] == pytest.approx([0.065] * 7)
    assert rows[7]["compute_seconds"] == pytest.approx(2 * rows[7]["communication_seconds"])
    counts = {row["bucketer"]: len(row["buckets"]) for row in told}
    assert (counts["single"], counts["wfbp"]) == (1, 5)
    assert told[0]["chosen"] == told[6]["chosen"] in bucketers.split(",")[1:6]
    assert "x predicted" in shown


@pytest.mark.slow
def test_a_wrong_result_is_a_row_and_an_exit_status(tmp_path: Path) -> None:
    script = tmp_path / "spoilt.py"
    script.write_text(SPOILT)
    launcher = shlex.join(mpirun(2, [sys.executable, str(script)]))
    kept, shown = schedule(tmp_path, "--launcher", launcher, "--bucketers", "single", "--ratio", "0", status=1)
    (row,) = kept["rows"]
    assert row["correct"] is False
    assert "wrong result: single, tiny" in shown
    assert "rank 1: body/kernel: element 7 is" in shown
