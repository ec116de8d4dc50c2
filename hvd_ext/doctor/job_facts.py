"""What a rank of a job reports to the doctor before MPI starts: facts from the environment and the machine."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import ipaddress
import os
import platform
import re
import resource
import socket
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

import hvd_ext
from hvd_ext.build import child
from hvd_ext.doctor import checks
from hvd_ext.engine import gpus, libraries
from hvd_ext.job import launch
from hvd_ext.options import environment

RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID", "HOROVOD_RANK")
# prefix of the names of launchers and their daemons -> the program beside them that can print its version
LAUNCHERS = {
    "mpirun": "mpirun",
    "orterun": "mpirun",  # Open MPI's mpirun may be a link to it
    "orted": "mpirun",
    "prterun": "prterun",
    "prted": "prterun",
    "mpiexec": "mpiexec",
    "hydra_pmi_proxy": "mpiexec",
    "srun": "srun",
    "slurmstepd": "srun",
}
OF_LAUNCHERS = ("OMPI_COMM", "OMPI_MCA", "PMIX_", "PMI_", "SLURM_")
TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly", "tf-nightly-cpu", "tensorflow-rocm")
MPI_LIBRARY = re.compile(r"/lib(?:p?mpi|mpich|mpi_cxx|mpicxx)(?:-\w+)?\.so[.\d]*$")
CHOICE = "OMPI_MCA_btl_tcp_if"
# libmpi.so.40 belongs to Open MPI, libmpi.so.12 to MPICH and to the MPIs that share its ABI.
NEEDED = re.compile(rb"\0(libmpi(?:ch)?(?:-\w+)?\.so\.\d+)\0")


@dataclasses.dataclass
class Facts:
    """The report of one rank; JSON can hold all of it.

    Attributes:
        rank: the rank's number according to the launcher, or None.
        place: its place on the host according to the launcher, or None.
        launcher: the launcher in words, and the variable that revealed it.
        refused: why `init` refuses the launcher; empty if it does not.
        size: the number of ranks according to the launcher, or None.
        mpirun: the program that started the rank, with its version; empty if none of the ancestors is a launcher.
        python: the version and path of the interpreter.
        hvd_ext: the version and folder of the package, and the digest of the sources its library was built from.
        tensorflow: the version and folder of the installed TensorFlow.
        horovod: the version of Horovod, or empty if it is not installed.
        networks: pairs (interface, address with prefix) of interfaces that are up and lead out of the host.
        tcp: Open MPI's choice of interfaces, as in {"btl_tcp_if_include": "eth0"}.
        cores: the number of processors that the rank may use, and the number that the host has.
        shm: the free bytes and the size of /dev/shm, or empty.
        memlock: how many bytes may be locked, -1 without a limit, or None if no fabric needs locked memory.
        visible: CUDA_VISIBLE_DEVICES, or None.
        gpus: the number of GPUs that TensorFlow lists; None if this rank did not look.
        variables: Horovod's variables without an effect, as pairs (NAME=text, why).
        heeded: Horovod's variables with an effect.
        peers: the MPI libraries of mpi4py and Horovod, as in {"mpi4py": "libmpi.so.40"}.
        findings: the checks of the host (part, state, seen, mend), which one rank of each host makes.
    """

    rank: int | None
    place: int | None
    host: str
    launcher: str
    refused: str
    size: int | None
    mpirun: str = ""
    python: str = ""
    hvd_ext: str = ""
    tensorflow: str = ""
    keras: str = ""
    horovod: str = ""
    networks: list[list[str]] = dataclasses.field(default_factory=list)
    tcp: dict[str, str] = dataclasses.field(default_factory=dict)
    cores: list[int] = dataclasses.field(default_factory=list)
    shm: list[int] = dataclasses.field(default_factory=list)
    memlock: int | None = None
    visible: str | None = None
    gpus: int | None = None
    variables: list[list[str]] = dataclasses.field(default_factory=list)
    heeded: list[str] = dataclasses.field(default_factory=list)
    peers: dict[str, str] = dataclasses.field(default_factory=dict)
    findings: list[dict[str, str]] = dataclasses.field(default_factory=list)


def of_launcher(environ: Mapping[str, str]) -> Facts:
    """Report what the launcher has told this rank, from the environment alone; most facts are still empty."""
    refused, by, size = "", "", None
    try:
        seen = launch.examine(environ)
        by, size = seen.by, seen.size
    except ValueError as error:
        refused = str(error)
        by = "horovodrun"
    return Facts(_number(environ, RANKS), gpus.place_on_host(environ), platform.node(), by, refused, size)


def collect(environ: Mapping[str, str], *, of_host: bool) -> Facts:
    """Report all facts of this rank; with `of_host` also its host is checked, which imports TensorFlow in a child."""
    facts = of_launcher(environ)
    facts.mpirun = started_by([_program(process) for process in psutil.Process().parents()])
    facts.python = f"{platform.python_version()} at {sys.executable}"
    built_of = libraries.read_record().get("sources", "")[:12]
    facts.hvd_ext = f"{hvd_ext.__version__} at {libraries.PACKAGE}, built of {built_of}"
    facts.tensorflow, facts.keras, facts.horovod = _tensorflow(), _version("keras"), _version("horovod")
    facts.networks = networks(
        psutil.net_if_addrs(), {name for name, state in psutil.net_if_stats().items() if state.isup}
    )
    facts.tcp = {name.removeprefix("OMPI_MCA_"): text for name, text in environ.items() if name.startswith(CHOICE)}
    facts.cores = [len(os.sched_getaffinity(0)), os.cpu_count() or 1]
    if Path("/dev/shm").is_dir():
        space = os.statvfs("/dev/shm")
        facts.shm = [space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize]
    if any(Path("/sys/class/infiniband").glob("*")):
        facts.memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    facts.visible = environ.get("CUDA_VISIBLE_DEVICES")
    facts.variables = [list(pair) for pair in environment.unheeded(environ)]
    facts.heeded = environment.heeded(environ)
    if of_host:
        facts.peers = _peers()
        findings = [check() for check in (checks.python, checks.tensorflow, checks.keras, checks.native_library)]
        findings.append(checks.native_match())
        facts.findings = [{**dataclasses.asdict(finding), "state": finding.state.value} for finding in findings]
        facts.gpus = checks.tensorflow_answer().values.get("gpus")
    return facts


def networks(addresses: Mapping[str, Iterable[Any]], up: Iterable[str]) -> list[list[str]]:
    """List the networks that lead out of a host, from the answers of psutil.

    Returns:
        Pairs (interface, "address/prefix"), without the loopback and without addresses that hold on one link alone.
    """
    listed = []
    for name, entries in sorted(addresses.items()):
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6) or name not in up or not entry.netmask:
                continue
            prefix = int(ipaddress.ip_address(entry.netmask)).bit_count()
            address = ipaddress.ip_interface(f"{entry.address.partition('%')[0]}/{prefix}")
            if not address.is_loopback and not (address.version == 6 and address.is_link_local):
                listed.append([name, str(address)])
    return listed


def started_by(programs: Iterable[str]) -> str:
    """Find the launcher among the programs of a rank's ancestors, the nearest first: its version and path, or ""."""
    starter = ""
    for program in programs:  # the outermost launcher counts: mpiexec, not its proxy
        path = Path(program)
        for begin, name in LAUNCHERS.items():
            if path.name.startswith(begin):
                beside = path.with_name(name)
                starter = str(beside) if beside.exists() else name
    if not starter:
        return ""
    # A launcher that runs inside of its own job must not take itself for a rank of that job.
    clean = {name: text for name, text in os.environ.items() if not name.startswith(OF_LAUNCHERS)}
    said = child.version_line([starter, "--version"], clean, timeout_s=20)
    return f"{checks.flavour(said) or said or 'of unknown version'}: {starter}"


def mapped(maps: str) -> list[str]:
    """List the paths of the MPI libraries in the text of a /proc/PID/maps, each once."""
    paths = (line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6)
    return sorted({path for path in paths if MPI_LIBRARY.search(path)})


def family(soname: str) -> str:
    """Return the MPI to which a library belongs, by its version number: "Open MPI", "MPICH", or empty."""
    match = re.search(r"\.so\.(\d+)", soname)
    return {"40": "Open MPI", "20": "Open MPI", "12": "MPICH"}.get(match[1] if match else "", "")


def _peers() -> dict[str, str]:
    peers = {}
    answer = child.ask(sys.executable, checks.MPI4PY)
    if not answer.error:
        peers["mpi4py"] = checks.flavour(str(answer.values["mpi"]))
    spec = importlib.util.find_spec("horovod")
    folders = spec.submodule_search_locations or [] if spec is not None else []
    for library in (path for folder in folders for path in Path(folder, "tensorflow").glob("mpi_lib*.so")):
        needed = NEEDED.search(library.read_bytes())
        if needed:
            peers["Horovod"] = needed[1].decode()
    return peers


def _tensorflow() -> str:
    for name in TENSORFLOWS:
        version = _version(name)
        if version:
            spec = importlib.util.find_spec("tensorflow")
            folder = Path(spec.origin).parent if spec is not None and spec.origin else "an unknown place"
            return f"{version} at {folder}"
    return ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _program(process: psutil.Process) -> str:
    try:
        return process.exe() or process.name()
    except psutil.Error:
        return ""


def _number(environ: Mapping[str, str], names: Iterable[str]) -> int | None:
    return next((int(environ[name]) for name in names if environ.get(name, "").isdigit()), None)
