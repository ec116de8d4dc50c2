"""The state of a running rehearsal, in a file for processes that start jobs in it, and the way into its namespaces."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from hvd_ext.cluster.tools import tool
from hvd_ext.errors import InvalidError


@dataclasses.dataclass(frozen=True)
class State:
    """A running rehearsal, for processes that start jobs in it.

    Args:
        pid: the number of its first process, outside of its PID namespace.
        namespaces: the names of its PID and user namespaces, by kind.
        folder: the folder with the agent, the session folder and the topology.
        ranks: the number of ranks on each host, in order.
        holders: the number of a process on each host, inside of the PID namespace.
        mca: parameters for Open MPI, in addition to those of every rehearsal.
        environment: Open MPI's variables that the user had set.
    """

    pid: int
    namespaces: dict[str, str]
    folder: str
    ranks: dict[str, int]
    holders: dict[str, int]
    mca: dict[str, str]
    environment: dict[str, str]

    @property
    def path(self) -> Path:
        """The file that holds the state."""
        return Path(self.folder) / "state.json"

    def write(self) -> None:
        """Write the state to its file."""
        self.path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")


def read(path: str | Path) -> State:
    """Read the state of a rehearsal.

    Raises:
        InvalidError: the rehearsal does not exist, or has ended.
    """
    try:
        return State(**json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InvalidError(f"state file ({path}): must be that of a rehearsal that runs: {error}") from error


def namespaces(pid: int | str) -> dict[str, str]:
    """Return the names of the PID and user namespaces of a process by kind, as in {"pid": "pid:[4026531836]"}."""
    return {kind: os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("pid", "user")}


def enter(state: State, host: str | None = None) -> list[str]:
    """Return the words to put before a command that shall run on a host, or in the switch if there is no host."""
    here = namespaces("self")
    inside = here["pid"] == state.namespaces["pid"]
    nsenter = tool("nsenter") or "nsenter"
    flags = ["--mount", "--uts", "--ipc", "--net"]
    words = [nsenter, "--target", "1" if inside else str(state.pid), *flags]
    words += [] if inside else ["--pid"]
    words += [] if here["user"] == state.namespaces["user"] else ["--user", "--preserve-credentials"]
    if host is not None:
        words += ["--", nsenter, "--target", str(state.holders[host]), *flags]
    return [*words, "--"]
