"""How the commands look: options that take a value show what they take, those that take none show nothing; tables."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

TABLE_WIDTH = 150


class _Shown:
    """Typer shows <bool> behind a flag, which looks like a value that one has to give."""

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
    """A command, or a group of commands.

    Args:
        settings: those of `typer.Typer`.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=_Group, add_completion=False, pretty_exceptions_enable=False, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        """Register a function, as `typer.Typer.command` does.

        Args:
            name: of the command; the function's by default.
            settings: those of `typer.Typer.command`.

        Returns:
            The decorator.
        """
        return super().command(name, cls=_Command, **settings)


def table_console(rank: int | None = None) -> Console:
    """Return the console for tables: of a fixed width where nobody sees it.

    Args:
        rank: of this process in a launched job; None where no launcher has started it.

    Returns:
        It; where COLUMNS is set, that is its width.
    """
    # A launcher gives its ranks a terminal of their own, which is not the user's; a file or a pipe has no width, and a
    # table that is cut to 80 columns says nothing.
    seen = Console().is_terminal and rank is None
    return Console() if seen or os.environ.get("COLUMNS") else Console(width=TABLE_WIDTH, force_terminal=False)
