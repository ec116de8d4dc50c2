"""A rank is one process: a child that has inherited a rank's MPI environment is recognised and refused.

Open MPI lets one process of each rank connect, and ends others with messages about itself, or waits for ever. A rank
therefore marks itself for its children (an environment variable, with every launcher) and for every other process
with the environment of the same rank (a file, where the launcher keeps a folder for the job: `startup_watch.py`). A
process between the launcher and the rank, such as a shell or numactl, calls no `init` and leaves no mark.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Mapping, MutableMapping

from hvd_ext.errors import InvalidError
from hvd_ext.job import log, runtime

MARK = "HVD_EXT_RANK_PROCESS"
# Together they tell a launch and a rank of it from all others. A launcher that a rank starts changes them.
_LAUNCH = (
    *("PMIX_NAMESPACE", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"),
    *("PMI_RANK", "PMI_SIZE", "PMI_FD", "PMI_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"),
    *("HVD_EXT_SUPERVISOR", "HVD_EXT_WORKER"),
)
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
_claimed = ""  # the mark of this process


def claim(environ: MutableMapping[str, str]) -> None:
    """Mark this process as the rank; `InvalidError` if another process, or its program before an exec, is the rank."""
    global _claimed
    launch = "/".join(environ.get(name, "") for name in _LAUNCH)
    process, _, marked = environ.get(MARK, "").partition(" ")
    if marked == launch and (environ[MARK] != _claimed or process != str(os.getpid())):
        raise refusal(rank_of(environ), process)
    _claimed = environ[MARK] = f"{os.getpid()} {launch}"


def rank_of(environ: Mapping[str, str]) -> str:
    """Return the number of the rank that a launcher has given, or "?"."""
    return next((environ[name] for name in _RANKS if name in environ), "?")


def refuse_fork(what: str) -> None:
    """Raise `InvalidError` if this process was forked from one in which hvd_ext runs."""
    job = runtime.current_or_none()
    if job is not None and job.process != os.getpid():
        raise InvalidError(
            f"{what}: process {os.getpid()} was forked from process {job.process}, rank {job.engine.rank}: only the "
            f"rank itself takes part in its job; a child may ask for rank() and size(), and must not call {what}()"
        )


def refusal(rank: str, other: str) -> InvalidError:
    """Return the error of a process with the MPI environment of a rank that another process is.

    In a worker of `multiprocessing.Pool` it also interrupts the rank: the pool would replace each worker that ends by
    another, with the same error, for ever.

    Args:
        other: the number of the process that is the rank.
    """
    pid = os.getpid()
    if other == str(pid):
        return InvalidError(
            f"init: process {pid} started MPI as rank {rank}, then replaced its program (exec), and MPI starts once in "
            "a process: call exec before init()"
        )
    text = (
        f"init: process {pid} has the MPI environment of rank {rank}, which is process {other}: a rank is one process"
    )
    current = multiprocessing.current_process()
    if not getattr(current, "_inheriting", False):  # multiprocessing does not import the main module now
        return InvalidError(
            f"{text}; do not call init() in a child of the rank, or in a program that follows another under the same "
            "launcher; a child that is to be a job of its own needs an environment without the launcher's variables "
            "(OMPI_*, PMIX_*, PMI_*), a program that follows needs an mpirun of its own"
        )
    text += '; multiprocessing imports the main module in each child: put init() below `if __name__ == "__main__":`'
    if "PoolWorker" in current.name and other.isdigit():
        text += f"; process {other} is interrupted, because its pool would replace this worker by another for ever"
        log.write(log.line(text))  # the pool ends this process at once
        with contextlib.suppress(OSError):
            os.kill(int(other), signal.SIGINT)
    return InvalidError(text)
