"""Finds and ends what is left of a job whose ranks have ended while mpirun has not.

mpirun ends when the daemon of every host has reported. The daemon of a host that was cut off never does, so mpirun
waits until TCP gives up retransmitting, a quarter of an hour (tcp_retries2 in the kernel's ip-sysctl documentation).
"""

from __future__ import annotations

import contextlib
import time

import psutil

from hvd_ext.runner import launcher

# Every process of a job has this variable: mpirun, the hosts' daemons, the ranks and what they start.
MARK = "HVD_EXT_CLUSTER_JOB"
LOOK_S = 2.0
# mpirun takes a second or two to end, and longer on a busy machine.
PATIENCE_S = 10.0


def end(mark: str) -> None:
    """End every process of a job at once."""
    for process in launcher.marked(MARK, mark):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


class Watch:
    """Watches whether a job still has ranks."""

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
