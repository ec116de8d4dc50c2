"""Starts a job of several ranks, waits for its end, and makes sure that none of its processes stays behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from hvd_ext.errors import HvdExtError

# Every process of a job has this variable, so that all of them can be found even after their parents have ended.
MARK = "HVD_EXT_JOB"
# A launcher sets one of these for its ranks, but not for itself and its daemons.
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
# A launcher sets these variables for its ranks. A job that a rank starts must not inherit them.
_OF_A_LAUNCH = re.compile(r"(OMPI|PMIX|PMI)_(?!ALLOW_)")
TERMINATE_S = 3.0
KILL_S = 5.0
POLL_S = 0.1
TAIL_LINES = 40
# TensorFlow and Open MPI print these lines in healthy jobs too, where they hide the lines that matter.
_NOISE = re.compile(r"absl::InitializeLog|oneDNN|cpu_feature_guard|rebuild TensorFlow|^\s*$|cuda_|computation_placer")

# Loaded before any fork, because little is safe between fork and exec.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


class JobError(HvdExtError):
    """A job could not be started, failed, or took too long; the message has the last lines of its output."""


def job_environment(**extra: str) -> dict[str, str]:
    """Return the environment of a job's processes.

    Returns:
        This process's environment, without a launcher's variables if this process is a rank itself. PATH begins with
        this interpreter's folder, and the defaults let ranks share cores.
    """
    folder = str(Path(sys.executable).parent)
    entries = [entry for entry in os.environ.get("PATH", os.defpath).split(os.pathsep) if entry != folder]
    environment = {**os.environ, "PATH": os.pathsep.join([folder, *entries])}
    if any(name in environment for name in RANK_VARIABLES):
        environment = {name: value for name, value in environment.items() if not _OF_A_LAUNCH.match(name)}
    # If there are more ranks than cores, a waiting rank must let the others run, whether MPI, Horovod or we wait.
    defaults = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "2",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "PYTHONUNBUFFERED": "1",
    }
    for name, value in defaults.items():
        environment.setdefault(name, value)
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        # Open MPI does not run as root unless these are set, and a container often has no other user.
        environment.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    return {**environment, **extra}


def find(program: str) -> str | None:
    """Find a program beside this interpreter or on PATH; None if there is none."""
    return shutil.which(program, path=job_environment()["PATH"])


def find_mpirun() -> str:
    """Find mpirun beside this interpreter or on PATH.

    Raises:
        JobError: there is none.
    """
    program = find("mpirun")
    if program is None:
        raise JobError("mpirun: it is neither beside this Python nor on PATH; python -m hvd_ext doctor says what to do")
    return program


def mpirun(ranks: int, command: Sequence[str]) -> list[str]:
    """Return the command that starts ranks on this host with Open MPI.

    Args:
        ranks: the number of ranks; it may be larger than the number of cores.

    Raises:
        JobError: there is no mpirun.
    """
    return [find_mpirun(), "-np", str(ranks), "--oversubscribe", "--bind-to", "none", *command]


def last_words(log: Path, lines: int = TAIL_LINES) -> str:
    """Return the last lines of a job's output, without lines that healthy jobs print too."""
    try:
        text = log.read_text(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join([line for line in text.splitlines() if not _NOISE.search(line)][-lines:])


class Job:
    """A running job; leaving its `with` block stops all of its processes."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        """Start a job.

        Args:
            command: the launcher and its arguments.
            log: the file for the output of all ranks.
            environment: the complete environment of the job; `job_environment()` by default.

        Raises:
            JobError: the command cannot be run.
        """
        self.log = log
        self._mark = uuid.uuid4().hex
        marked = {**(environment or job_environment()), MARK: self._mark}
        with log.open("ab") as output:
            try:
                # In a session of its own, so that Ctrl-C reaches only the parent, which then stops the job in order.
                self._process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=marked,
                    start_new_session=True,
                    preexec_fn=end_with_parent,
                )
            except OSError as error:
                raise JobError(f"job ({command[0]}): it cannot be started: {error.strerror}") from error
        self._command = " ".join(str(part) for part in command)

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def status(self) -> int | None:
        """Return the launcher's exit status; None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float, tick: Callable[[], None] = lambda: None) -> None:
        """Wait for the job to succeed.

        Args:
            tick: called about ten times a second.

        Raises:
            JobError: the job fails or does not end in time; the message has the last lines of its output.
        """
        end = time.monotonic() + timeout_s
        while self.status() is None:
            if time.monotonic() > end:
                self.stop()
                raise JobError(f"job did not end within {timeout_s:g} s: {self._command}\n{last_words(self.log)}")
            tick()
            time.sleep(POLL_S)
        tick()
        if self.status() != 0:
            raise JobError(f"job failed with status {self.status()}: {self._command}\n{last_words(self.log)}")

    def ranks(self) -> list[psutil.Process]:
        """Return the job's ranks on this machine, without the launcher and its daemons."""
        living = marked(MARK, self._mark).items()
        return [process for process, variables in living if any(name in variables for name in RANK_VARIABLES)]

    def stop(self) -> None:
        """Stop the job: signal the launcher first, then kill what is left. Ctrl-C is ignored meanwhile."""
        with _deaf_to_interrupts():
            self._stop()

    def _stop(self) -> None:
        # A paused process handles no signal but SIGKILL.
        for process in self.processes():
            _signal(process, signal.SIGCONT)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            _until(lambda: self._process.poll() is not None and not self.processes(), TERMINATE_S)

        def killed() -> bool:
            left = self.processes()
            for process in left:
                _signal(process, signal.SIGKILL)
            return not left

        _until(killed, KILL_S)
        self._process.wait()

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the job that are still alive."""
        return list(marked(MARK, self._mark))


def marked(name: str, *values: str) -> dict[psutil.Process, dict[str, str]]:
    """Find the living processes whose environment has a variable with one of these values.

    Returns:
        The environment of each process.
    """
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it has ended, or belongs to another user
            variables = process.environ()
            if variables.get(name) in values and lives(process):
                found[process] = variables
    return found


def lives(process: psutil.Process) -> bool:
    """Return whether a process exists and is not a zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    # psutil's suspend, resume and kill send the same signals.
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Make the kernel signal this process when its parent dies, however it dies; safe between fork and exec.

    To the kernel, the parent is the thread that started this process. That thread must live as long as the job.

    Args:
        number: the signal's number.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C in the `with` block, so that a second one cannot leave half of a job behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        # None stands for a handler that was not set by Python, and that Python cannot restore.
        signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)


def _until(done: Callable[[], bool], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not done() and time.monotonic() < end:
        time.sleep(POLL_S / 2)
