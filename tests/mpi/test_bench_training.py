"""The training benchmark with real ranks: end to end, and with a rank that spoils its weights."""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvd_ext.runner.launcher import mpirun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="needs scikit-learn with its digits"),
]

TIMEOUT_S = 280
HOROVOD = importlib.util.find_spec("horovod") is not None
TF_KERAS = importlib.util.find_spec("tf_keras") is not None
TRAINING = [sys.executable, "-m", "hvd_ext", "bench", "training"]
SMALL = ["--width", "16", "--batch", "8", "--steps", "3", "--repetitions", "2"]

# A worker like ours, but rank 1 spoils its weights after every step.
SPOILT = """
import os, sys
import hvd_ext
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    import hvd_ext.bench.training_model as model
    right = model.Learner.step
    def step(self):
        loss = right(self)
        for weight in self.model.trainable_weights:
            weight.assign_add(weight * 1e-3)
        return loss
    model.Learner.step = step
from hvd_ext.bench import training_worker
training_worker.main(sys.argv[-1])
"""


def training(tmp_path: Path, *options: str, status: int = 0) -> tuple[dict[str, Any], str]:
    path = tmp_path / "result.json"
    command = [*TRAINING, *SMALL, "--json", str(path), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * TIMEOUT_S, check=False)
    assert done.returncode == status, done.stderr + done.stdout
    assert done.stderr == ""  # the progress is for terminals
    return json.loads(path.read_text()), done.stdout


def test_all_contestants_train_the_same_and_are_measured(tmp_path: Path) -> None:
    options = ["--ranks", "2", "--algorithms", "auto,ring,torus2d,horovod,multiworker", "--model", "cnn"]
    options += ["--warmup", "1"]
    kept, shown = training(tmp_path, *options)
    rows = {row["algorithm"]: row for row in kept["rows"]}
    theirs = [*(["horovod"] if HOROVOD else []), *(["multiworker"] if TF_KERAS else [])]
    assert list(rows) == ["compute", "auto", "ring", *theirs]
    assert rows["compute"]["correct"] is None
    for name, row in rows.items():
        assert (row["ranks"], row["hosts"], row["ranks_per_host"], row["model"]) == (2, 1, [2], "cnn")
        assert len(row["samples"]) == 3
        assert 0 < row["step_seconds_min"] <= row["step_seconds_median"]
        assert row["samples_per_second"] == pytest.approx(16 / row["step_seconds_median"])
        assert name == "compute" or row["correct"] is True
        assert (row["against_horovod"] is None) == (name == "compute" or not HOROVOD)
    assert rows["ring"]["chosen"] == "ring"
    assert rows["ring"]["buckets"] >= 1 and "buckets" not in rows["compute"]
    if HOROVOD:
        assert set(rows["horovod"]["trial_seconds"]) == {"separate", "grouped"}
        assert rows["horovod"]["chosen"] in ("separate", "grouped")
    assert "torus2d does not apply" in shown
    assert not any("not paused" in note for note in kept["runs"][0]["notes"])


def test_ranks_that_do_not_stay_together_are_a_row_and_an_exit_status(tmp_path: Path) -> None:
    script = tmp_path / "spoilt.py"
    script.write_text(SPOILT)
    launcher = shlex.join(mpirun(2, [sys.executable, str(script)]))
    kept, shown = training(tmp_path, "--launcher", launcher, "--algorithms", "ring", status=1)
    rows = {row["algorithm"]: row for row in kept["rows"]}
    assert rows["ring"]["correct"] is False
    assert "wrong training: ring, mlp, 2 ranks: rank" in shown
