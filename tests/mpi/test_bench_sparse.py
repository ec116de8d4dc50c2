"""The studies with real ranks: sparse sums, and a study of convergence of two tiny runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.studies.convergence import data as data_sets
from tests.mpi.benches import done

pytestmark = pytest.mark.slow

STUDIES = [sys.executable, "-m", "benchmarks.studies"]
PLAN = """
hosts: [1, 1]
seeds: [1]
models:
  cnn: {learning_rate: 0.1, epochs: 1, batch: 2, width: 2}
settings:
  dense: {}
  hitopk:
    algorithm: hitopk
    topk: {density: 0.1, min_elements: 8, momentum_correction: true}
    warmup: 0.5
    epochs: 2
"""


def test_sparse_and_dense_sums_are_measured_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "sums.json"
    names = "hitopk@0.1:fp16,naive_allgather@0.1,gtopk@0.05:bf16,flexreduce:fp16,mpi"
    options = ["--algorithms", names, "--elements", "1003", "--repetitions", "3", "--json", str(path)]
    done([*STUDIES, "hitopk", *options])
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == names.split(",")
    assert all(row["correct"] for row in rows.values())
    assert 4 < rows["naive_allgather@0.1"]["entry_bytes"] < 10
    assert rows["naive_allgather@0.1"]["levels_seconds"]


def test_a_study_is_done_once(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    splits = [
        data_sets.Split(
            random.integers(0, 256, (count, 8, 8, 3), np.uint8), random.integers(0, 3, (count, 2), np.int32)
        )
        for count in (24, 10)
    ]
    folder = tmp_path / "runs"
    folder.mkdir()
    data_sets.save(folder / "images.npz", data_sets.Data(splits[0], splits[1], "random"))
    (tmp_path / "plan.yaml").write_text(PLAN)
    study = [*STUDIES, "convergence", str(tmp_path / "plan.yaml"), "--folder", str(folder), "--seeds", "1"]
    done([*study, "--json", str(tmp_path / "all.json")])
    rows = json.loads((tmp_path / "all.json").read_text())["rows"]
    assert [row["setting"] for row in rows] == ["dense", "hitopk"]
    for row in rows:
        assert row["equal"] is True
        assert row["tested"] == 20  # two labels of ten images
    assert [[point["steps"] for point in row["curves"]["1"]] for row in rows] == [[6], [6, 12]]
    assert "0 of 2 runs are missing" in done([*study, "--missing"]).stdout
