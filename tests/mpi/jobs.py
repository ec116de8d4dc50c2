"""Jobs of several ranks under a launcher, with a time limit; each rank writes to a file of its own.

Nothing here reads what ranks print to one stream together: their lines mix.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests import timing
from tests.mpi import fork_server

ROOT = Path(__file__).resolve().parents[2]
RANK = Path(__file__).resolve().parent / "rank.py"
SITE = Path(__file__).resolve().parent / "site"

# A loaded machine of two cores needs tens of seconds to import TensorFlow in eight processes.
LIMIT_S = 300
# What a launcher gets to end its ranks when the limit has passed.
GRACE_S = 15

# Oversubscribed ranks must not be pinned to one core, and a container may forbid the system call of single-copy.
MPIRUN = [
    "mpirun",
    "--oversubscribe",
    "--bind-to",
    "none",
    "--mca",
    "btl_vader_single_copy_mechanism",
    "none",
]
HORVODRUN = ["horovodrun", "--mpi", "--mpi-args=--oversubscribe --mca btl_vader_single_copy_mechanism none"]

NEEDS_HOROVOD = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None or shutil.which("horovodrun") is None,
    reason="needs Horovod: python -m hvd_ext install-horovod",
)

# Variables by which a launcher may be known: a test that itself runs under one must not hand them on.
_LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "MV2_", "SLURM_", "HOROVOD_", "HVD_EXT_")
_KEPT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
_running: list[subprocess.Popen[bytes]] = []


@dataclasses.dataclass(frozen=True)
class Job:
    """How a job ended.

    Attributes:
        code: the launcher's exit code.
        timed_out: the limit had passed.
        outputs: what each rank wrote to stdout and stderr, by rank; a rank that never started wrote "".
        launcher: what the launcher itself wrote.
    """

    code: int
    timed_out: bool
    outputs: tuple[str, ...]
    launcher: str

    def text(self) -> str:
        """Give everything, for the message of a failing test."""
        parts = [f"exit code {self.code}{', timed out' if self.timed_out else ''}", f"-- launcher\n{self.launcher}"]
        parts += [f"-- rank {rank}\n{output}" for rank, output in enumerate(self.outputs)]
        return "\n".join(parts)

    def must_succeed(self, line: str | None = None) -> Job:
        """Check that the job ended well and in time, and that each rank wrote this line."""
        assert not self.timed_out, self.text()
        assert self.code == 0, self.text()
        assert line is None or all(self.says(rank, line) for rank in range(len(self.outputs))), self.text()
        return self

    def must_fail(self) -> Job:
        """Check that the job ended by itself, with an exit code that says so."""
        assert not self.timed_out, self.text()
        assert self.code != 0, self.text()
        return self

    def says(self, rank: int, line: str) -> bool:
        """Tell whether a rank wrote this line."""
        return line in self.outputs[rank].splitlines()


def environment(folder: Path, changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """Give the environment of a job.

    Args:
        folder: the ranks' outputs are written there.
        changes: variables to set; None removes one.
    """
    values = {name: text for name, text in os.environ.items() if name in _KEPT or not name.startswith(_LAUNCHERS)}
    values["PYTHONPATH"] = os.pathsep.join([str(SITE), str(ROOT)])
    values["HVD_EXT_TEST_OUTPUT"] = str(folder)
    values["TF_CPP_MIN_LOG_LEVEL"] = "2"
    values["PYTHONUNBUFFERED"] = "1"
    values["HVD_EXT_PROBE"] = "off"
    if timing.FOLDER in os.environ:
        values |= {timing.FOLDER: os.environ[timing.FOLDER], timing.BEGUN: str(time.time())}
    for name, text in (changes or {}).items():
        if text is None:
            values.pop(name, None)
        else:
            values[name] = text
    return values


def forking(folder: Path) -> dict[str, str]:
    """Give the variables of a command whose ranks shall be forked (`fork_server`), on this or on rehearsed hosts.

    Ranks of a benchmark that are forked are not stopped while others are measured.

    Args:
        folder: see `environment`.
    """
    values = environment(folder)
    python = {name: text for name, text in values.items() if name.startswith("PYTHON")}
    return python | {fork_server.SOCKET: fork_server.begin(values)}


def run(
    folder: Path,
    program: str | Sequence[str],
    *,
    ranks: int = 2,
    launcher: Sequence[str] | None = None,
    changes: Mapping[str, str | None] | None = None,
    limit_s: float = LIMIT_S,
    forked: bool = True,
) -> Job:
    """Run a job to its end.

    Args:
        folder: an empty folder for its files.
        program: Python text that every rank runs, or the arguments of a Python interpreter.
        ranks: the number of ranks.
        launcher: the command before "-np N"; None for mpirun, an empty one for no launcher.
        changes: changes of the environment, see `environment`.
        limit_s: after so many seconds the job is ended and has timed out.
        forked: ranks are forked from a process that has imported TensorFlow (`fork_server`), where they can be. A test
            that looks at a rank's parent or at its environment in /proc needs False.

    Returns:
        How it ended.
    """
    values = environment(folder, changes)
    if isinstance(program, str):
        script = folder / "program.py"
        script.write_text(textwrap.dedent(program), encoding="utf-8")
        program = [str(script)]
    if forked:
        values[fork_server.SOCKET] = fork_server.begin(environment(folder))
    command = [sys.executable, str(RANK), *program]
    launcher = MPIRUN if launcher is None else launcher
    if launcher:
        hosts = ["-H", f"localhost:{ranks}"] if launcher[0] == "horovodrun" else []
        path = shutil.which(launcher[0]) or launcher[0]
        command = [path, *launcher[1:], "-np", str(ranks), *hosts, *command]
    log = folder / "launcher.txt"
    # Launchers that start at the same moment fail at times where they make their folder in one place (Open MPI 4.1).
    session = tempfile.TemporaryDirectory(prefix="mpi-", ignore_cleanup_errors=True)
    values["OMPI_MCA_orte_tmpdir_base"] = session.name
    with session, log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=values,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _running.append(process)
        timed_out = not _ended(process, limit_s)
        if timed_out:
            _end(process)
        _running.remove(process)
    return Job(process.returncode, timed_out, tuple(_read(folder / f"rank{r}.txt") for r in range(ranks)), _read(log))


def stop() -> None:
    """End what still runs."""
    for process in list(_running):
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    if not _ended(process, GRACE_S):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _ended(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
