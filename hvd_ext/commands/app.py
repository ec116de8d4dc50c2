"""How the commands look: an option that takes a value shows what it takes, and one that takes none shows nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


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
