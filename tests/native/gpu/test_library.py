"""The library of the GPU's kernels: it is built where nvcc works, and loads without a GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.builds import ROOT
from tests.native.gpu import compare_torch

needs_library = pytest.mark.skipif(
    not compare_torch.LIBRARY.is_file(),
    reason="libhvd_ext_gpu.so is not there: the build found no nvcc",
)


@pytest.fixture(scope="module", name="library")
def _library() -> ctypes.CDLL:
    return compare_torch.load(compare_torch.LIBRARY)


@needs_library
def test_the_workspace_is_as_large_as_the_header_says(library):
    elements, k = 1 << 20, 1 << 10
    segment = compare_torch.Segment(0, elements, k)
    seen = library.hvd_ext_topk_gpu_workspace(0, ctypes.byref(segment), 1)
    candidates = (4 + 4) * (3 * k + elements // 256 + 4096)
    assert candidates <= seen <= candidates + elements // 512 + 16384


@needs_library
def test_the_library_shows_the_functions_of_its_headers_only():
    listed = subprocess.run(
        ["nm", "--dynamic", "--defined-only", str(compare_torch.LIBRARY)], capture_output=True, text=True, check=True
    )
    names = {line.split()[-1] for line in listed.stdout.splitlines()}
    assert {name for name in names if not name.startswith("_")} == {
        "hvd_ext_gpu_device",
        "hvd_ext_gpu_version",
        "hvd_ext_lamb_gpu",
        "hvd_ext_lars_gpu",
        "hvd_ext_layerwise_gpu_error",
        "hvd_ext_layerwise_gpu_workspace",
        "hvd_ext_move_gpu",
        "hvd_ext_norms_gpu",
        "hvd_ext_norms_gpu_error",
        "hvd_ext_norms_gpu_workspace",
        "hvd_ext_topk_gpu",
        "hvd_ext_topk_gpu_error",
        "hvd_ext_topk_gpu_workspace",
    }


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc on PATH")
@pytest.mark.parametrize("source", sorted(path.name for path in (ROOT / "tf_ops").glob("*/*.cu.cc")))
def test_nvcc_compiles_without_a_warning(source, tmp_path):
    command = ["nvcc", "-std=c++17", "-O1", "-fmad=false", "-arch=sm_90", "-Werror", "all-warnings"]
    command += ["-Xcompiler=-Wall,-Wextra,-Werror", "-I", str(ROOT / "tf_ops"), "-x", "cu"]
    (path,) = (ROOT / "tf_ops").glob(f"*/{source}")
    command += ["-c", "-o", str(tmp_path / "object.o"), str(path)]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr


@needs_library
def test_the_comparison_says_what_is_missing():
    script = Path(compare_torch.__file__)
    command = [sys.executable, str(script), "--library", str(script.parent / "none.so")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "torch (not installed)" in ended.stderr or "GPU (none)" in ended.stderr or "library (" in ended.stderr


def configured(folder: Path, **options: str) -> subprocess.CompletedProcess[str]:
    """Configures the native build in a folder, with these options beside those that leave out all that can be."""
    settings = {"MPI": "OFF", "OPS": "OFF", "OUTPUT": str(folder / "lib")} | options
    command = ["cmake", "-S", str(ROOT / "tf_ops"), "-B", str(folder), f"-DPython3_EXECUTABLE={sys.executable}"]
    command += [f"-DHVD_EXT_{name}={value}" for name, value in settings.items()]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
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
