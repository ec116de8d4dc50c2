"""The breakdown of a step and the benchmark of training with two real ranks, each through its command line."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from hvd_ext.bench.breakdown_worker import PARTS, variants
from tests.mpi.benches import HOROVOD, bench

TF_KERAS = importlib.util.find_spec("tf_keras") is not None


def test_each_part_of_a_step_is_left_out_and_the_rest_is_trained(tmp_path: Path) -> None:
    sizes = ["--pixels", "16", "--batch", "8", "--width", "4", "--repetitions", "2", "--steps", "1"]
    kept, shown = bench(tmp_path, "breakdown", "--schemes", "cached", *sizes, forked=True)
    (row,) = kept["rows"]
    assert (row["ranks"], row["ranks_per_host"], row["scheme"], row["pixels"]) == (2, [2], "cached", 16)
    assert set(row["parts"]) == set(PARTS)
    assert {name: len(samples) for name, samples in row["samples"].items()} == dict.fromkeys(variants("cached"), 2)
    assert row["step_seconds"] > 0 and row["parts"]["compute"] > 0
    assert "MSTopK, hitopk, DataCache" in shown


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="needs scikit-learn with its digits")
def test_all_contestants_train_the_same_and_are_measured(tmp_path: Path) -> None:
    sizes = ["--width", "16", "--batch", "8", "--steps", "3", "--repetitions", "2", "--warmup", "1"]
    options = ["--ranks", "2", "--algorithms", "ring,torus2d,horovod,multiworker", "--model", "mlp"]
    kept, shown = bench(tmp_path, "training", *sizes, *options, forked=True)
    rows = {row["algorithm"]: row for row in kept["rows"]}
    theirs = [*(["horovod"] if HOROVOD else []), *(["multiworker"] if TF_KERAS else [])]
    assert list(rows) == ["compute", "ring", *theirs]
    assert rows["compute"]["correct"] is None
    for name, row in rows.items():
        assert (row["ranks"], row["hosts"], row["ranks_per_host"], row["model"]) == (2, 1, [2], "mlp")
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
