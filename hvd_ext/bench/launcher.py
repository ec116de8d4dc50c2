"""How a benchmark starts its jobs: mpirun on this host, or a command line that reaches all ranks of a cluster."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvd_ext.errors import InvalidError
from hvd_ext.runner.launcher import RANK_VARIABLES, mpirun

VARIABLE = "HVD_EXT_LAUNCHER"
REHEARSAL = "hvd_ext.cluster.launch"


@dataclass(frozen=True)
class Launcher:
    """Starts a command on all ranks.

    Args:
        line: a shell command line to which the command is appended; empty for mpirun on this host.
    """

    line: str = ""

    def __post_init__(self) -> None:
        try:
            words = shlex.split(self.line)
        except ValueError as error:
            raise InvalidError(
                f"launcher ({self.line!r}): it must be a command line as a shell reads it: {error}"
            ) from error
        if self.line and not words:
            raise InvalidError("launcher (blank): it must be a command line that starts a command on all ranks")

    def command(self, ranks: int | None, command: Sequence[str]) -> list[str]:
        """Give the whole command of a job.

        Args:
            ranks: number of ranks on this host; a launcher's line has its own.
            command: what each rank runs.

        Returns:
            The command.

        Raises:
            JobError: there is no mpirun.
        """
        if self.line:
            return [*shlex.split(self.line), *command]
        assert ranks is not None
        return mpirun(ranks, command)

    def describe(self) -> str:
        """The line for a report; this interpreter is called python, and a rehearsal's temporary files are left out."""
        if REHEARSAL in shlex.split(self.line):
            return f"python -m {REHEARSAL}"
        words = ["python" if word == sys.executable else word for word in shlex.split(self.line)]
        return shlex.join(words) if words else "mpirun on this host"


def place(environ: Mapping[str, str]) -> int | None:
    """Say which rank of a launched job this process is.

    Args:
        environ: the environment.

    Returns:
        The rank; None where no launcher has started this process.
    """
    for name in RANK_VARIABLES:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return None


def choose(option: str | None, environ: Mapping[str, str]) -> Launcher:
    """Find out how to start jobs.

    Args:
        option: what the user has said; None for the environment's `HVD_EXT_LAUNCHER`.
        environ: the environment.

    Returns:
        The launcher.

    Raises:
        InvalidError: the line cannot be read, or this process is one rank of a job and does not know how to start
            another one on the same ranks.
    """
    line = environ.get(VARIABLE, "") if option is None else option
    if not line and place(environ) is not None:
        raise InvalidError(
            "launcher (none): the benchmark was started as a rank of a job, but starts jobs of its own: start it "
            "without mpirun and say --launcher 'mpirun ...', or under python -m hvd_ext cluster run"
        )
    return Launcher(line)
