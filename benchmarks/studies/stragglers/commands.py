"""The commands `stragglers` and `plot-stragglers`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.studies.options import Only, Output, rows_of
from hvd_ext.bench import command


def stragglers(
    workloads: Annotated[
        str,
        typer.Option(
            help="Names, with commas; hyperplane-200, -300, -400: one rank is delayed by so many ms in each step; "
            "severe: all are, by 50 to 400 ms in turn; video, language, cloud: a tenth of times of real trainings."
        ),
    ] = "hyperplane-200,hyperplane-300,hyperplane-400,severe,video,language,cloud",
    modes: Annotated[
        str,
        typer.Option(
            help="Of sync=, with commas; quorum: of half of the ranks; delay: full with delay=1; horovod. "
            "full is always measured."
        ),
    ] = "full,solo,majority,quorum,auto,horovod",
    steps: Annotated[int, typer.Option(help="Timed steps of each mode.")] = 64,
    repetitions: Annotated[int, typer.Option(help="Number of turns that share these steps.")] = 2,
    ranks: Annotated[str | None, command.ranks_option("8")] = None,
    launcher: command.LauncherLine = None,
    seed: Annotated[int, typer.Option(help="Of the data and of the sleeps.")] = 1,
    json_file: command.JsonFile = None,
    append: command.Append = False,
    plot_file: command.PlotFile = None,
    timeout: command.Timeout = 600.0,
) -> None:
    """Train with ranks that are late, with each mode of sync= and with Horovod, in turns, beside the model of rounds:
    computing is slept, so that ranks that share cores lose what ranks on machines of their own lose."""
    from benchmarks.studies.stragglers import results as told
    from benchmarks.studies.stragglers.jobs import Request, measure

    with command.ended_in_words("benchmarks.studies stragglers"):
        start, counts = command.launched(launcher, ranks, "8")
        request = Request(
            workloads=command.names(workloads),
            modes=command.names(modes),
            steps=steps,
            repetitions=repetitions,
            ranks=counts,
            seed=seed,
            timeout_s=timeout,
        )
        record = command.Record(told.BENCHMARK, start.describe(), json_file, append, plot_file)
        with command.progress(max(len(request.ranks), 1) * len(request.workloads)) as tell:
            rows, notes, topology = measure(request, start, tell)
        result = record.keep(rows, topology=topology, notes=notes)
        record.end([told.table(result)], notes, told.faults(rows), told.draw)


def plot_stragglers(
    files: Annotated[list[Path], typer.Argument(help="Results of stragglers --json.")],
    output: Output,
    only: Only = "",
) -> None:
    """Draw how many times as fast as full steps each mode is, by workload, beside the model of rounds."""
    from benchmarks.studies.stragglers import results as told

    with command.ended_in_words("benchmarks.studies plot-stragglers"):
        command.check_folder("--output", output)
        told.draw(rows_of(files, told.BENCHMARK), output, command.names(only))
