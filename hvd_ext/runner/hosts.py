"""The hosts of an elastic job with their slots: from a text, a file, or a script that is run again and again."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from hvd_ext.errors import InvalidError

# A discovery script that does not end in this time has failed.
SCRIPT_LIMIT_S = 30.0
LOCAL = "localhost"
_LINE = re.compile(r"(?P<name>[^\s:=]+|\[[^\s\]]+\])(\s*:\s*(?P<colon>\d+)|\s+slots\s*=\s*(?P<word>\d+))?")


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the list of hosts comes from.

    Args:
        fixed: slots by host, in order; unused with a script.
        script: the discovery script, or None.
        slots: the slots of a host whose line in the script's output has no number.
    """

    fixed: Mapping[str, int]
    script: str | None = None
    slots: int = 1

    async def hosts(self) -> dict[str, int]:
        """Return the slots by host, in order.

        Raises:
            InvalidError: the script fails, or prints something else than hosts.
        """
        if self.script is None:
            return dict(self.fixed)
        what = f"host-discovery-script ({self.script})"
        try:
            process = await asyncio.create_subprocess_exec(
                os.path.abspath(self.script),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise InvalidError(f"{what}: it cannot be started: {error.strerror}") from error
        try:
            printed, _ = await asyncio.wait_for(process.communicate(), SCRIPT_LIMIT_S)
        except asyncio.TimeoutError:
            raise InvalidError(f"{what}: it did not end within {SCRIPT_LIMIT_S:g} s") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        if process.returncode != 0:
            raise InvalidError(f"{what}: it ended with status {process.returncode}")
        return _hosts(what, printed.decode(errors="replace").splitlines(), self.slots)


def from_text(text: str) -> dict[str, int]:
    """Read hosts from a text as in "host1:4,host2:4"; a host without a number has one slot.

    Raises:
        InvalidError: the text is malformed.
    """
    found = _hosts(f"hosts ({text})", text.split(","), 1)
    if not found:
        raise InvalidError(f"hosts ({text}): must name at least one host, as in host1:4,host2:4")
    return found


def from_file(path: Path) -> dict[str, int]:
    """Read hosts from a file with a line "host1 slots=4" or "host1:4" for each; # begins a comment.

    Raises:
        InvalidError: the file cannot be read, has no host, or is malformed.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidError(f"hostfile ({path}): it cannot be read: {error.strerror}") from error
    found = _hosts(f"hostfile ({path})", lines, 1)
    if not found:
        raise InvalidError(f"hostfile ({path}): must name at least one host, as in host1 slots=4")
    return found


def is_local(host: str) -> bool:
    """Return whether a name stands for this machine, so that no remote shell is needed."""
    own = socket.gethostname()
    return host in (LOCAL, "127.0.0.1", "::1", own, own.partition(".")[0])


def _hosts(what: str, lines: list[str], slots: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in lines:
        words = line.partition("#")[0].strip()
        if not words:
            continue
        match = _LINE.fullmatch(words)
        number = int((match["colon"] or match["word"] or slots) if match else 0)
        # A name that begins with a dash would be an option of the remote shell.
        if match is None or number < 1 or match["name"].startswith("-"):
            raise InvalidError(f"{what}: a host must be as in host1:4, with at least 1 slot; got {words!r}")
        name = match["name"].strip("[]")
        found[name] = found.get(name, 0) + number
    return found
