"""The look of the commands: only options that take a value show a placeholder, and tables have a sensible width."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

TABLE_WIDTH = 160


class _Shown:
    """Removes the <bool> that Typer shows after a flag, because it looks like a required value."""

    def get_params(self, context: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(context)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters


class _Command(_Shown, TyperCommand):
    pass


class _Group(_Shown, TyperGroup):
    pass


class App(typer.Typer):
    """A command, or a group of commands, with the arguments of `typer.Typer`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=_Group, add_completion=False, pretty_exceptions_enable=False, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        """Register a function, as `typer.Typer.command` does."""
        return super().command(name, cls=_Command, **settings)


def table_console() -> Console:
    """Return the console for tables: as wide as COLUMNS or the user's terminal, else TABLE_WIDTH."""
    from hvd_ext.runner.launcher import RANK_VARIABLES

    # A launcher gives its ranks a terminal that is not the user's, and a file or a pipe has no width. A table that is
    # cut to 80 columns would be useless.
    seen = Console().is_terminal and not any(name in os.environ for name in RANK_VARIABLES)
    return Console() if seen or os.environ.get("COLUMNS") else Console(width=TABLE_WIDTH, force_terminal=False)
