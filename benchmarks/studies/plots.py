"""The commands `plot-allreduce`, `plot-training` and `plot-breakdown`: plots of kept results of `bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.studies.options import Only, Output, rows_of
from hvd_ext.bench import command, plots, results
from hvd_ext.bench.breakdown import draw


def plot_allreduce(
    files: Annotated[list[Path], typer.Argument(help="Results of bench allreduce --json.")],
    output: Output,
    kind: Annotated[
        str, typer.Option(help="sizes: time over bytes; clusters: bars over the bound; auto: as there are sizes.")
    ] = "auto",
    how: Annotated[
        str, typer.Option(help="Which rows of ours: graph, engine or eager; auto: the first there is.")
    ] = "auto",
    only: Only = "",
) -> None:
    """Draw results: time over bytes by algorithm, or bars of the time over the bound by cluster."""
    with command.ended_in_words("benchmarks.studies plot-allreduce"):
        command.check_folder("--output", output)
        plots.draw_allreduce(rows_of(files, results.ALLREDUCE), output, kind, how, command.names(only))


def plot_training(
    files: Annotated[list[Path], typer.Argument(help="Results of bench training --json.")],
    output: Output,
    only: Only = "",
) -> None:
    """Draw the time of an epoch by cluster and algorithm, one bar each."""
    with command.ended_in_words("benchmarks.studies plot-training"):
        command.check_folder("--output", output)
        plots.draw_training(rows_of(files, results.TRAINING), output, command.names(only))


def plot_breakdown(
    files: Annotated[list[Path], typer.Argument(help="Results of bench breakdown --json.")], output: Output
) -> None:
    """Draw the parts of a step as bars on each other, a panel for each size of pictures."""
    with command.ended_in_words("benchmarks.studies plot-breakdown"):
        command.check_folder("--output", output)
        draw(rows_of(files, results.BREAKDOWN), output)
