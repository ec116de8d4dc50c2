"""What is left of a job when its ranks have ended and mpirun has not.

mpirun ends when the daemon of every host has reported. That of a host that was cut off never does: mpirun then waits
until TCP gives up what it has sent there, a quarter of an hour (tcp_retries2 in the kernel's ip-sysctl documentation).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

# Every process of a job carries this variable: mpirun, the hosts' daemons, the ranks and what they start.
MARK = "HVD_EXT_CLUSTER_JOB"
LOOK_S = 2.0
# mpirun takes a second or two for its end, more on a busy machine.
PATIENCE_S = 10.0
_RANK = b"\0OMPI_COMM_WORLD_RANK="


def members(mark: str) -> dict[int, bool]:
    """List the living processes of a job.

    Args:
        mark: the job's value of `MARK`.

    Returns:
        By number, whether it is a rank, or was started by one.
    """
    word, found = f"\0{MARK}={mark}\0".encode(), {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = b"\0" + (folder / "environ").read_bytes()
        except OSError:
            continue  # it has ended, or is another user's
        if word in environ:
            found[int(folder.name)] = _RANK in environ
    return found


def end(mark: str) -> None:
    """End every process of a job at once.

    Args:
        mark: the job's value of `MARK`.
    """
    for number in members(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def lives(number: int) -> bool:
    """Whether a process is there, and more than an entry that its parent has not read yet.

    Args:
        number: of the process.
    """
    try:
        stat = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] not in "ZX"


class Watch:
    """Looks now and then whether a job still has ranks.

    Args:
        mark: the job's value of `MARK`.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._ranks: set[int] = set()
        self._seen_s: float | None = None

    def without_ranks(self) -> bool:
        """Whether the ranks have all been gone for `PATIENCE_S` seconds; false before the first one was seen."""
        now_s = time.monotonic()
        # A rank may become a program with another environment.
        self._ranks = {number for number in self._ranks if lives(number)}
        self._ranks |= {number for number, is_rank in members(self._mark).items() if is_rank}
        if self._ranks:
            self._seen_s = now_s
        return self._seen_s is not None and now_s - self._seen_s >= PATIENCE_S
