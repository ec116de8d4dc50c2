"""The files in which the process that calls `run` and its ranks hand over the function and its results."""

from __future__ import annotations

import codecs
import dataclasses
import json
import linecache
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from hvd_ext.errors import InvalidError


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How the function ended on a rank.

    Args:
        value: the pickled result; None if the function raised.
        error: the exception in one line, such as "ValueError: no"; "" if the function returned.
        exception: the pickled exception; None if it does not pickle.
        consequence: whether the exception only says that another rank is gone, whose own error matters more.
        at_s: the time of the exception, in seconds since the epoch.
    """

    value: bytes | None = None
    error: str = ""
    traceback: str = ""
    exception: bytes | None = None
    consequence: bool = False
    at_s: float = 0.0


class Files:
    """The files of one job.

    Args:
        folder: the folder for the function and the results, which all hosts share.
        outputs: the folder for the ranks' output.
    """

    def __init__(self, folder: Path, outputs: Path) -> None:
        self.folder = folder
        self.outputs = outputs
        self.launcher = folder / "mpirun.txt"

    def output(self, rank: int) -> Path:
        """Return the path of the file with a rank's output."""
        return self.outputs / f"rank.{rank}.txt"

    def write_job(self, function: bytes) -> None:
        """Write the pickled function, this process's module search path and the text of notebook cells."""
        about = {"path": [os.path.abspath(entry) for entry in sys.path], "cells": _cells()}
        (self.folder / "job.json").write_text(json.dumps(about), encoding="utf-8")
        (self.folder / "function").write_bytes(function)

    def read_job(self) -> bytes:
        """Read the pickled function on a rank, and extend the module search path so that its modules are found."""
        about = json.loads((self.folder / "job.json").read_text(encoding="utf-8"))
        sys.path += [entry for entry in about["path"] if entry not in sys.path]
        for name, lines in about["cells"].items():  # None: do not compare with a file on the disk
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
        return (self.folder / "function").read_bytes()

    def write_outcome(self, rank: int, outcome: Outcome) -> None:
        """Write how the function ended, atomically."""
        path = self.folder / f"outcome.{rank}"
        part = path.with_name(f"{path.name}.part")
        part.write_bytes(pickle.dumps(outcome))
        part.replace(path)

    def outcome(self, rank: int) -> Outcome | None:
        """Read how the function ended on a rank; None if the rank ended without writing it."""
        try:
            outcome = pickle.loads((self.folder / f"outcome.{rank}").read_bytes())
        except FileNotFoundError:
            return None
        assert isinstance(outcome, Outcome)
        return outcome


class Shown:
    """Copies a growing file to a terminal or a notebook, including progress bars that overwrite themselves.

    Args:
        path: the file, which need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def more(self, stream: TextIO) -> None:
        """Write what the file has gained since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                new = file.read()
        except FileNotFoundError:
            return
        if new:
            self._read += len(new)
            stream.write(self._decoder.decode(new))
            stream.flush()


def pickled(func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Pickle a function and its arguments.

    Raises:
        InvalidError: `func` is not callable, the arguments have a wrong type, or something does not pickle.
    """
    import cloudpickle

    if not callable(func):
        raise InvalidError(f"run: func ({func!r}): must be a function that each rank calls")
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise InvalidError(f"run: args ({args!r}): must be a tuple or a list of the function's arguments")
    if not isinstance(kwargs, Mapping):
        raise InvalidError(f"run: kwargs ({kwargs!r}): must be a dictionary of the function's keyword arguments")
    try:
        return bytes(cloudpickle.dumps((func, tuple(args), dict(kwargs))))
    except Exception as error:
        name = getattr(func, "__name__", repr(func))
        raise InvalidError(
            f"run: func ({name}): it, its arguments and the names that it uses must pickle: {error}; make what does "
            "not (an open file, a lock, a dataset) inside of the function"
        ) from error


def _cells() -> dict[str, list[str]]:
    """Return the source lines of notebook cells, which are in no file, so that a rank's traceback can show them."""
    entries = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4}
    return {name: list(entry[2]) for name, entry in entries.items() if not os.path.exists(name)}
