"""The builds of the native tests.

The tests without sanitizers are built in the folder of the libraries, from the objects that the set-up has compiled;
the others keep their objects under build/native-tests, and the next build is short.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import timing

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ROOT / "hvd_ext" / "lib"
# Under sanitizers only the first is built.
PROGRAMS = (
    *("hvd_ext_native_tests", "hvd_ext_cache_kills", "hvd_ext_gpu_tests", "hvd_ext_gpu_stand_in"),
    *("hvd_ext_ranks_on_gpu", "hvd_ext_mpi_tests", "hvd_ext_mpi_life"),
)
# Builds that other tests hold up, on a slow machine, end in this time all the same.
BUILD_LIMIT_S = 3600
RUN_LIMIT_S = 1800
LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "HVD_EXT_")
ROOT_MAY = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")


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
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)  # Ninja hands it on to the compilers
        raise
    return process.returncode, output


def must_succeed(command: Sequence[str], limit_s: float, **changes: str) -> str:
    """Runs a command that must exit with 0, and gives what it printed."""
    code, output = run(command, limit_s, **changes)
    assert code == 0, f"{' '.join(command)} has exit status {code}:\n{output[-8000:]}"
    return output


@functools.cache
def built(sanitize: str = "") -> Path:
    """Builds the native tests.

    Args:
        sanitize: for -DHVD_EXT_SANITIZE. Libraries of MPI are not made for sanitizers: then MPI is left out.

    Returns:
        The folder of the build: programs in tests/.
    """
    # files of tests run at the same time, and Ninja does not keep two builds of a folder apart
    lock = ROOT / "build" / f"native-tests-{sanitize or 'plain'}.lock"
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with timing.measured("build", sanitize or "plain"):
            return _configured_and_compiled(sanitize)


def run_tests(sanitize: str = "") -> str:
    """Builds and runs the native tests; gives what they print, if they succeed."""
    program = built(sanitize) / "tests" / "hvd_ext_native_tests"
    # Sanitizers of older compilers fail at start, now and then, on kernels that spread addresses widely.
    fixed = ["setarch", "--addr-no-randomize"]
    if not shutil.which("setarch") or subprocess.run([*fixed, "true"], capture_output=True, check=False).returncode:
        fixed = []
    return must_succeed([*fixed, str(program), "--quiet"], RUN_LIMIT_S)


def _configured_and_compiled(sanitize: str) -> Path:
    folder = (None if sanitize else _of_the_libraries()) or ROOT / "build" / "native-tests" / (
        sanitize.replace(",", "-") or "plain"
    )
    configure = ["cmake", "-S", str(ROOT / "tf_ops"), "-B", str(folder), "-DHVD_EXT_TESTS=ON"]
    if folder.parent.name == "native-tests":
        configure += ["-G", "Ninja"] if shutil.which("ninja") else []
        configure += [f"-DHVD_EXT_SANITIZE={sanitize}", "-DHVD_EXT_MPI=OFF"] if sanitize else []
        configure += [f"-DHVD_EXT_TESTS_OF={built()}"] if "address" in sanitize else []
        configure += [f"-DPython3_EXECUTABLE={sys.executable}", f"-DHVD_EXT_OUTPUT={folder / 'lib'}"]
        configure += ["-DHVD_EXT_OPS=OFF", "-DHVD_EXT_CUDA=OFF"]
    must_succeed(configure, BUILD_LIMIT_S)
    cores = str(min(os.cpu_count() or 1, 8))
    programs = PROGRAMS[:1] if sanitize else PROGRAMS
    build = ["cmake", "--build", str(folder), "--parallel", cores, "--target", *programs]
    must_succeed(build, BUILD_LIMIT_S)
    return folder


def _of_the_libraries() -> Path | None:
    """Finds the folder in which `hvd_ext build` has compiled the libraries of this tree last."""
    wanted = (f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT / 'tf_ops'}\n", f"HVD_EXT_OUTPUT:PATH={LIBRARIES}\n")
    found = [
        cache
        for cache in (ROOT / "build").glob("native-*/CMakeCache.txt")
        if all(line in cache.read_text(encoding="utf-8") for line in wanted)
    ]
    return max(found, key=lambda cache: cache.stat().st_mtime).parent if found else None
