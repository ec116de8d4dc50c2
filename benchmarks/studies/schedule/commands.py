"""The commands `schedule` and `plot-schedule`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.studies.options import Only, Output, part, rows_of
from hvd_ext.bench import command


def schedule(
    models: Annotated[
        str,
        typer.Option(
            "--model", help="Files of models (trace FOLDER --model FILE) or names as resnet50, bert-base; with commas."
        ),
    ] = "resnet50",
    scale: Annotated[str, typer.Option(help="Part of every tensor's elements, as 0.0625 or 1/16.")] = "1/16",
    ratios: Annotated[
        str,
        typer.Option(
            "--ratio",
            help="Of communication, one bucket and alone, to computing, with commas; 0: the model's own times.",
        ),
    ] = "1",
    bucketers: Annotated[
        str,
        typer.Option(help="Bucketers, with commas; auto is a name too, and delay: those of auto, one step late."),
    ] = "auto,wfbp,single,by_size,mgwfbp,optimal",
    algorithm: Annotated[str, typer.Option(help="Of all buckets, or auto.")] = "auto",
    ranks: Annotated[str | None, command.ranks_option("2")] = None,
    launcher: command.LauncherLine = None,
    rate: Annotated[str | None, command.rate_option("bound")] = None,
    repetitions: command.Repetitions = 10,
    seconds_per_row: command.SecondsPerRow = 8.0,
    json_file: command.JsonFile = None,
    append: command.Append = False,
    plot_file: command.PlotFile = None,
    timeout: command.Timeout = 600.0,
) -> None:
    """Replay a model's step with every bucketer, in turns, beside its prediction: ranks sleep until a tensor is ready
    and hand it to the engine, without TensorFlow, so that computing takes no core. Every result is checked."""
    from benchmarks.studies.schedule import results as told
    from benchmarks.studies.schedule.jobs import Request, measure

    with command.ended_in_words("benchmarks.studies schedule"):
        start, counts = command.launched(launcher, ranks, "2")
        request = Request(
            models=command.names(models),
            bucketers=command.names(bucketers),
            scale=part("--scale", scale),
            ratios=command.numbers("--ratio", ratios, float),
            algorithm=algorithm,
            ranks=counts,
            repetitions=repetitions,
            seconds_per_row=seconds_per_row,
            rate=command.bytes_per_second(rate),
            timeout_s=timeout,
        )
        record = command.Record(told.BENCHMARK, start.describe(), json_file, append, plot_file)
        with command.progress(max(len(request.ranks), 1) * len(request.models) * len(request.ratios)) as tell:
            rows, notes, topology = measure(request, start, tell)
        result = record.keep(rows, topology=topology, rate_bytes_per_second=request.rate, notes=notes)
        record.end([told.table(result)], notes, told.faults(rows), told.draw)


def plot_schedule(
    files: Annotated[list[Path], typer.Argument(help="Results of schedule --json.")],
    output: Output,
    only: Only = "",
) -> None:
    """Draw the step by cluster, ratio and bucketer, one bar each, beside the predicted one."""
    from benchmarks.studies.schedule import results as told

    with command.ended_in_words("benchmarks.studies plot-schedule"):
        command.check_folder("--output", output)
        told.draw(rows_of(files, told.BENCHMARK), output, command.names(only))
