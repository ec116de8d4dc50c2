"""The commands `python -m hvd_ext bench plot` and `plot-...`, which draw results that were kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hvd_ext.bench import command


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
        rows = results.rows_of(files)
        plots.draw_allreduce(rows, output, kind, how, command.names(only))


def plot_schedule(
    files: Annotated[list[Path], typer.Argument(help="Results of bench schedule --json.")],
    output: command.Output,
    only: command.Only = "",
) -> None:
    """Draw the step by cluster, ratio and bucketer, one bar each, beside the predicted one."""
    from hvd_ext.bench import results
    from hvd_ext.bench.schedule_plot import draw_schedule

    with command.ended_in_words("hvd_ext bench plot-schedule"):
        command.check_folder("--output", output)
        rows = results.rows_of(files, results.SCHEDULE)
        draw_schedule(rows, output, command.names(only))


def plot_stragglers(
    files: Annotated[list[Path], typer.Argument(help="Results of bench stragglers --json.")],
    output: command.Output,
    only: command.Only = "",
) -> None:
    """Draw how many times as fast as full steps each mode is, by workload, beside the model of rounds."""
    from hvd_ext.bench import results
    from hvd_ext.bench.stragglers_plot import draw_stragglers

    with command.ended_in_words("hvd_ext bench plot-stragglers"):
        command.check_folder("--output", output)
        rows = results.rows_of(files, results.STRAGGLERS)
        draw_stragglers(rows, output, command.names(only))


def plot_data(
    files: Annotated[list[Path], typer.Argument(help="Results of bench data --json.")],
    output: command.Output,
    only: command.Only = "",
) -> None:
    """Draw the processor time of samples that were read before, over that of a copy of the same bytes."""
    from hvd_ext.bench import results
    from hvd_ext.bench.data_plot import draw_data

    with command.ended_in_words("hvd_ext bench plot-data"):
        command.check_folder("--output", output)
        rows = results.rows_of(files, results.DATA)
        draw_data(rows, output, command.names(only))


def plot_training(
    files: Annotated[list[Path], typer.Argument(help="Results of bench training --json.")],
    output: command.Output,
    only: command.Only = "",
) -> None:
    """Draw the time of an epoch by cluster and algorithm, one bar each."""
    from hvd_ext.bench import plots, results

    with command.ended_in_words("hvd_ext bench plot-training"):
        command.check_folder("--output", output)
        rows = results.rows_of(files, results.TRAINING)
        plots.draw_training(rows, output, command.names(only))


def plot_topk(
    files: Annotated[list[Path], typer.Argument(help="Results of bench topk --json.")],
    output: command.Output,
    kind: Annotated[str, typer.Option(help="bars: time over one read pass; sizes: time over the length.")] = "bars",
    elements: Annotated[str, typer.Option(help="Only these lengths, with commas.")] = "",
    only: command.Only = "",
) -> None:
    """Draw selections: beside one read pass, or over the length."""
    from hvd_ext.bench import plots, results

    with command.ended_in_words("hvd_ext bench plot-topk"):
        command.check_folder("--output", output)
        lengths = command.numbers("--elements", elements)
        rows = results.rows_of(files, results.TOPK)
        rows = [row for row in rows if not lengths or row["elements"] in lengths]
        plots.draw_topk(rows, output, kind, command.names(only))


def plot_breakdown(
    files: Annotated[list[Path], typer.Argument(help="Results of bench breakdown --json.")], output: command.Output
) -> None:
    """Draw the parts of a step as bars on each other, a panel for each size of pictures."""
    from hvd_ext.bench import results
    from hvd_ext.bench.breakdown import draw

    with command.ended_in_words("hvd_ext bench plot-breakdown"):
        command.check_folder("--output", output)
        draw(results.rows_of(files, results.BREAKDOWN), output)


COMMANDS = {
    "plot": plot,
    "plot-schedule": plot_schedule,
    "plot-stragglers": plot_stragglers,
    "plot-data": plot_data,
    "plot-training": plot_training,
    "plot-topk": plot_topk,
    "plot-breakdown": plot_breakdown,
}
