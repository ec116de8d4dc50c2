"""What the commands of `python -m hvd_ext bench` share: options, what is read from them, what is shown, the end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hvd_ext.bench.launcher import Launcher, choose
from hvd_ext.cluster.spec import rate_bits
from hvd_ext.commands.app import table_console as table_console
from hvd_ext.errors import HvdExtError

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
Output = Annotated[Path, typer.Option(metavar="FILE", help="The PNG file.")]
Only = Annotated[
    str, typer.Option(metavar="NAMES", help="What is drawn, with commas; six lines at most, a bound is one of them.")
]


def ranks_option(default: str) -> Any:
    """Give the option --ranks.

    Args:
        default: the numbers of ranks without a launcher, as `ranks_of` takes them.

    Returns:
        It, for an annotation.
    """
    return typer.Option(
        metavar="N,N,...", help=f"Numbers of ranks on this host, with commas; {default} without a launcher."
    )


def rate_option(least: str) -> Any:
    """Give the option --rate.

    Args:
        least: what is computed from the rate: no time can be below it.

    Returns:
        It, for an annotation.
    """
    return typer.Option(
        metavar="RATE", help=f"Of a host's link, each way, for the {least}: 100mbit. Else from the topology."
    )


def names(text: str) -> tuple[str, ...]:
    """Read words with commas between them."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(option: str, text: str) -> tuple[int, ...]:
    """Read whole numbers with commas between them.

    Args:
        option: whose value it is, for the message.
        text: of the user.

    Returns:
        The numbers.

    Raises:
        typer.BadParameter: they are none.
    """
    try:
        return tuple(int(part) for part in names(text))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r}: must be whole numbers with commas between them", param_hint=option
        ) from None


def launched(line: str | None, ranks: str | None) -> Launcher:
    """Find out how to start jobs.

    Args:
        line: of --launcher.
        ranks: of --ranks.

    Returns:
        The launcher.

    Raises:
        typer.BadParameter: both say how many ranks there are.
        InvalidError: as `launcher.choose`.
    """
    start = choose(line, os.environ)
    if start.line and ranks is not None:
        raise typer.BadParameter("the launcher says how many ranks there are", param_hint="--ranks")
    return start


def ranks_of(start: Launcher, ranks: str | None, default: str) -> tuple[int, ...]:
    """Give the numbers of ranks of jobs on this host.

    Args:
        start: how jobs are started.
        ranks: of --ranks.
        default: where it is not given.

    Returns:
        The numbers; none where a launcher has its own.

    Raises:
        typer.BadParameter: they are no numbers.
    """
    return () if start.line else numbers("--ranks", ranks or default)


def bytes_per_second(rate: str | None) -> float | None:
    """Read --rate.

    Args:
        rate: of a link, in bits per second, as `cluster.spec.rate_bits` takes it; None where it is not given.

    Returns:
        Bytes per second, or None.

    Raises:
        InvalidError: it is no rate.
    """
    return None if rate is None else rate_bits(rate) / 8


def check_append(append: bool, json_file: Path | None) -> None:
    """Check that --append has a file.

    Raises:
        typer.BadParameter: it has none.
    """
    if append and json_file is None:
        raise typer.BadParameter("names no file; say --json FILE too", param_hint="--append")


def check_folder(option: str, path: Path | None) -> None:
    """Check that a file can be made, before anything is measured.

    Args:
        option: whose value it is, for the message.
        path: the file, if any.

    Raises:
        typer.BadParameter: there is no such folder.
    """
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"{path}: its folder must be there", param_hint=option)


def kept_result(load: Callable[[Path], dict[str, Any]], json_file: Path | None, append: bool) -> dict[str, Any] | None:
    """Read the result that --append keeps.

    Args:
        load: reads a file, and checks that it is one of this command.
        json_file: of --json.
        append: whether its rows stay.

    Returns:
        The result; None where there is none to keep.

    Raises:
        InvalidError: the file is another one's.
    """
    return load(json_file) if append and json_file is not None and json_file.exists() else None


def say(console: Console, notes: Iterable[str], wrong: Iterable[str] = ()) -> None:
    """Show lines under a table.

    Args:
        console: of the table.
        notes: as they are.
        wrong: what a measurement has found to be wrong.
    """
    for line in notes:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for line in wrong:
        console.print(line, markup=False, highlight=False, soft_wrap=True, style="bold red")


@contextmanager
def ended_in_words(what: str) -> Iterator[None]:
    """Turn what ends a command into words and an exit status; SIGTERM ends it as Ctrl-C does.

    Args:
        what: the command, which begins the words.
    """

    def stop(number: int, _: Any) -> None:
        raise KeyboardInterrupt(number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except HvdExtError as error:
        Console(stderr=True).print(f"{what}: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt as error:
        Console(stderr=True).print("stopped; no process of the job was left behind")
        sys.exit(128 + (error.args[0] if error.args else signal.SIGINT))
    finally:
        signal.signal(signal.SIGTERM, before)
