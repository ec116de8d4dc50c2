"""What the process that calls `run` and its ranks hand to each other: files in one folder."""

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
        value: what it returned, pickled; None where it raised.
        error: the exception in one line, such as "ValueError: no"; "" where it returned.
        traceback: the exception's, as text.
        exception: itself, pickled; None where it does not pickle.
        consequence: it says that another rank is gone: that one has more to say.
        at_s: when, in seconds of the clock that all processes of a machine share.
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
        folder: of what is handed over; on all hosts.
        outputs: of what the ranks print.
    """

    def __init__(self, folder: Path, outputs: Path) -> None:
        self.folder = folder
        self.outputs = outputs
        self.launcher = folder / "mpirun.txt"

    def output(self, rank: int) -> Path:
        """Name the file that has what a rank printed."""
        return self.outputs / f"rank.{rank}.txt"

    def write_job(self, function: bytes) -> None:
        """Hand the function over, with where this process finds its modules and with the text of notebook cells."""
        about = {"path": [os.path.abspath(entry) for entry in sys.path], "cells": _cells()}
        (self.folder / "job.json").write_text(json.dumps(about), encoding="utf-8")
        (self.folder / "function").write_bytes(function)

    def read_job(self) -> bytes:
        """Take the function on a rank, where its modules are found from then on."""
        about = json.loads((self.folder / "job.json").read_text(encoding="utf-8"))
        sys.path += [entry for entry in about["path"] if entry not in sys.path]
        for name, lines in about["cells"].items():  # None: the text is not looked for on the disk
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
        return (self.folder / "function").read_bytes()

    def write_outcome(self, rank: int, outcome: Outcome) -> None:
        """Hand over how the function ended, whole or not at all."""
        path = self.folder / f"outcome.{rank}"
        part = path.with_name(f"{path.name}.part")
        part.write_bytes(pickle.dumps(outcome))
        part.replace(path)

    def outcome(self, rank: int) -> Outcome | None:
        """Take how the function ended on a rank; None where the rank did not live to say so."""
        try:
            outcome = pickle.loads((self.folder / f"outcome.{rank}").read_bytes())
        except FileNotFoundError:
            return None
        assert isinstance(outcome, Outcome)
        return outcome


class Shown:
    """What a growing file gets, for a terminal or a notebook, bars that are drawn over included.

    Args:
        path: the file; it need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def more(self, stream: TextIO) -> None:
        """Write what has come since the last call.

        Args:
            stream: takes it.
        """
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

    Args:
        func: the function.
        args: its arguments.
        kwargs: its keyword arguments.

    Returns:
        What gives the three back.

    Raises:
        InvalidError: it is no function, the arguments are none, or something does not pickle.
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
    """Give the text of what was typed in, which is no file: with it a rank's traceback shows the lines."""
    entries = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4}
    return {name: list(entry[2]) for name, entry in entries.items() if not os.path.exists(name)}
