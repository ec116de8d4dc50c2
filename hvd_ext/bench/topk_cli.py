"""The commands `python -m hvd_ext bench topk` and `bench plot-topk`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hvd_ext.bench import command


def register(app: typer.Typer) -> None:
    """Add the commands to those of the benchmark.

    Args:
        app: of `hvd_ext.bench.cli`.
    """
    app.command()(topk)
    app.command("plot-topk")(plot_topk)


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
            help="Of noop, exact, graph, segments, feedback, separate, mstopk, dgc, threshold, random, algorithm1, "
            "algorithm1-tf, dgc-tf, tf, torch, numpy; all without it."
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
    from hvd_ext.bench import results, topk_plots, topk_results
    from hvd_ext.bench.progress import progress
    from hvd_ext.bench.topk import NAMES, Request, measure
    from hvd_ext.bench.topk_inputs import INPUTS
    from hvd_ext.bench.topk_targets import verdicts

    with command.ended_in_words("hvd_ext bench topk"):
        command.check_append(append, json_file)
        request = Request(
            elements=command.numbers("--elements", elements),
            densities=_parts("--densities", densities),
            inputs=INPUTS if inputs is None else command.names(inputs),
            contestants=tuple(NAMES) if contestants is None else command.names(contestants),
            threads=command.numbers("--threads", threads),
            repetitions=repetitions,
            seconds_per_row=seconds_per_row,
            timeout_s=timeout,
        )
        command.check_folder("--json", json_file)
        command.check_folder("--plot", plot_file)
        before = command.kept_result(topk_results.load, json_file, append)
        run = results.begin_run("one process for each number of threads, held to as many cores")
        with progress(request.groups()) as tell:
            rows, notes = measure(request, tell)
        run.update(evict_bytes=request.evict_bytes, notes=notes)
        result = topk_results.result(run, rows, verdicts(rows))
        kept = topk_results.joined(before, result) if before else result
        if json_file is not None:
            results.save(json_file, kept)
        console = command.table_console()
        for table in topk_results.tables(result):
            console.print(table)
        wrong = topk_results.faults(rows)
        command.say(console, notes, wrong)
        if plot_file is not None:
            topk_plots.draw(kept["rows"], plot_file)
    sys.exit(1 if wrong else 0)


def _parts(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in command.names(text))
    except ValueError:
        raise typer.BadParameter(f"{text!r}: must be numbers with commas between them", param_hint=option) from None


def plot_topk(
    files: Annotated[list[Path], typer.Argument(help="Results of bench topk --json.")],
    output: command.Output,
    kind: Annotated[str, typer.Option(help="bars: time over one read pass; sizes: time over the length.")] = "bars",
    elements: Annotated[str, typer.Option(help="Only these lengths, with commas.")] = "",
    only: command.Only = "",
) -> None:
    """Draw selections: beside one read pass, or over the length."""
    from hvd_ext.bench import topk_plots, topk_results

    with command.ended_in_words("hvd_ext bench plot-topk"):
        command.check_folder("--output", output)
        lengths = command.numbers("--elements", elements)
        rows = [row for path in files for row in topk_results.load(path)["rows"]]
        rows = [row for row in rows if not lengths or row["elements"] in lengths]
        topk_plots.draw(rows, output, kind, command.names(only))
