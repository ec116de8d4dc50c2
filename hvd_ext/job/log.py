"""What the package says: the logger `hvd_ext`, with the rank in front, and lines that stay whole."""

from __future__ import annotations

import contextlib
import logging
import os
import sys

logger = logging.getLogger("hvd_ext")

_rank = {"words": ""}  # "[rank 1] " in a job of several


def set_rank(rank: int, size: int) -> None:
    """Say from now on which rank speaks, where there are several.

    Args:
        rank: this process's.
        size: their number.
    """
    _rank["words"] = f"[rank {rank}] " if size > 1 else ""


def several() -> bool:
    """Whether this process is one of several ranks."""
    return bool(_rank["words"])


def line(text: str) -> str:
    """Give a line as the engine writes it too, "hvd_ext: [rank 1] ...".

    Args:
        text: what is to be said.
    """
    return f"hvd_ext: {_rank['words']}{text}\n"


def write(text: str) -> None:
    """Write to stderr at once: what other ranks write to the same terminal does not come between.

    Args:
        text: whole lines.
    """
    if sys.stderr is None:
        return
    with contextlib.suppress(OSError, ValueError):  # it is closed; nobody would hear of that either
        sys.stderr.flush()
        try:
            number = sys.stderr.fileno()
        except (AttributeError, OSError):  # of a notebook, or of a test
            sys.stderr.write(text)
            sys.stderr.flush()
            return
        os.write(number, text.encode(errors="replace"))


class _RankInFront(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = f"{_rank['words']}{record.msg}"
        return True


class _OwnLines(logging.Handler):
    """Writes where the program has no handler of its own for all loggers, which gets the records as well."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            write(f"hvd_ext: {record.getMessage()}\n")


def _begin() -> None:
    if not any(isinstance(handler, _OwnLines) for handler in logger.handlers):
        logger.addFilter(_RankInFront())
        logger.addHandler(_OwnLines())


_begin()
