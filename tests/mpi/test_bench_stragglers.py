"""The straggler benchmark with real ranks, end to end."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 280
HOROVOD = importlib.util.find_spec("horovod") is not None
STRAGGLERS = [sys.executable, "-m", "hvd_ext", "bench", "stragglers"]


@pytest.mark.slow
def test_every_mode_trains_with_ranks_that_are_late(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    modes = ["full", "solo", "majority", "quorum", "delay", *(["horovod"] if HOROVOD else [])]
    options = ["--ranks", "2", "--workloads", "cloud", "--modes", ",".join(modes), "--steps", "6"]
    command = [*STRAGGLERS, *options, "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stderr == ""  # the progress is for terminals
    rows = {row["mode"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == modes
    for mode, row in rows.items():
        assert (row["ranks"], row["hosts"], row["ranks_per_host"], row["workload"]) == (2, 1, [2], "cloud")
        assert row["correct"] is True
        assert len(row["samples"]) == row["steps"] == 6
        assert row["slept_seconds_mean"] >= 0.0399
        assert (row["x_full_played"] is None) == (mode == "horovod")
        partial = mode in ("solo", "majority", "quorum")
        assert (row["active_ranks"] is not None) == partial
        # in two turns each rank takes 5 steps that do not count, and 3 that do; what was late came with the last
        assert not partial or 2 * 2 * 7 <= sum(row["stale_gradients"]) <= 2 * 2 * 8
    assert "x played" in done.stdout
