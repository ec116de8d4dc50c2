"""The package's messages: the logger `hvd_ext`, with the rank in front of each line, and lines that stay whole."""

from __future__ import annotations

import contextlib
import logging
import os
import sys

logger = logging.getLogger("hvd_ext")

_rank = {"words": ""}  # "[rank 1] " in a job of several ranks


def set_rank(rank: int, size: int) -> None:
    """Put the rank in front of every line from now on, if the job has several ranks."""
    _rank["words"] = f"[rank {rank}] " if size > 1 else ""


def several() -> bool:
    """Whether this process is one of several ranks."""
    return bool(_rank["words"])


def line(text: str) -> str:
    """Return a line in the form that the engine uses too, "hvd_ext: [rank 1] ..."."""
    return f"hvd_ext: {_rank['words']}{text}\n"


def write(text: str) -> None:
    """Write to stderr in one piece, so that nothing that other ranks write to the same terminal comes in between."""
    if sys.stderr is None:
        return
    with contextlib.suppress(OSError, ValueError):  # stderr is closed, so there is no place for a message
        sys.stderr.flush()
        try:
            number = sys.stderr.fileno()
        except (AttributeError, OSError):  # the stderr of a notebook or of a test has no descriptor
            sys.stderr.write(text)
            sys.stderr.flush()
            return
        os.write(number, text.encode(errors="replace"))


class _RankInFront(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = f"{_rank['words']}{record.msg}"
        return True


class _OwnLines(logging.Handler):
    """Writes records to stderr unless the program's root logger has a handler, which gets them as well."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            write(f"hvd_ext: {record.getMessage()}\n")


def _begin() -> None:
    if not any(isinstance(handler, _OwnLines) for handler in logger.handlers):
        logger.addFilter(_RankInFront())
        logger.addHandler(_OwnLines())


_begin()
