"""Builds Horovod 0.28.1, which is a launcher and the baseline of benchmarks, from its source archive.

The archive does not build on TensorFlow 2.19 and later, because one source file includes headers that have moved. That
file holds the XLA ops, which are off by default. Without the line that names it, the rest builds and works.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from hvd_ext.build import child
from hvd_ext.build.child import InstallError
from hvd_ext.build.native import Missing, find_toolchain
from hvd_ext.engine import versions

XLA_SOURCE = "xla_mpi_ops.cc"
OPTIONS = {
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_MPI": "1",
    "HOROVOD_WITHOUT_GLOO": "1",
}
IMPORT = """
import horovod, horovod.tensorflow as hvd
answer = {"version": horovod.__version__, "mpi": bool(hvd.mpi_built())}
"""


def installed(python: str = sys.executable) -> child.Answer:
    """Import Horovod's TensorFlow part in a child.

    Returns:
        `version` and `mpi`, or why Horovod does not work with the installed TensorFlow.
    """
    return child.ask(python, IMPORT)


def drop_xla_source(cmake_lists: Path) -> None:
    """Remove the line that names the XLA ops from Horovod's list of sources.

    Args:
        cmake_lists: horovod/tensorflow/CMakeLists.txt of the unpacked archive.

    Raises:
        InstallError: not exactly one line names the file.
    """
    lines = cmake_lists.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if XLA_SOURCE not in line]
    if len(lines) - len(kept) != 1:
        raise InstallError(
            f"{cmake_lists} (Horovod {versions.HOROVOD}): one line must name {XLA_SOURCE}, "
            f"{len(lines) - len(kept)} do; the archive is not the one that this recipe is for"
        )
    cmake_lists.write_text("".join(kept), encoding="utf-8")


def unpack(archive: Path, folder: Path, sha256: str = versions.HOROVOD_SHA256) -> Path:
    """Check the source archive and unpack it.

    Args:
        archive: the downloaded .tar.gz.
        sha256: the hash that the archive must have.

    Returns:
        The folder with Horovod's setup.py.

    Raises:
        InstallError: the archive has another hash.
    """
    seen = hashlib.sha256(archive.read_bytes()).hexdigest()
    if seen != sha256:
        raise InstallError(f"{archive.name}: its sha256 must be {sha256}, it is {seen}; download it again")
    with tarfile.open(archive) as file:
        file.extractall(folder)  # Python 3.11.2 has no filter argument; the checked hash vouches for the content
    return folder / f"horovod-{versions.HOROVOD}"


def install(log: Path, python: str = sys.executable, *, echo: Callable[[str], None] = lambda line: None) -> None:
    """Download, patch, build and install Horovod with MPI and TensorFlow, without Gloo. Takes 1 to 4 minutes.

    Args:
        echo: called with each line of output.

    Raises:
        InstallError: a tool is missing, or a step failed.
    """
    toolchain, missing = find_toolchain(python)
    if toolchain is None:
        raise InstallError("Horovod cannot be built here:\n" + "\n".join(f"  {thing}" for thing in missing))
    environment = {**child.python_environment(python), **OPTIONS}
    environment["PATH"] = os.pathsep.join([environment["PATH"], str(Path(toolchain.cmake).parent)])
    environment.setdefault("MAKEFLAGS", f"-j{os.cpu_count() or 1}")
    pip = [python, "-m", "pip"]
    needs = [f"import {module}" for module in ("setuptools", "wheel", "packaging")]
    if child.ask(python, "\n".join(needs) + "\nanswer = {}").error:
        raise InstallError(str(Missing("a tool of the build", versions.pip("setuptools", "wheel", "packaging"))))
    with tempfile.TemporaryDirectory(prefix="hvd_ext-horovod-") as name:
        folder = Path(name)
        # Without isolation, because its setup.py looks for TensorFlow in the interpreter that runs it.
        fetch = [*pip, "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", name]
        child.run_logged([*fetch, f"horovod=={versions.HOROVOD}"], log, environment=environment, echo=echo)
        tree = unpack(folder / f"horovod-{versions.HOROVOD}.tar.gz", folder)
        drop_xla_source(tree / "horovod" / "tensorflow" / "CMakeLists.txt")
        wheel = [*pip, "wheel", "-v", "--no-deps", "--no-build-isolation", "-w", name, "."]
        child.run_logged(wheel, log, cwd=tree, environment=environment, echo=echo)
        built = next(folder.glob("horovod-*.whl"))
        for options in (["--force-reinstall", "--no-deps"], []):  # Horovod itself, then its missing requirements
            child.run_logged([*pip, "install", *options, str(built)], log, environment=environment, echo=echo)
    answer = installed(python)
    if answer.error:
        raise InstallError(f"Horovod was built but cannot be imported: {answer.error}; the whole output: {log}")
