"""The build option of the GPU's kernels: what happens without nvcc, and with one that does not work."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]


def configured(folder: Path, **options: str) -> subprocess.CompletedProcess[str]:
    """Configures the native build in a folder, with these options beside those that leave out all that can be."""
    settings = {"MPI": "OFF", "OPS": "OFF", "OUTPUT": str(folder / "lib")} | options
    command = ["cmake", "-S", str(ROOT / "tf_ops"), "-B", str(folder), f"-DPython3_EXECUTABLE={sys.executable}"]
    command += [f"-DHVD_EXT_{name}={value}" for name, value in settings.items()]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_nvcc_is_needed_only_where_it_is_asked_for(tmp_path):
    refused = configured(tmp_path, CUDA="ON", NVCC="")
    assert refused.returncode != 0
    assert "HVD_EXT_CUDA (ON): nvcc must be on PATH or in $CUDA_HOME/bin" in " ".join(refused.stderr.split())
    without = configured(tmp_path, CUDA="AUTO", NVCC="")
    assert without.returncode == 0, without.stderr
    assert "CUDA" not in without.stdout
    broken = configured(tmp_path, CUDA="AUTO", NVCC=str(shutil.which("false")))
    assert broken.returncode == 0, broken.stderr
    assert "does not compile an empty kernel, nothing is built for GPUs" in broken.stdout
