"""The command `python -m hvd_ext bench`."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from hvd_ext.bench import command, convergence_cli, hitopk_cli, topk_cli, training_cli
from hvd_ext.commands.app import App

app = App(no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure collectives beside MPI and Horovod."""


@app.command()
def allreduce(
    algorithms: Annotated[
        str, typer.Option(help="Algorithms, with commas; auto, mpi and horovod are names too. Only these are measured.")
    ] = "auto,mpi,horovod",
    nbytes: Annotated[str, typer.Option("--bytes", help="Sizes, with commas.")] = "4,4096,65536,1000000,16000000",
    how: Annotated[str, typer.Option(help="Of graph, engine (NumPy, no TensorFlow) and eager.")] = "graph,engine",
    ranks: Annotated[str | None, command.ranks_option("2,4")] = None,
    launcher: command.LauncherLine = None,
    rate: Annotated[str | None, command.rate_option("bound")] = None,
    repetitions: command.Repetitions = 30,
    seconds_per_row: command.SecondsPerRow = 8.0,
    check: Annotated[bool, typer.Option(help="Compare every result with the right one.")] = True,
    json_file: command.JsonFile = None,
    append: command.Append = False,
    plot_file: command.PlotFile = None,
    timeout: command.Timeout = 600.0,
) -> None:
    """Sum a buffer over all ranks: hvd_ext, MPI_Allreduce and Horovod, in turns; every result is checked."""
    from hvd_ext.bench.launcher import place

    rank = place(os.environ)
    if rank:
        # One process per rank was started; rank 0 starts the jobs that measure.
        return
    from hvd_ext.bench import results
    from hvd_ext.bench.allreduce import Request, measure
    from hvd_ext.bench.progress import progress
    from hvd_ext.bench.table import faults, losses, table

    with command.ended_in_words("hvd_ext bench"):
        start = command.launched(launcher, ranks)
        command.check_append(append, json_file)
        request = Request(
            sizes=command.numbers("--bytes", nbytes),
            algorithms=command.names(algorithms),
            hows=command.names(how),
            ranks=command.ranks_of(start, ranks, "2,4"),
            repetitions=repetitions,
            seconds_per_row=seconds_per_row,
            check=check,
            rate=command.bytes_per_second(rate),
            timeout_s=timeout,
        )
        command.check_folder("--json", json_file)
        command.check_folder("--plot", plot_file)
        if plot_file is not None and find_spec("matplotlib") is None:
            raise typer.BadParameter("needs matplotlib: python -m pip install matplotlib", param_hint="--plot")
        before = command.kept_result(results.load, json_file, append)
        run = results.begin_run(start.describe())
        with progress(max(len(request.ranks), 1) * len(request.sizes)) as tell:
            rows, notes, topology = measure(request, start, tell)
        run.update(topology=topology, rate_bytes_per_second=request.rate, notes=notes)
        result = results.result_of(run, rows)
        whole = results.joined(before, result) if before else result
        if json_file is not None:
            results.save(json_file, whole)
        console = command.table_console(rank)
        console.print(table(result))
        wrong = faults(rows)
        command.say(console, [*losses(result["rows"]), *notes], wrong)
        if plot_file is not None:
            from hvd_ext.bench import plots

            plots.draw(whole["rows"], plot_file)
    sys.exit(1 if wrong else 0)


@app.command()
def plot(
    files: Annotated[list[Path], typer.Argument(help="Results of bench allreduce --json.")],
    output: command.Output,
    kind: Annotated[
        str, typer.Option(help="sizes: time over bytes; clusters: bars over the bound; auto: as there are sizes.")
    ] = "auto",
    how: Annotated[
        str, typer.Option(help="Which rows of ours: graph, engine or eager; auto: the first there is.")
    ] = "auto",
    only: command.Only = "",
) -> None:
    """Draw results: time over bytes by algorithm, or bars of the time over the bound by cluster."""
    with command.ended_in_words("hvd_ext bench plot"):
        from hvd_ext.bench import plots, results

        command.check_folder("--output", output)
        rows = [row for path in files for row in results.load(path)["rows"]]
        plots.draw(rows, output, kind, how, command.names(only))


training_cli.register(app)
topk_cli.register(app)
hitopk_cli.register(app)
convergence_cli.register(app)
