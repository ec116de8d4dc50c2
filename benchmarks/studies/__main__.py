"""The command `python -m benchmarks.studies`, to be run in the folder of the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.studies.convergence.commands import convergence, plot_convergence
from benchmarks.studies.hitopk.commands import hitopk, plot_hitopk
from benchmarks.studies.recipe.commands import recipe
from hvd_ext.bench import command
from hvd_ext.commands.app import App

app = App(no_args_is_help=True)


@app.callback()
def studies() -> None:
    """Make the figures of the pages again; for a cluster of your own see `python -m hvd_ext bench`."""
    command.only_on_rank_0()


app.command()(convergence)
app.command("plot-convergence")(plot_convergence)
app.command()(hitopk)
app.command("plot-hitopk")(plot_hitopk)
app.command()(recipe)


@app.command("topk-targets")
def topk_targets(file: Annotated[Path, typer.Argument(help="Result of bench topk --json.")]) -> None:
    """Compare a result of bench topk with the goals of the exact selection."""
    from benchmarks.studies.topk_targets import table, verdicts_of
    from hvd_ext.bench import results

    with command.ended_in_words("benchmarks.studies topk-targets"):
        found = verdicts_of(results.load(file, results.TOPK)["rows"])
        command.table_console().print(table(found))


@app.command()
def page(
    results: Annotated[Path, typer.Argument(help="The folder of the results that the marks name.")],
    pages: Annotated[list[Path], typer.Argument(help="The pages.")],
) -> None:
    """Write the tables of results between the marks of pages; `make docs` runs this."""
    from benchmarks.studies.page import rewritten

    for path in pages:
        path.write_text(rewritten(path.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.studies")
