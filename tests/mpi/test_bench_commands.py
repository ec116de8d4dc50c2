"""The benchmarks other than that of allreduce with two real ranks, each through its command line."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path

import pytest

from hvd_ext.bench.breakdown_worker import PARTS, variants
from hvd_ext.bench.lars_worker import CONTESTANTS, NORMS, PTO
from hvd_ext.runner.launcher import mpirun
from tests.mpi.benches import HOROVOD, bench

pytestmark = pytest.mark.slow

TF_KERAS = importlib.util.find_spec("tf_keras") is not None
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


def test_each_part_of_a_step_is_left_out_and_the_rest_is_trained(tmp_path: Path) -> None:
    sizes = ["--pixels", "16", "--batch", "8", "--width", "4", "--repetitions", "2", "--steps", "1"]
    kept, shown = bench(tmp_path, "breakdown", "--schemes", "cached", *sizes, forked=True)
    (row,) = kept["rows"]
    assert (row["ranks"], row["ranks_per_host"], row["scheme"], row["pixels"]) == (2, [2], "cached", 16)
    assert set(row["parts"]) == set(PARTS)
    assert {name: len(samples) for name, samples in row["samples"].items()} == dict.fromkeys(variants("cached"), 2)
    assert row["step_seconds"] > 0 and row["parts"]["compute"] > 0
    assert "MSTopK, hitopk, DataCache" in shown


def test_norms_are_measured_once_by_a_launched_job_alone_and_divided_among_the_ranks(tmp_path: Path) -> None:
    options = ["--models", "resnet50", "--parts", "norms,pto", "--repetitions", "1", "--calls", "1"]
    launcher = mpirun(2, [])
    kept, shown = bench(tmp_path, "lars", *options, before=launcher, HVD_EXT_LAUNCHER=shlex.join(launcher))
    assert shown.count("LARS: medians") == 1
    wanted = [(part, name) for part in (NORMS, PTO) for name in CONTESTANTS[part]]
    assert [(row["part"], row["contestant"]) for row in kept["rows"]] == wanted
    for row in kept["rows"]:
        assert (row["ranks"], row["model"], row["tensors"], row["elements"]) == (2, "resnet50", 161, 25_557_032)
        assert [len(row[f"{what}_samples"]) for what in ("seconds", "cpu")] == [1, 1]
        assert row["seconds"] > 0
    assert kept["rows"][-1]["chosen"] in ("alone", "together")
    assert "norms: divided among the ranks" in shown


@pytest.fixture
def model(tmp_path: Path) -> list[str]:
    """The options for a small model."""
    path = tmp_path / "tiny.csv"
    path.write_text(MODEL)
    return ["--model", str(path), "--scale", "1", "--repetitions", "2"]


def test_every_bucketer_is_replayed_and_checked(tmp_path: Path, model: list[str]) -> None:
    bucketers = "auto,wfbp,single,optimal,delay"
    options = ["--ranks", "2", "--ratio", "0,0.5", "--bucketers", bucketers]
    kept, shown = bench(tmp_path, "schedule", *model, *options)
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
    told = rows[:5]
    assert [row["compute_seconds"] for row in told] == pytest.approx([0.065] * 5)
    assert rows[5]["compute_seconds"] == pytest.approx(2 * rows[5]["communication_seconds"])
    counts = {row["bucketer"]: len(row["buckets"]) for row in told}
    assert (counts["single"], counts["wfbp"]) == (1, 5)
    assert told[0]["chosen"] == told[4]["chosen"] in bucketers.split(",")[1:4]
    assert "x predicted" in shown


def test_a_wrong_result_of_a_replayed_step_is_a_row_and_an_exit_status(tmp_path: Path, model: list[str]) -> None:
    script = tmp_path / "spoilt.py"
    script.write_text(SPOILT)
    launcher = shlex.join(mpirun(2, [sys.executable, str(script)]))
    options = ["--launcher", launcher, "--bucketers", "single", "--ratio", "0"]
    kept, shown = bench(tmp_path, "schedule", *model, *options, status=1)
    (row,) = kept["rows"]
    assert row["correct"] is False
    assert "wrong result: single, tiny" in shown
    assert "rank 1: body/kernel: element 7 is" in shown


def test_modes_train_with_ranks_that_are_late(tmp_path: Path) -> None:
    modes = ["full", "quorum", *(["horovod"] if HOROVOD else [])]
    options = ["--ranks", "2", "--workloads", "cloud", "--modes", ",".join(modes), "--steps", "6"]
    kept, shown = bench(tmp_path, "stragglers", *options, forked=True)
    rows = {row["mode"]: row for row in kept["rows"]}
    assert list(rows) == modes
    for mode, row in rows.items():
        assert (row["ranks"], row["hosts"], row["ranks_per_host"], row["workload"]) == (2, 1, [2], "cloud")
        assert row["correct"] is True
        assert len(row["samples"]) == row["steps"] == 6
        assert row["slept_seconds_mean"] >= 0.0399
        assert (row["x_full_played"] is None) == (mode == "horovod")
        partial = mode == "quorum"
        assert (row["active_ranks"] is not None) == partial
        # in two turns each rank takes 5 steps that do not count, and 3 that do; what was late came with the last
        assert not partial or 2 * 2 * 7 <= sum(row["stale_gradients"]) <= 2 * 2 * 8
    assert "x played" in shown


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="needs scikit-learn with its digits")
def test_all_contestants_train_the_same_and_are_measured(tmp_path: Path) -> None:
    sizes = ["--width", "16", "--batch", "8", "--steps", "3", "--repetitions", "2", "--warmup", "1"]
    options = ["--ranks", "2", "--algorithms", "ring,torus2d,horovod,multiworker", "--model", "cnn"]
    kept, shown = bench(tmp_path, "training", *sizes, *options, forked=True)
    rows = {row["algorithm"]: row for row in kept["rows"]}
    theirs = [*(["horovod"] if HOROVOD else []), *(["multiworker"] if TF_KERAS else [])]
    assert list(rows) == ["compute", "ring", *theirs]
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
