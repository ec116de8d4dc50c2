"""The benchmark of LARS with real ranks, through its command line."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_ext.bench.lars_worker import CONTESTANTS, NORMS, PTO
from hvd_ext.runner.launcher import mpirun

pytestmark = pytest.mark.slow

TIMEOUT_S = 280
LARS = [sys.executable, "-m", "hvd_ext", "bench", "lars"]


def test_norms_are_measured_once_by_a_launched_job_alone_and_divided_among_the_ranks(tmp_path: Path) -> None:
    path = tmp_path / "lars.json"
    options = ["--models", "resnet50", "--parts", "norms,pto", "--repetitions", "1", "--calls", "1"]
    done = subprocess.run(
        mpirun(2, [*LARS, *options, "--json", str(path)]),
        env={**os.environ, "HVD_EXT_LAUNCHER": shlex.join(mpirun(2, []))},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.count("LARS: medians") == 1
    rows = json.loads(path.read_text())["rows"]
    wanted = [(part, name) for part in (NORMS, PTO) for name in CONTESTANTS[part]]
    assert [(row["part"], row["contestant"]) for row in rows] == wanted
    for row in rows:
        assert (row["ranks"], row["model"], row["tensors"], row["elements"]) == (2, "resnet50", 161, 25_557_032)
        assert [len(row[f"{what}_samples"]) for what in ("seconds", "cpu")] == [1, 1]
        assert row["seconds"] > 0
    assert rows[-1]["chosen"] in ("alone", "together")
    assert "norms: divided among the ranks" in done.stdout
