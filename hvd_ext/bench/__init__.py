"""Measurements: jobs of several ranks, what they tell while they run, and `python -m hvd_ext bench`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_ext.bench.cli import app

__all__ = ["app"]


def __getattr__(name: str) -> Any:
    # The ranks of a job import this package too and need no command line.
    if name == "app":
        from hvd_ext.bench.cli import app

        return app
    raise AttributeError(f"module 'hvd_ext.bench' has no attribute {name!r}")
