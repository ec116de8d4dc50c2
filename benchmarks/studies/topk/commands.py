"""The commands `topk`, `plot-topk` and `topk-targets`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.studies.options import Only, Output, rows_of
from hvd_ext.bench import command, results


def topk(
    elements: Annotated[str, typer.Option(help="Lengths of the float32 inputs, with commas.")] = "25000000",
    densities: Annotated[str, typer.Option(help="k over the length, with commas.")] = "0.001,0.01",
    inputs: Annotated[
        str | None,
        typer.Option(
            help="Of gauss, laplace, gradient (of ResNet-50 in training) and of ties, zeros, nan, ascending, outlier, "
            "sparse, which are hard; all without it."
        ),
    ] = None,
    contestants: Annotated[
        str | None,
        typer.Option(
            help="Of noop, noop-graph, exact, graph, segments, feedback, separate, mstopk, dgc, threshold, random, "
            "algorithm1, algorithm1-tf, dgc-tf, tf, torch, numpy; all without it."
        ),
    ] = None,
    threads: Annotated[str, typer.Option(help="Numbers of threads and cores, with commas.")] = "1",
    repetitions: command.Repetitions = 25,
    seconds_per_row: Annotated[float, typer.Option(help="Slow rows have fewer samples, at least 3.")] = 3.0,
    json_file: command.JsonFile = None,
    append: command.Append = False,
    plot_file: command.PlotFile = None,
    timeout: Annotated[float, typer.Option(help="Longest time without a new row, seconds.")] = 900.0,
) -> None:
    """Select the k largest of one buffer: hvd_ext.mstopk, Algorithm 1, TensorFlow, PyTorch, NumPy, each beside one pass
    over memory; every answer is checked."""
    from benchmarks.studies.topk import results as told
    from benchmarks.studies.topk.inputs import INPUTS
    from benchmarks.studies.topk.jobs import NAMES, Request, measure

    with command.ended_in_words("benchmarks.studies topk"):
        request = Request(
            elements=command.numbers("--elements", elements),
            densities=command.numbers("--densities", densities, float),
            inputs=INPUTS if inputs is None else command.names(inputs),
            contestants=tuple(NAMES) if contestants is None else command.names(contestants),
            threads=command.numbers("--threads", threads),
            repetitions=repetitions,
            seconds_per_row=seconds_per_row,
            timeout_s=timeout,
        )
        held = "one process for each number of threads, held to as many cores"
        record = command.Record(told.BENCHMARK, held, json_file, append, plot_file)
        with command.progress(request.groups()) as tell:
            rows, notes = measure(request, tell)
        result = record.keep(rows, evict_bytes=request.evict_bytes, notes=notes)
        record.end(told.tables(result), notes, told.faults(rows), told.draw)


def plot_topk(
    files: Annotated[list[Path], typer.Argument(help="Results of topk --json.")],
    output: Output,
    kind: Annotated[str, typer.Option(help="bars: time over one read pass; sizes: time over the length.")] = "bars",
    elements: Annotated[str, typer.Option(help="Only these lengths, with commas.")] = "",
    only: Only = "",
) -> None:
    """Draw selections: beside one read pass, or over the length."""
    from benchmarks.studies.topk import results as told

    with command.ended_in_words("benchmarks.studies plot-topk"):
        command.check_folder("--output", output)
        lengths = command.numbers("--elements", elements)
        rows = rows_of(files, told.BENCHMARK)
        rows = [row for row in rows if not lengths or row["elements"] in lengths]
        told.draw(rows, output, kind, command.names(only))


def topk_targets(file: Annotated[Path, typer.Argument(help="Result of topk --json.")]) -> None:
    """Compare a result of topk with the goals of the exact selection."""
    from benchmarks.studies.topk import results as told
    from benchmarks.studies.topk.targets import table, verdicts_of

    with command.ended_in_words("benchmarks.studies topk-targets"):
        found = verdicts_of(results.load(file, told.BENCHMARK)["rows"])
        command.table_console().print(table(found))
