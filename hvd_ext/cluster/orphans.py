"""Finds and ends what is left of a job whose ranks have ended while mpirun has not.

mpirun ends when the daemon of every host has reported. The daemon of a host that was cut off never does, so mpirun
waits until TCP gives up retransmitting, a quarter of an hour (tcp_retries2 in the kernel's ip-sysctl documentation).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

# Every process of a job has this variable: mpirun, the hosts' daemons, the ranks and what they start.
MARK = "HVD_EXT_CLUSTER_JOB"
LOOK_S = 2.0
# mpirun takes a second or two to end, and longer on a busy machine.
PATIENCE_S = 10.0
_RANK = b"\0OMPI_COMM_WORLD_RANK="


def members(mark: str) -> dict[int, bool]:
    """List the living processes of a job: for each number, whether it is a rank or was started by one."""
    word, processes = f"\0{MARK}={mark}\0".encode(), {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = b"\0" + (folder / "environ").read_bytes()
        except OSError:
            continue  # it has ended, or belongs to another user
        if word in environ:
            processes[int(folder.name)] = _RANK in environ
    return processes


def end(mark: str) -> None:
    """End every process of a job at once."""
    for number in members(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def lives(number: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] not in "ZX"


class Watch:
    """Watches whether a job still has ranks."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._ranks: set[int] = set()
        self._seen_s: float | None = None

    def without_ranks(self) -> bool:
        """Return whether all ranks have been gone for `PATIENCE_S` seconds; false before any rank was seen."""
        now_s = time.monotonic()
        # A rank may exec a program with another environment, so a known rank counts as long as it lives.
        self._ranks = {number for number in self._ranks if lives(number)}
        self._ranks |= {number for number, is_rank in members(self._mark).items() if is_rank}
        if self._ranks:
            self._seen_s = now_s
        return self._seen_s is not None and now_s - self._seen_s >= PATIENCE_S
