"""Builds and runs the native tests: as they are, under sanitizers, and the MPI transport under mpirun.

The objects are kept under build/native-tests: the next run is short. Of the programs only the exit status counts,
since what several ranks print is mixed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # the first run builds for a minute

ROOT = Path(__file__).resolve().parents[2]
BUILD_LIMIT_S = 1200
RUN_LIMIT_S = 600
LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "HVD_EXT_")
ROOT_MAY = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
# What may be seen of the engine library: the C ABI, and what the library of the ops calls.
EXPORTS = ("hvd_ext_", "hvd_ext::Engine::", "hvd_ext::SizeOf(", "hvd_ext::NameOf(")


def run(command: Sequence[str], limit_s: float, **changes: str) -> tuple[int, str]:
    """Runs a command to its end, without what a launcher of these tests themselves has set.

    Args:
        command: program and arguments.
        limit_s: after so many seconds the command and its children are killed, and the test fails.
        changes: environment variables to set.

    Returns:
        The exit status and what was printed.
    """
    inherited = {name: text for name, text in os.environ.items() if name in ROOT_MAY or not name.startswith(LAUNCHERS)}
    process = subprocess.Popen(
        command,
        env=inherited | changes,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{' '.join(command)} did not end in {limit_s:.0f} s:\n{output[-4000:]}")
    return process.returncode, output


def must_succeed(command: Sequence[str], limit_s: float, **changes: str) -> str:
    """Runs a command that must exit with 0, and gives what it printed."""
    code, output = run(command, limit_s, **changes)
    assert code == 0, f"{' '.join(command)} has exit status {code}:\n{output[-8000:]}"
    return output


@cache
def built(sanitize: str = "") -> Path:
    """Builds the native tests.

    Args:
        sanitize: for -DHVD_EXT_SANITIZE. Libraries of MPI are not made for sanitizers: then MPI is left out.

    Returns:
        The folder of the build: programs in tests/, the engine library in lib/.
    """
    folder = ROOT / "build" / "native-tests" / (sanitize.replace(",", "-") or "plain")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    options = [f"-DHVD_EXT_SANITIZE={sanitize}", "-DHVD_EXT_MPI=OFF"] if sanitize else []
    configure = ["cmake", *generator, "-S", str(ROOT / "tf_ops"), "-B", str(folder), *options]
    configure += [f"-DPython3_EXECUTABLE={sys.executable}", f"-DHVD_EXT_OUTPUT={folder / 'lib'}"]
    must_succeed([*configure, "-DHVD_EXT_TESTS=ON", "-DHVD_EXT_OPS=OFF"], BUILD_LIMIT_S)
    targets = ["--target", "hvd_ext_native_tests"] if sanitize else []
    jobs = str(min(os.cpu_count() or 1, 8))
    must_succeed(["cmake", "--build", str(folder), *targets, "--parallel", jobs], BUILD_LIMIT_S)
    return folder


def without_randomised_addresses() -> list[str]:
    """Gives the prefix of a command whose addresses are the same each time, where the system allows it.

    Sanitizers of older compilers fail at start, now and then, on kernels that spread addresses widely.
    """
    prefix = ["setarch", "--addr-no-randomize"]
    if shutil.which("setarch") and subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0:
        return prefix
    return []


def test_the_native_tests_pass():
    must_succeed([str(built() / "tests" / "hvd_ext_native_tests"), "--quiet"], RUN_LIMIT_S)


@pytest.mark.parametrize("sanitize", ["address,undefined", "thread"])
def test_the_native_tests_pass_under_sanitizers(sanitize):
    program = built(sanitize) / "tests" / "hvd_ext_native_tests"
    must_succeed([*without_randomised_addresses(), str(program), "--quiet"], RUN_LIMIT_S)


def test_a_filter_that_fits_no_test_is_a_failure():
    code, output = run([str(built() / "tests" / "hvd_ext_native_tests"), "no such test"], RUN_LIMIT_S)
    assert code != 0
    assert "no test has a name that contains 'no such test'" in output


def test_the_engine_library_exports_only_the_c_abi_and_the_engine():
    library = built() / "lib" / "libhvd_ext_engine.so"
    lines = must_succeed(["nm", "--dynamic", "--defined-only", "--demangle", str(library)], RUN_LIMIT_S).splitlines()
    names = [line.split(maxsplit=2)[2] for line in lines]
    assert "hvd_ext_abi_version" in names
    assert any(name.startswith("hvd_ext::Engine::") for name in names)
    assert [name for name in names if not name.startswith(EXPORTS)] == []


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_mpi_transport_keeps_its_contract(ranks):
    program = str(built() / "tests" / "hvd_ext_mpi_tests")
    must_succeed(["mpirun", "-np", str(ranks), "--oversubscribe", program, "--quiet"], RUN_LIMIT_S)


@pytest.mark.mpi
def test_the_mpi_transport_keeps_its_contract_over_tcp():
    program = str(built() / "tests" / "hvd_ext_mpi_tests")
    tcp = {"OMPI_MCA_btl": "tcp,self", "OMPI_MCA_btl_tcp_if_include": "lo"}
    must_succeed(["mpirun", "-np", "2", "--oversubscribe", program, "--quiet"], RUN_LIMIT_S, **tcp)


@pytest.mark.mpi
@pytest.mark.parametrize("mode", ["started", "attached", "single"])
def test_the_mpi_transport_starts_or_attaches_to_mpi(mode):
    program = str(built() / "tests" / "hvd_ext_mpi_life")
    must_succeed(["mpirun", "-np", "2", "--oversubscribe", program, mode], RUN_LIMIT_S)


@pytest.mark.mpi
def test_mpi_starts_without_a_launcher():
    must_succeed([str(built() / "tests" / "hvd_ext_mpi_life"), "started"], RUN_LIMIT_S)


@pytest.mark.mpi
@pytest.mark.parametrize("mode", ["failed", "abort", "making"])
def test_a_rank_that_goes_down_alone_ends_the_job(mode):
    # The others would sleep for longer than the limit.
    program = str(built() / "tests" / "hvd_ext_mpi_life")
    code, output = run(["mpirun", "-np", "2", "--oversubscribe", program, mode], RUN_LIMIT_S)
    assert code != 0
    assert "wrong:" not in output
