"""The breakdown of a step with two real ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_ext.bench.breakdown_worker import PARTS, variants

WORDS = ["--schemes", "cached", "--pixels", "16", "--batch", "8", "--width", "4", "--repetitions", "2", "--steps", "1"]


@pytest.mark.slow
def test_each_part_is_left_out_and_the_rest_is_trained(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    command = [sys.executable, "-m", "hvd_ext", "bench", "breakdown", *WORDS, "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["ranks"], row["ranks_per_host"], row["scheme"], row["pixels"], row["batch"]) == (
        2,
        [2],
        "cached",
        16,
        8,
    )
    assert set(row["parts"]) == set(PARTS)
    assert {name: len(samples) for name, samples in row["samples"].items()} == dict.fromkeys(variants("cached"), 2)
    assert row["step_seconds"] > 0
    assert row["parts"]["compute"] > 0
    assert "MSTopK, hitopk, DataCache" in done.stdout
