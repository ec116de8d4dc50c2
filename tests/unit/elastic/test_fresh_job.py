"""What survivors compute is what a fresh job computes that starts on as many ranks from the same step and cursor."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvd_ext.runner import launcher
from hvd_ext.state.folder import newest
from hvd_ext.state.manifest import read

pytestmark = pytest.mark.slow  # starts TensorFlow several times
JOB = Path(__file__).with_name("fresh_job.py")
EPOCHS = 4


def run(folder: Path, *words: str) -> tuple[list[dict[str, Any]], str]:
    """Runs a job; gives what its workers wrote at their ends, and its output."""
    environment = {name: text for name, text in os.environ.items() if name not in launcher.RANK_VARIABLES}
    environment |= {"HVD_EXT_PROBE": "off", "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, "-m", "hvd_ext", "run", *words, "--", sys.executable, str(JOB), str(folder), str(EPOCHS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return [json.loads(line) for line in (folder / "log").read_text().splitlines()], output


def test_survivors_go_on_as_a_fresh_job_would(tmp_path):
    lost, fresh = tmp_path / "lost", tmp_path / "fresh"
    (fresh / "checkpoints").mkdir(parents=True)
    lost.mkdir()
    # no worker is started in the place of the lost one
    ends, output = run(lost, "-np", "3", "--min-np", "2", "--blacklist-cooldown-range", "600", "600")
    assert "ended by SIGKILL" in output
    assert [end["size"] for end in ends] == [2, 2]
    assert ends[0] == ends[1]
    assert ends[0]["updates"] == 34 + 9 + 2 * 30  # of the second epoch 72 of 240 samples are left, 8 a step
    # the first checkpoint of the two, in the middle of the epoch whose rest they have divided
    saved = [path for path in (lost / "checkpoints").iterdir() if path.is_dir() and path.name != "newest"]
    of_two = [path for path in saved if (manifest := read(path)).ranks == 2 and manifest.epoch == 1]
    first = min(of_two, key=lambda path: read(path).step)
    shutil.copytree(first, fresh / "checkpoints" / first.name)
    assert newest(fresh / "checkpoints") is not None
    again, _ = run(fresh, "-np", "2")
    assert again[0] == again[1]
    assert again[0]["digest"] == ends[0]["digest"]
    assert again[0]["updates"] == ends[0]["updates"]
    assert again[0]["epochs"] == [1, 2, 3]
