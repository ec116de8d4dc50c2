"""What an elastic job is: its command, its hosts, and its limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from hvd_ext.errors import InvalidError
from hvd_ext.runner import hosts as host_lists


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a job is.

    Args:
        command: what each worker runs.
        source: the hosts.
        workers: with how many workers the job begins.
        least: with how many workers it continues.
        most: with how many workers it runs if there are slots.
        elastic_timeout_s: how long the job waits for `least` workers, and for a member that does not leave its world.
        start_timeout_s: how long the first world waits for all of its workers, and how long a worker takes to start.
        reset_limit: how many worlds may follow the first one; None for any number.
        cooldown_s: the shortest and longest time for which a host is not used after it has lost a worker.
        rsh: the remote shell; None for ssh.
        ssh_port: the remote shell's -p.
        ssh_identity_file: the remote shell's -i.
        interfaces: the network interfaces on which workers reach the supervisor and each other, each host those that it
            has; None for all.
        outputs: a folder for the output of each worker, in addition to stdout.
        verbose: say more.
    """

    command: Sequence[str]
    source: host_lists.Source
    workers: int
    least: int
    most: int
    elastic_timeout_s: float = 600.0
    start_timeout_s: float = 600.0
    reset_limit: int | None = None
    cooldown_s: tuple[float, float] | None = None
    rsh: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: Path | None = None
    interfaces: Sequence[str] | None = None
    outputs: Path | None = None
    verbose: bool = False

    def check(self) -> None:
        """Raise an InvalidError if the settings break a rule."""
        if not self.command:
            raise InvalidError("command: must say what each worker runs, behind --, as in -- python train.py")
        if not 1 <= self.least <= self.workers <= self.most:
            raise InvalidError(
                f"min-np ({self.least}), np ({self.workers}), max-np ({self.most}): must be at least 1 and ascend"
            )
        for name, seconds in (("elastic", self.elastic_timeout_s), ("start", self.start_timeout_s)):
            if not seconds > 0:
                raise InvalidError(f"{name}-timeout ({seconds:g}): must be above 0 s")
        if self.cooldown_s is not None and not 0 < self.cooldown_s[0] <= self.cooldown_s[1]:
            raise InvalidError(f"blacklist-cooldown-range {self.cooldown_s}: must be above 0 s and ascend")
        slots = sum(self.source.fixed.values())
        if self.source.script is None and slots < self.workers:
            raise InvalidError(
                f"np ({self.workers}): the hosts have {slots} slots; give them more, or start fewer workers"
            )
