"""Jobs of real processes with buckets on the GPU, which is the stand-in for CUDA."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hvd_ext.cluster.spec import Spec, topology
from hvd_ext.engine import gpus
from hvd_ext.errors import NativeLibraryError
from tests.native.builds import ROOT, built, must_succeed, run

LIMIT_S = 900


def library() -> Path:
    return built() / "tests" / "gpu" / "libhvd_ext_gpu_stand_in.so"


def mpirun(ranks: int, *command: str) -> list[str]:
    return ["mpirun", "-np", str(ranks), "--oversubscribe", "--bind-to", "none", sys.executable, *command]


@pytest.mark.slow
def test_a_job_has_the_same_bits_as_with_buckets_in_the_host_s_memory(tmp_path):
    path = tmp_path / "topology.yaml"
    path.write_text(topology(Spec((2, 1), rate="10mbit")))
    command = mpirun(3, "-m", "tests.native.gpu.job", str(library()))
    changes = {"HVD_EXT_TOPOLOGY": str(path), "CUDA_VISIBLE_DEVICES": "0", "TF_CPP_MIN_LOG_LEVEL": "2"}
    output = must_succeed(command, LIMIT_S, PYTHONPATH=str(ROOT), **changes)
    assert output.count("equal bits") == 3


PROBED = """
import pathlib, sys
import numpy as np
import hvd_ext as hvd
from hvd_ext.engine import gpus
from hvd_ext.job import network, runtime
from hvd_ext.job.probe import groups, rings
from hvd_ext.topology import write

gpus.LIBRARY = pathlib.Path(sys.argv[1])
rings.GPU_SIZES, groups.JOIN_SIZES = (1 << 18, 1 << 19, 1 << 20), (1 << 18, 1 << 20)
rings.SELECTED_ON_GPU_NBYTES = 1 << 20
hvd.init(hvd.Options(gpu_buckets=True, probe="refresh", cache=sys.argv[2]))
job = runtime.current()
assert job.network.source == network.MEASURED
x = np.arange(1000, dtype=np.float32)
np.testing.assert_array_equal(hvd.allreduce(x * (hvd.rank() + 1), op=hvd.Sum), 10 * x)
if hvd.rank() == 0:
    print(job.network.line)
    print(write.text(job.tree))
hvd.shutdown()
hvd.init(hvd.Options(gpu_buckets=True, cache=sys.argv[2]))
assert runtime.current().network.source == network.KEPT
hvd.shutdown()
hvd.init(hvd.Options(cache=sys.argv[2], probe="off"))
assert len(runtime.current().tree.levels()) == 1
print("all is right")
"""


@pytest.mark.slow
def test_the_probe_finds_what_joins_the_gpus_of_a_host(tmp_path):
    """Two pairs that reach each other's memory, which only the host's memory joins."""
    changes = {"HVD_EXT_STAND_IN_GPUS": "nnhh nnhh hhpp hhpp", "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = mpirun(4, "-c", PROBED, str(library()), str(tmp_path))
    output = must_succeed(command, LIMIT_S, PYTHONPATH=str(ROOT), **changes)
    assert output.count("all is right") == 4
    words = " ".join(output.split())
    for medium, ranks in (("NVLink", "[0, 1]"), ("PCIe", "[2, 3]")):
        assert f"medium: {medium} ranks: {ranks}" in words
    assert "in hosts (host memory)" in words and "medium: host memory" in words


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "elements", "density"),
    [(2, 2_000_003, "0"), (4, 40_000, "0"), (3, 7, "0"), (2, 300_001, "0.01"), (3, 500, "0.3"), (2, 500, "1")],
)
def test_ranks_add_up_straight_from_each_other_s_gpu_memory(ranks, elements, density):
    """The program checks that the sums have the bits of those in the host's memory."""
    program = built() / "tests" / "gpu" / "hvd_ext_ranks_on_gpu"
    row = json.loads(must_succeed([str(program), str(ranks), str(elements), "4", density], LIMIT_S))
    assert (row["ranks"], row["elements"], row["stays_on_gpu"]) == (ranks, elements, True)
    assert [len(row[name]) for name in ("on_gpu_seconds", "on_host_seconds", "copy_seconds")] == [4, 4, 4]


@pytest.mark.slow
def test_a_gpu_that_is_not_there_is_an_error_on_its_rank(tmp_path):
    """The stand-in has two; the third rank of the host asks for a third one."""
    script = (
        "import pathlib, sys, hvd_ext as hvd\nfrom hvd_ext.engine import gpus\n"
        "gpus.LIBRARY = pathlib.Path(sys.argv[1])\nhvd.init(hvd.Options(gpu_buckets=True))"
    )
    code, output = run(mpirun(3, "-c", script, str(library())), LIMIT_S, PYTHONPATH=str(ROOT), TF_CPP_MIN_LOG_LEVEL="2")
    assert code != 0
    assert "InvalidError: buckets on the GPU: GPU 2 cannot be used: GPU: " in output
    assert "cudaErrorInvalidDevice" in output


@pytest.mark.slow
def test_a_library_of_something_else_is_an_error():
    script = (
        "import pathlib, sys, hvd_ext as hvd\nfrom hvd_ext.engine import gpus\n"
        "gpus.LIBRARY = pathlib.Path(sys.argv[1])\nhvd.init(hvd.Options(gpu_buckets=True))"
    )
    for path, words in [(gpus.libraries.LIBRARIES / "libhvd_ext_cache.so", "version"), (Path(__file__), "not load")]:
        code, output = run([sys.executable, "-c", script, str(path)], LIMIT_S, PYTHONPATH=str(ROOT))
        assert code != 0
        assert "InvalidError: buckets on the GPU: " in output and words in output


def test_the_number_of_a_rank_s_gpu():
    assert gpus.number({}) == 0
    assert gpus.number({"OMPI_COMM_WORLD_LOCAL_RANK": "3"}) == 3
    assert gpus.number({"SLURM_LOCALID": "2", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}) == 2
    assert gpus.number({"SLURM_LOCALID": "2", "CUDA_VISIBLE_DEVICES": "5"}) == 0


def test_a_library_that_was_not_built_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(gpus, "LIBRARY", tmp_path / "none.so")
    with pytest.raises(NativeLibraryError, match="the build found no nvcc that works; .* python -m hvd_ext build"):
        gpus.library()
