"""What a job tells while it runs: one JSON object a line in a file, written by rank 0 and followed by the parent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def emit(path: Path | str | None, kind: str, **values: Any) -> None:
    """Append an event to a file.

    Args:
        path: the file; None tells nobody.
        kind: what happened, such as "epoch".
        values: what JSON can hold.
    """
    if path is not None:
        line = json.dumps({"kind": kind, **values}) + "\n"
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(line)


class Follower:
    """Reads the events of a file that is still being written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        """The events since the last call; a line that is not finished yet is left for the next one."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]
