"""The command `python -m hvd_ext bench`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hvd_ext.bench import convergence_cli, hitopk_cli, topk_cli, training_cli

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

TABLE_WIDTH = 150


@app.callback()
def bench() -> None:
    """Measure collectives beside MPI and Horovod."""


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in _names(text))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r}: must be whole numbers with commas between them", param_hint=option
        ) from None


def _in_a_folder(option: str, path: Path | None) -> None:
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"{path}: its folder must be there", param_hint=option)


@contextmanager
def _ended_in_words(what: str) -> Iterator[None]:
    """Turns what ends a command into words and an exit status; SIGTERM ends it as Ctrl-C does."""
    from hvd_ext.errors import HvdExtError

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


@app.command()
def allreduce(
    algorithms: Annotated[
        str, typer.Option(help="Algorithms, with commas; auto, mpi and horovod are names too. Only these are measured.")
    ] = "auto,mpi,horovod",
    nbytes: Annotated[str, typer.Option("--bytes", help="Sizes, with commas.")] = "4,4096,65536,1000000,16000000",
    how: Annotated[str, typer.Option(help="Of graph, engine (NumPy, no TensorFlow) and eager.")] = "graph,engine",
    ranks: Annotated[
        str | None, typer.Option(help="Numbers of ranks on this host, with commas; 2,4 without a launcher.")
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            help="Starts a command on all ranks: 'mpirun -np 8 -H a:4,b:4'. In a rehearsed cluster it is known."
        ),
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Of a host's link, each way, for the bound: 100mbit. Else from the topology.")
    ] = None,
    repetitions: Annotated[int, typer.Option(help="The most samples of a row.")] = 30,
    seconds_per_row: Annotated[float, typer.Option(help="Long calls have fewer samples, at least 3.")] = 8.0,
    check: Annotated[bool, typer.Option(help="Compare every result with the right one.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all samples to this file.")] = None,
    append: Annotated[bool, typer.Option("--append", help="Keep the rows that are in the file already.")] = False,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw the rows, also those kept, into this PNG file.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Longest time without an answer of a job, seconds.")] = 600.0,
) -> None:
    """Sum a buffer over all ranks: hvd_ext, MPI_Allreduce and Horovod, in turns; every result is checked."""
    from hvd_ext.bench.launcher import choose, place

    rank = place(os.environ)
    if rank:
        # One process per rank was started; rank 0 starts the jobs that measure.
        return
    from hvd_ext.bench import results
    from hvd_ext.bench.allreduce import Request, measure
    from hvd_ext.bench.progress import progress
    from hvd_ext.bench.table import faults, losses, table
    from hvd_ext.cluster.spec import rate_bits

    with _ended_in_words("hvd_ext bench"):
        start = choose(launcher, os.environ)
        if start.line and ranks is not None:
            raise typer.BadParameter("the launcher says how many ranks there are", param_hint="--ranks")
        if append and json_file is None:
            raise typer.BadParameter("names no file; say --json FILE too", param_hint="--append")
        request = Request(
            sizes=_numbers("--bytes", nbytes),
            algorithms=_names(algorithms),
            hows=_names(how),
            ranks=() if start.line else _numbers("--ranks", ranks or "2,4"),
            repetitions=repetitions,
            seconds_per_row=seconds_per_row,
            check=check,
            rate=None if rate is None else rate_bits(rate) / 8,
            timeout_s=timeout,
        )
        _in_a_folder("--json", json_file)
        _in_a_folder("--plot", plot_file)
        if plot_file is not None and find_spec("matplotlib") is None:
            raise typer.BadParameter("needs matplotlib: python -m pip install matplotlib", param_hint="--plot")
        before = results.load(json_file) if append and json_file is not None and json_file.exists() else None
        run = results.begin_run(start.describe())
        with progress(max(len(request.ranks), 1) * len(request.sizes)) as tell:
            rows, notes, topology = measure(request, start, tell)
        run.update(topology=topology, rate_bytes_per_second=request.rate, notes=notes)
        result = results.result_of(run, rows)
        whole = results.joined(before, result) if before else result
        if json_file is not None:
            results.save(json_file, whole)
        # A launcher gives its ranks a terminal of their own, which is not the user's.
        seen = Console().is_terminal and rank is None
        # A file or a pipe has no width, and a table that is cut to 80 columns says nothing.
        console = Console() if seen else Console(width=TABLE_WIDTH, force_terminal=False)
        console.print(table(result))
        wrong = faults(rows)
        for line in [*losses(result["rows"]), *notes]:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        for line in wrong:
            console.print(line, markup=False, highlight=False, soft_wrap=True, style="bold red")
        if plot_file is not None:
            from hvd_ext.bench import plots

            plots.draw(whole["rows"], plot_file)
    sys.exit(1 if wrong else 0)


@app.command()
def plot(
    files: Annotated[list[Path], typer.Argument(help="Results of bench allreduce --json.")],
    output: Annotated[Path, typer.Option(help="The PNG file.")],
    kind: Annotated[
        str, typer.Option(help="sizes: time over bytes; clusters: bars over the bound; auto: as there are sizes.")
    ] = "auto",
    how: Annotated[
        str, typer.Option(help="Which rows of ours: graph, engine or eager; auto: the first there is.")
    ] = "auto",
) -> None:
    """Draw results: time over bytes by algorithm, or bars of the time over the bound by cluster."""
    with _ended_in_words("hvd_ext bench plot"):
        from hvd_ext.bench import plots, results

        _in_a_folder("--output", output)
        plots.draw([row for path in files for row in results.load(path)["rows"]], output, kind, how)


training_cli.register(app)
topk_cli.register(app)
hitopk_cli.register(app)
convergence_cli.register(app)
