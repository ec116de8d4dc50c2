"""The command `python -m benchmarks.studies`, to be run in the folder of the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.studies.convergence.commands import convergence, plot_convergence
from benchmarks.studies.data.commands import data, plot_data
from benchmarks.studies.hitopk.commands import hitopk, plot_hitopk
from benchmarks.studies.lars.commands import lars
from benchmarks.studies.plots import plot_allreduce, plot_breakdown, plot_training
from benchmarks.studies.recipe.commands import recipe
from benchmarks.studies.schedule.commands import plot_schedule, schedule
from benchmarks.studies.stragglers.commands import plot_stragglers, stragglers
from benchmarks.studies.topk.commands import plot_topk, topk, topk_targets
from hvd_ext.bench import command
from hvd_ext.commands.app import App

app = App(no_args_is_help=True)


@app.callback()
def studies() -> None:
    """Make the figures of the pages again; for a cluster of your own see `python -m hvd_ext bench`."""
    command.only_on_rank_0()


for study in (
    *(convergence, plot_convergence, data, plot_data, hitopk, plot_hitopk, lars, recipe, schedule, plot_schedule),
    *(stragglers, plot_stragglers, topk, plot_topk, topk_targets, plot_allreduce, plot_breakdown, plot_training),
):
    app.command()(study)


@app.command()
def page(
    results: Annotated[Path, typer.Argument(help="The folder of the results that the marks name.")],
    pages: Annotated[list[Path], typer.Argument(help="The pages.")],
) -> None:
    """Write the tables of results between the marks of pages; `make docs` runs this."""
    from benchmarks.studies.page import rewritten

    for path in pages:
        path.write_text(rewritten(path.read_text(encoding="utf-8"), results), encoding="utf-8")


@app.command()
def tables(
    results: Annotated[Path, typer.Argument(help="The folder of the results.")],
    output: Annotated[Path, typer.Argument(help="The page that is written.")],
) -> None:
    """Write the whole tables of all results as one page; `make docs` runs this."""
    from benchmarks.studies.page import whole

    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(whole(results), encoding="utf-8")


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.studies")
