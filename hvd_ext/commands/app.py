"""The look of the commands: only options that take a value show a placeholder, and tables have a sensible width."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

from hvd_ext.errors import HvdExtError, InvalidError

TABLE_WIDTH = 160
TopologyFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="the cluster with its links, a YAML file (docs/topology.md)")
]
Hosts = Annotated[str | None, typer.Option(metavar="N,N,...", help="the cluster as ranks per host, such as 4,4,3")]


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


def figures_table(title: str, headings: Iterable[str], left: Collection[str]) -> Table:
    """Make a table without rows; its columns are as wide as needed, and aligned to the right unless `left` has them."""
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    return table


def say(console: Console, lines: Iterable[str], style: str | None = None) -> None:
    """Print lines as they are, without markup and without breaks."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True, style=style)


@contextmanager
def ended_in_words(what: str, kinds: type[Exception] = HvdExtError) -> Iterator[None]:
    """Turn errors of some kinds into a line that begins with the command `what`, and into status 1."""
    try:
        yield
    except kinds as error:
        say(Console(stderr=True), [f"{what}: {error}"])
        raise typer.Exit(1) from error


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Turn a failure to write the file `what` into an InvalidError."""
    try:
        yield
    except OSError as error:
        raise InvalidError(f"{what}: it cannot be written: {error.strerror or error}") from error
