"""The studies with two real ranks, each through its command line."""

from __future__ import annotations

import json
import shlex
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml

from benchmarks.studies.convergence import data as data_sets
from benchmarks.studies.lars.worker import CONTESTANTS, NORMS, PTO
from benchmarks.studies.recipe import jobs as recipe, ways
from hvd_ext.cluster.spec import Spec
from hvd_ext.cluster.tools import obstacle
from hvd_ext.runner.launcher import mpirun
from tests.mpi import jobs
from tests.mpi.benches import HOROVOD, bench, done, few_pictures

pytestmark = pytest.mark.mpi

STUDIES = [sys.executable, "-m", "benchmarks.studies"]
measured = partial(bench, program=STUDIES)
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
import benchmarks.studies.schedule.worker as worker
right = worker.Stage._fault
def spoil(self):
    if self._ranks.rank == 1:
        self._outputs[1][7] += 1
    return right(self)
worker.Stage._fault = spoil
worker.main(*sys.argv[-2:])
"""
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
    names = "hitopk@0.1:fp16,naive_allgather@0.1,gtopk@0.05:bf16,flexreduce:fp16,mpi"
    options = ["--algorithms", names, "--elements", "1003", "--repetitions", "3"]
    kept, _ = measured(tmp_path, "hitopk", *options)
    rows = {row["name"]: row for row in kept["rows"]}
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


def test_norms_are_measured_once_by_a_launched_job_alone_and_divided_among_the_ranks(tmp_path: Path) -> None:
    options = ["--models", "resnet50", "--parts", "norms,pto", "--repetitions", "1", "--calls", "1"]
    launcher = mpirun(2, [])
    kept, shown = measured(tmp_path, "lars", *options, before=launcher, HVD_EXT_LAUNCHER=shlex.join(launcher))
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
    kept, shown = measured(tmp_path, "schedule", *model, *options)
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
    kept, shown = measured(tmp_path, "schedule", *model, *options, status=1)
    (row,) = kept["rows"]
    assert row["correct"] is False
    assert "wrong result: single, tiny" in shown
    assert "rank 1: body/kernel: element 7 is" in shown


def test_modes_train_with_ranks_that_are_late(tmp_path: Path) -> None:
    modes = ["full", "quorum", *(["horovod"] if HOROVOD else [])]
    options = ["--ranks", "2", "--workloads", "cloud", "--modes", ",".join(modes), "--steps", "6"]
    kept, shown = measured(tmp_path, "stragglers", *options, forked=True)
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


@pytest.mark.parametrize("ranks", [1, 2])
def test_parts_that_are_jobs_measure_on_so_many_ranks(ranks: int, tmp_path: Path) -> None:
    file = Path(__file__).with_name("data_on_ranks.py")
    options = ["-p", "tests.ranks.conftest", "-p", "no:cacheprovider", "-x", "-q", "--rootdir", str(jobs.ROOT)]
    launcher = None if ranks > 1 else []
    jobs.run(tmp_path, ["-m", "pytest", *options, str(file)], ranks=ranks, launcher=launcher).must_succeed()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return few_pictures(tmp_path_factory.mktemp("pictures") / "set")


@pytest.mark.skipif(bool(obstacle()), reason=f"a rehearsed cluster: making namespaces {obstacle()}")
def test_the_study_trains_with_horovod_what_the_example_trains(
    tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("horovod")
    smoke = yaml.safe_load((ways.known.PRESETS / "smoke.yaml").read_text(encoding="utf-8"))
    short = {**smoke, "phases": [{**smoke["phases"][0], "epochs": 1}, smoke["phases"][-1]], "deterministic": False}
    (tmp_path / "short.yaml").write_text(yaml.safe_dump(short), encoding="utf-8")
    monkeypatch.setattr(ways, "PRESET", str(tmp_path / "short.yaml"))
    monkeypatch.setattr(recipe, "CLUSTER", Spec((1, 1)))
    horovod = ways.Run(next(way for way in ways.WAYS if way.name == "horovod"), "seed")
    said: list[str] = []
    assert recipe.train([horovod], tmp_path, pictures, pictures, lambda run, line: said.append(line)) == []
    rows = recipe.rows(tmp_path, horovod)
    assert [(row["pixels"], row["batch"], row["compression"]) for row in rows] == [
        (16, 24, "dense"),
        (32, 12, "dense"),
    ]
    assert all(0 <= row["top1"] <= row["top5"] <= 1 for row in rows)
    assert sum(line.startswith("epoch ") for line in said) == len(rows)
    assert recipe.train([horovod], tmp_path, pictures, pictures, lambda run, line: pytest.fail("it is done")) == []
