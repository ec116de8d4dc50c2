"""What the commands that measure share: options, what is read from them, the progress bar, what is shown, the end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hvd_ext.bench import results
from hvd_ext.bench.jobs import Launcher, Tell, choose, place
from hvd_ext.cluster.spec import rate_bits
from hvd_ext.commands import app
from hvd_ext.commands.app import say as say, table_console as table_console

LauncherLine = Annotated[
    str | None,
    typer.Option(
        metavar="COMMAND",
        help="Starts a command on all ranks: 'mpirun -np 8 -H a:4,b:4'. In a rehearsed cluster it is known.",
    ),
]
Repetitions = Annotated[int, typer.Option(metavar="N", help="The most samples of a row.")]
SecondsPerRow = Annotated[float, typer.Option(metavar="SECONDS", help="Long calls have fewer samples, at least 3.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all samples to this file.")]
Append = Annotated[bool, typer.Option("--append", help="Keep the rows that are in the file already.")]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw the rows, also those kept, into this PNG file.")
]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", help="Longest time without an answer of a job.")]


def ranks_option(default: str) -> Any:
    """Give the option --ranks for an annotation; `default` is what `launched` takes."""
    return typer.Option(
        metavar="N,N,...", help=f"Numbers of ranks on this host, with commas; {default} without a launcher."
    )


def rate_option(least: str) -> Any:
    """Give the option --rate for an annotation; `least` names the least time, which is computed from the rate."""
    return typer.Option(
        metavar="RATE", help=f"Of a host's link, each way, for the {least}: 100mbit. Else from the topology."
    )


def names(text: str) -> tuple[str, ...]:
    """Read words with commas between them."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(option: str, text: str, kind: type = int) -> tuple[Any, ...]:
    """Read the value of an option: numbers with commas between them, whole ones unless `kind` is float."""
    try:
        return tuple(kind(part) for part in names(text))
    except ValueError:
        words = "whole numbers" if kind is int else "numbers"
        raise typer.BadParameter(f"{text!r}: must be {words} with commas between them", param_hint=option) from None


def only_on_rank_0() -> None:
    """End a process that a launcher has started as another rank: rank 0 starts the jobs that measure."""
    if place(os.environ):
        raise typer.Exit


def launched(line: str | None, ranks: str | None, default: str) -> tuple[Launcher, tuple[int, ...]]:
    """Find out how to start jobs from --launcher and --ranks.

    Returns:
        What starts jobs, and the numbers of ranks of the jobs on this host; none where a launcher has its own.

    Raises:
        typer.BadParameter: both say how many ranks there are.
        InvalidError: see `jobs.choose`.
    """
    start = choose(line, os.environ)
    if start.line and ranks is not None:
        raise typer.BadParameter("the launcher says how many ranks there are", param_hint="--ranks")
    return start, () if start.line else numbers("--ranks", ranks or default)


def bytes_per_second(rate: str | None) -> float | None:
    """Read --rate, in bits per second as `cluster.spec.rate_bits` takes it; None if it is not given."""
    return None if rate is None else rate_bits(rate) / 8


def check_folder(option: str, path: Path | None) -> None:
    """Refuse a file, the value of an option, whose folder is not there, before anything is measured."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"{path}: its folder must be there", param_hint=option)


class Record:
    """What a command has measured: its files are checked before anything is measured, and written afterwards."""

    def __init__(
        self,
        benchmark: str,
        launcher: str,
        json_file: Path | None,
        append: bool = False,
        plot_file: Path | None = None,
    ) -> None:
        """Check the values of --json, --append and --plot, read what is kept, and describe the run.

        Raises:
            typer.BadParameter: a file cannot be written there, or matplotlib is missing.
            InvalidError: the file whose rows are kept is of something else.
        """
        if append and json_file is None:
            raise typer.BadParameter("names no file; say --json FILE too", param_hint="--append")
        check_folder("--json", json_file)
        check_folder("--plot", plot_file)
        if plot_file is not None and find_spec("matplotlib") is None:
            raise typer.BadParameter("needs matplotlib: python -m pip install matplotlib", param_hint="--plot")
        self._benchmark, self._json_file, self._plot_file = benchmark, json_file, plot_file
        kept = append and json_file is not None and json_file.exists()
        self._before = results.load(json_file, benchmark) if kept and json_file else None
        self._run = results.begin_run(launcher)

    def keep(self, rows: Sequence[Mapping[str, Any]], **facts: Any) -> dict[str, Any]:
        """Write the rows, with facts of the run, behind those that are kept; return the result of this run."""
        result = results.result_of({**self._run, **facts}, rows, self._benchmark)
        self._whole = results.joined(self._before, result) if self._before else result
        if self._json_file is not None:
            results.save(self._json_file, self._whole)
        return result

    def end(
        self,
        tables: Iterable[Table],
        notes: Iterable[str],
        wrong: Sequence[str] = (),
        draw: Callable[[list[dict[str, Any]], Path], None] | None = None,
    ) -> NoReturn:
        """Show tables, notes, and what was found to be wrong; draw all rows if asked for; end the command."""
        console = table_console()
        for table in tables:
            console.print(table)
        say(console, notes)
        say(console, wrong, "bold red")
        if self._plot_file is not None and draw is not None:
            draw(self._whole["rows"], self._plot_file)
        sys.exit(1 if wrong else 0)


@contextmanager
def progress(total: int) -> Iterator[Tell]:
    """Show a bar on stderr if that is a terminal."""
    with progress_bar() as bar:
        task = bar.add_task("", total=total)
        yield lambda title, ready: bar.update(task, description=title, advance=ready)


def progress_bar() -> Progress:
    """Make a bar that is shown on stderr if that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # drawn twice a second only: drawing takes time from what is measured
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal, refresh_per_second=2)


@contextmanager
def ended_in_words(what: str) -> Iterator[None]:
    """Turn an error or a signal into words, which begin with the command `what`, and an exit status.

    SIGTERM ends a command as Ctrl-C does.
    """

    def stop(number: int, _: Any) -> None:
        raise KeyboardInterrupt(number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        with app.ended_in_words(what):
            yield
    except KeyboardInterrupt as error:
        Console(stderr=True).print("stopped; no process of the job was left behind")
        sys.exit(128 + (error.args[0] if error.args else signal.SIGINT))
    finally:
        signal.signal(signal.SIGTERM, before)
