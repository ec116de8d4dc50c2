"""The benchmark of the GPU library, with programs in the place of nvcc, nvidia-smi, compute-sanitizer and PyTorch."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1]
# What nvcc makes is this program; it behaves as $PROGRAM_IS says.
PROGRAM = """#!/bin/sh
case "$PROGRAM_IS $1" in
"wrong check") echo 'wrong: gauss: pick 0 of 9' >&2; exit 1 ;;
"slow check") echo '{"checked": 7, "of": 9}' ;;
"hanging check") sleep 600 & wait ;;
"blind check") echo 'no GPU was found: nothing was checked' >&2; exit 2 ;;
*" check" | *" few") echo '{"checked": 9, "of": 9}' ;;
*" times") echo '{"elements": 1000, "k": 10, "noop_ms": 0.001, "copy_ms": 0.5, "topk_ms": 0.75}'
  echo '{"elements": 3000, "tensors": 3, "noop_ms": 0.001, "copy_ms": 0.5, "norms_ms": 0.25}' ;;
"unequal 2") echo 'rank 1: the bits of both sums differ' >&2; exit 1 ;;
*" 2" | *" 4") echo '{"ranks": '$1', "elements": '$2', "density": '${4:-0}', "on_gpu_seconds": [0.002, 0.004, 0.003],
  "on_host_seconds": [0.03], "copy_seconds": [0.001], "stays_on_gpu": true}' | tr -d '\n' ;;
esac
"""
NVCC = """#!/bin/sh
echo "$@" >>"$FAKES/nvcc.log"
case "$*" in *--version*) echo 'Cuda compilation tools, release 13.0, V13.0.88'; exit ;; esac
[ -z "$NVCC_FAILS" ] || { echo 'error: no such thing' >&2; exit 4; }
while [ "$1" != -o ]; do shift; done
echo 'ptxas info: 0 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads' >&2
cp "$FAKES/program" "$2"
"""
NVIDIA_SMI = """#!/bin/sh
echo 'Some GPU, 580.1, 1000 MiB, 8.6, 1000 MHz, 2000 MHz'
"""
SANITIZER = """#!/bin/sh
tool=$2
shift 4
"$@"
case "$SANITIZER_IS $tool" in
"finding racecheck") echo '========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)'; exit 77 ;;
"refusing "*) echo '========= Error: Device not supported'; exit 1 ;;
"silent "*) ;;
*" racecheck") echo '========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)' ;;
*) echo '========= ERROR SUMMARY: 0 errors' ;;
esac
"""
TORCH = """class cuda:
    is_available = staticmethod(lambda: False)
"""


@pytest.fixture(name="gpu")
def _gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, which builds in a folder of the test and finds tools on the test's PATH only."""
    spec = importlib.util.spec_from_file_location("gpu_benchmark", BENCHMARKS / "gpu.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    for name, path in (("BUILT", "."), ("LIBRARY", "library.so"), ("PROGRAM", "on_gpu"), ("RANKS", "ranks")):
        monkeypatch.setattr(module, name, tmp_path / "built" / path)
    for name in ("INSTALLED", "LIBRARIES"):
        monkeypatch.setattr(module, name, tmp_path / "nothing")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    return module


@pytest.fixture(name="measured")
def _measured(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs the benchmark with these tools and these settings; its exit status and its file."""
    fakes = tmp_path / "fakes"
    (fakes / "torch").mkdir(parents=True)
    (fakes / "torch" / "__init__.py").write_text(TORCH)
    (fakes / "program").write_text(PROGRAM)
    (fakes / "program").chmod(0o755)
    monkeypatch.setenv("FAKES", str(fakes))
    monkeypatch.setenv("PYTHONPATH", str(fakes))
    tools = {"nvcc": NVCC, "nvidia-smi": NVIDIA_SMI, "compute-sanitizer": SANITIZER}

    def run(*without: str, **settings: str) -> tuple[int, dict[str, Any]]:
        folder = tmp_path / "bin"
        folder.mkdir()
        for name, text in tools.items():
            if name not in without:
                (folder / name).write_text(text)
                (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", os.pathsep.join([str(folder), "/usr/bin", "/bin"]))
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        file = tmp_path / "out" / "gpu.json"
        status = gpu.measured(file, gpu.Clock(60))
        assert all(len(line) < 6000 for line in file.read_text().splitlines())
        return status, json.loads(file.read_text())

    return run


def statuses(found: dict[str, Any]) -> dict[str, str]:
    """What became of each phase."""
    return {phase["phase"]: phase["status"] for phase in found["phases"]}


def why(found: dict[str, Any], name: str) -> str:
    """What a phase says about its status."""
    return next(phase["why"] for phase in found["phases"] if phase["phase"] == name)


SANITIZERS = ("memcheck", "racecheck", "synccheck")
BUILDS = ("build library", "build program", "build ranks")


def test_all_phases_pass_and_the_file_has_machine_phases_and_times(measured, tmp_path, capsys):
    status, found = measured()
    assert status == 0
    expected = dict.fromkeys(("nvidia-smi", *BUILDS, "check", "times", "ranks", *SANITIZERS), "passed")
    assert statuses(found) == {**expected, **dict.fromkeys(("torch", "ops", "job", "training"), "missing")}
    assert why(found, "ops") == why(found, "training") == "not there: libhvd_ext_ops.so, libhvd_ext_gpu.so"
    assert why(found, "torch").startswith("GPU (none): torch must see one")
    (run,) = found["runs"]
    assert (run["gpu"]["name"], run["gpu"]["driver_version"], run["versions"]["cuda"]) == ("Some GPU", "580.1", "13.0")
    assert run["date"].endswith("UTC")
    shared = {"run": 0, "phase": "times", "noop_ms": 0.001, "copy_ms": 0.5}
    assert found["rows"] == [
        {**shared, "elements": 1000, "k": 10, "topk_ms": 0.75},
        {**shared, "elements": 3000, "tensors": 3, "norms_ms": 0.25},
        *(
            {"run": 0, "phase": "ranks", "ranks": ranks, "elements": 25557032, "density": density}
            | {"on_gpu_seconds": [0.002, 0.004, 0.003], "on_host_seconds": [0.03], "copy_seconds": [0.001]}
            | {"stays_on_gpu": True}
            for ranks, density in ((2, 0), (4, 0), (2, 0.01))
        ),
    ]
    assert next(phase for phase in found["phases"] if phase["phase"] == "build library")["spilled_bytes"] == 8
    compiled = (tmp_path / "fakes" / "nvcc.log").read_text()
    assert compiled.count("arch=compute_86,code=sm_86") > 2  # what nvidia-smi says
    assert "engine_executor.o" in compiled and "gpu_ranks_on_gpu.o" in compiled
    tables = capsys.readouterr().out
    assert "| times | 1,000 | 10 | 0.75 | 0.5 | 0.001 | - | 1.5 | - |" in tables
    assert "| 3 | 3,000 | 0.25 | 0.5 | 0.001 | 0.5 |" in tables
    assert "| 2 | - | 25,557,032 | 3 | 30 | 10 | 4.5 | 0.667 |" in tables
    assert "| 2 | 0.01 | 25,557,032 | 3 | 30 | 10 | 7.5 | 0.4 |" in tables


# What is set or not there, the exit status, some phases with theirs, and words of the first of these phases.
TROUBLES = [
    ("PROGRAM_IS=wrong", 1, "check: failed, times: passed", "exit status 1: wrong: gauss: pick 0 of 9"),
    ("PROGRAM_IS=slow", 1, "check: out of time", "7 of 9 problems were checked, and were right"),
    ("PROGRAM_IS=hanging", 1, "check: out of time, memcheck: passed", "was killed"),
    ("PROGRAM_IS=unequal", 1, "ranks: failed, check: passed, memcheck: passed", "the bits of both sums differ"),
    ("PROGRAM_IS=blind", 2, "check: missing", "no GPU was found: nothing was checked"),
    ("SANITIZER_IS=finding", 1, "racecheck: failed, memcheck: passed, synccheck: passed", "found 3 errors or hazards"),
    # a sanitizer that cannot work is not taken for one that found nothing
    ("SANITIZER_IS=refusing", 0, "memcheck: missing, racecheck: missing, synccheck: missing", "not supported"),
    ("SANITIZER_IS=silent", 1, "memcheck: failed, racecheck: failed, synccheck: failed", ""),
    ("without compute-sanitizer", 0, "memcheck: missing, racecheck: missing, check: passed", "was not found"),
    ("without nvidia-smi", 0, "nvidia-smi: missing, build library: passed, check: passed, times: passed", ""),
    ("without nvcc", 2, "build library: missing, check: missing, times: missing", "nvcc was not found"),
    ("NVCC_FAILS=1", 1, "build library: failed, check: missing", "exit status 4: error: no such thing"),
]


@pytest.mark.parametrize(("trouble", "expected", "phases", "words"), TROUBLES, ids=[row[0] for row in TROUBLES])
def test_what_goes_wrong_has_its_status_and_words_and_the_rest_runs(
    trouble, expected, phases, words, measured, gpu, monkeypatch
):
    name, _, value = trouble.partition("=")
    if value == "hanging":
        monkeypatch.setitem(gpu.LIMITS_S, "check", 0.3)
    status, result = measured(**{name: value}) if value else measured(trouble.removeprefix("without "))
    wanted = dict(phase.split(": ") for phase in phases.split(", "))
    assert status == expected
    assert {phase: statuses(result)[phase] for phase in wanted} == wanted
    assert words in why(result, next(iter(wanted)))


PYTHON = """#!/bin/sh
case "$*" in
*gpu.ops) [ -z "$NO_GPU" ] || { echo ':GPU:0: TensorFlow has no such device' >&2; exit 2; }
  echo '{"checked": 11, "of": 11}' ;;
*gpu_training.py) echo '# 96 pixels'
  echo '{"elements": 9, "pixels": 96, "batch": 256, "plain_step_ms": 17, '\
'"ours_step_ms": 18, "update_step_ms": 1, "speed": 0.944}'
esac
"""


def test_with_tensorflow_ops_a_job_and_training_steps_run(gpu, tmp_path, monkeypatch):
    for name, text in (("python", PYTHON), ("mpirun", "#!/bin/sh\necho equal bits\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(gpu.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(gpu, "LIBRARIES", tmp_path)
    for name in gpu.BUILT_FILES:
        (tmp_path / name).touch()
    ran = list(gpu.with_tensorflow(gpu.Clock(60)))
    assert {phase.phase: phase.status for phase, _ in ran} == dict.fromkeys(("ops", "job", "training"), "passed")
    assert ran[0][0].more == {"checked": 11, "of": 11}
    assert "| 96 | 256 | 17 | 18 | 1 | 0.94 |" in gpu.table(ran[-1][1])
    monkeypatch.setenv("NO_GPU", "1")
    ran = list(gpu.with_tensorflow(gpu.Clock(60)))
    assert {phase.status for phase, _ in ran} == {"missing"}
    assert {phase.why for phase, _ in ran} == {":GPU:0: TensorFlow has no such device"}


def test_answers_that_differ_from_those_of_pytorch_are_a_failure(gpu):
    rows = ['{"device": "Some GPU", "torch": "2.11"}', '{"elements": 9, "k": 2, "topk_ms": 1, "same": false}']
    command = [sys.executable, "-c", f"print({rows[0]!r}); print({rows[1]!r}); print('{{\"cut'); raise SystemExit(1)"]
    phase, kept = gpu.timed("torch", command, gpu.Clock(60))
    assert (phase.status, phase.more["torch"], [row["same"] for row in kept]) == ("failed", "2.11", [False])


def test_the_phases_fit_into_eight_minutes(gpu):
    once = sum(seconds for name, seconds in gpu.LIMITS_S.items() if name not in ("sanitizer", "ranks", gpu.LAST))
    several = len(gpu.TOOLS) * gpu.LIMITS_S["sanitizer"] + len(gpu.SHARING) * gpu.LIMITS_S["ranks"]
    assert once + several <= gpu.TOTAL_S < 480


def test_the_shell_script_starts_it():
    ended = subprocess.run([BENCHMARKS / "gpu.sh", "--help"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "usage: benchmarks/gpu.sh" in ended.stdout
