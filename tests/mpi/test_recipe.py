"""The DAWNBench recipe with real ranks on two rehearsed hosts: all phases, a stop, and going on with the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import yaml

from hvd_ext.cluster.tools import obstacle
from tests.mpi import jobs as ranks
from tests.mpi.benches import ROOT, TIMEOUT_S, few_pictures

SCRIPT = ROOT / "examples" / "dawnbench_resnet50.py"
SMOKE = ROOT / "examples" / "resnet50" / "presets" / "smoke.yaml"

pytestmark = [
    pytest.mark.skipif(bool(obstacle()), reason=f"a rehearsed cluster: making namespaces {obstacle()}"),
]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return few_pictures(tmp_path_factory.mktemp("pictures") / "set")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smoke preset with one block, and with each kind of phase once: each phase traces its functions."""
    chosen = yaml.safe_load(SMOKE.read_text(encoding="utf-8"))
    chosen["network"] |= {"blocks": [1], "widths": [16]}
    chosen["topk"] |= {"min_elements": 1000}
    del chosen["phases"][2]
    path = tmp_path_factory.mktemp("settings") / "smaller.yaml"
    path.write_text(yaml.safe_dump(chosen), encoding="utf-8")
    return path


def begun(settings: Path, pictures: Path, folder: Path) -> subprocess.Popen[str]:
    cluster = [sys.executable, "-m", "hvd_ext", "cluster", "run", "--hosts", "1,1", "--rate", "1gbit", "--"]
    words = [str(settings), "--data", str(pictures), "--output", str(folder)]
    command = [*cluster, sys.executable, str(SCRIPT), *words]
    forking = os.environ | ranks.forking(folder.parent)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=forking)


def ended(job: subprocess.Popen[str], status: int = 0) -> None:
    said, _ = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == status, said


def rows(folder: Path) -> list[dict[str, Any]]:
    try:
        return list(json.loads((folder / "report.json").read_text(encoding="utf-8"))["rows"])
    except FileNotFoundError:
        return []


def weights(folder: Path) -> dict[str, np.ndarray]:
    """Read all arrays of the trained model, those of the optimizer too."""
    found: dict[str, np.ndarray] = {}
    with (
        zipfile.ZipFile(folder / "model.keras") as archive,
        h5py.File(BytesIO(archive.read("model.weights.h5"))) as file,
    ):
        file.visititems(lambda name, one: found.update({name: one[()]}) if isinstance(one, h5py.Dataset) else None)
    return found


def test_all_phases_are_trained_and_a_training_that_was_stopped_goes_on_with_the_same_bits(
    tmp_path: Path, settings: Path, pictures: Path
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    ended(begun(settings, pictures, whole))
    found = rows(whole)
    assert [(row["epoch"], row["pixels"], row["batch"], row["compression"]) for row in found] == [
        (0, 16, 24, "topk"),
        (1, 16, 24, "topk"),
        (2, 20, 24, "dense"),
        (3, 32, 12, "dense"),
    ]
    assert [row["cache_hits"] for row in found] == [0, 1, 1, 1]
    hours = [row["hours"] for row in found]
    assert hours == sorted(hours)
    assert all(0 <= row["top1"] <= row["top5"] <= 1 and row["hours"] < row["wall_hours"] for row in found)

    end = time.monotonic() + TIMEOUT_S
    job = begun(settings, pictures, stopped)
    while len(rows(stopped)) < 2:  # another phase begins
        assert job.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
    os.kill(job.pid, signal.SIGTERM)
    ended(job, 143)
    assert len(rows(stopped)) < len(found)
    assert not (stopped / "model.keras").exists()
    ended(begun(settings, pictures, stopped))
    again = rows(stopped)
    exact = ("epoch", "pixels", "batch", "compression", "loss", "accuracy", "top1", "top5")
    assert [[row[name] for name in exact] for row in again] == [[row[name] for name in exact] for row in found]
    expected, seen = weights(whole), weights(stopped)
    assert seen.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(seen[name], values, err_msg=name)
