"""The commands `python -m hvd_ext bench topk` and `bench plot-topk`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


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
    repetitions: Annotated[int, typer.Option(help="The most samples of a row.")] = 25,
    seconds_per_row: Annotated[float, typer.Option(help="Slow rows have fewer samples, at least 3.")] = 3.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all samples to this file.")] = None,
    append: Annotated[bool, typer.Option("--append", help="Keep the rows that are in the file already.")] = False,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw the rows, also those kept, into this PNG file.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Longest time without a new row, seconds.")] = 900.0,
) -> None:
    """Select the k largest of one buffer: hvd_ext.mstopk, Algorithm 1, TensorFlow, PyTorch, NumPy, each beside one pass
    over memory; every answer is checked."""
    from hvd_ext.bench import results, topk_plots, topk_results
    from hvd_ext.bench.cli import TABLE_WIDTH, _ended_in_words, _in_a_folder, _names, _numbers
    from hvd_ext.bench.progress import progress
    from hvd_ext.bench.topk import NAMES, Request, measure
    from hvd_ext.bench.topk_inputs import INPUTS
    from hvd_ext.bench.topk_targets import verdicts

    with _ended_in_words("hvd_ext bench topk"):
        if append and json_file is None:
            raise typer.BadParameter("names no file; say --json FILE too", param_hint="--append")
        request = Request(
            elements=_numbers("--elements", elements),
            densities=_parts("--densities", densities),
            inputs=INPUTS if inputs is None else _names(inputs),
            contestants=tuple(NAMES) if contestants is None else _names(contestants),
            threads=_numbers("--threads", threads),
            repetitions=repetitions,
            seconds_per_row=seconds_per_row,
            timeout_s=timeout,
        )
        _in_a_folder("--json", json_file)
        _in_a_folder("--plot", plot_file)
        before = topk_results.load(json_file) if append and json_file is not None and json_file.exists() else None
        run = results.begin_run("one process for each number of threads, held to as many cores")
        with progress(request.groups()) as tell:
            rows, notes = measure(request, tell)
        run.update(evict_bytes=request.evict_bytes, notes=notes)
        result = topk_results.result(run, rows, verdicts(rows))
        kept = topk_results.joined(before, result) if before else result
        if json_file is not None:
            results.save(json_file, kept)
        console = Console() if Console().is_terminal else Console(width=TABLE_WIDTH, force_terminal=False)
        for table in topk_results.tables(result):
            console.print(table)
        for line in notes:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        wrong = topk_results.faults(rows)
        for line in wrong:
            console.print(line, markup=False, highlight=False, soft_wrap=True, style="bold red")
        if plot_file is not None:
            topk_plots.draw(kept["rows"], plot_file)
    sys.exit(1 if wrong else 0)


def _parts(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise typer.BadParameter(f"{text!r}: must be numbers with commas between them", param_hint=option) from None


def plot_topk(
    files: Annotated[list[Path], typer.Argument(help="Results of bench topk --json.")],
    output: Annotated[Path, typer.Option(help="The PNG file.")],
) -> None:
    """Draw the time over one read pass by input and contestant, one bar each."""
    from hvd_ext.bench import topk_plots, topk_results
    from hvd_ext.bench.cli import _ended_in_words, _in_a_folder

    with _ended_in_words("hvd_ext bench plot-topk"):
        _in_a_folder("--output", output)
        topk_plots.draw([row for path in files for row in topk_results.load(path)["rows"]], output)
