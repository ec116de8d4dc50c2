"""The command `recipe`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hvd_ext.bench import command, results


def recipe(
    folder: Annotated[Path, typer.Argument(help="A folder for each training; finished ones are not trained again.")],
    pictures: Annotated[Path, typer.Option(help="The set of examples/make_images.py that is trained.")],
    few: Annotated[Path, typer.Option(help="A smaller set, for trainings that are timed.")],
    ways: Annotated[str, typer.Option(help="Only these, with commas.")] = "",
    seeds: Annotated[str, typer.Option(help="Only these, with commas; time, whole: on the rehearsed cluster.")] = "",
    missing: Annotated[bool, typer.Option("--missing", help="Only say which trainings are missing.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write what is finished to this file.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw what is finished into this PNG file.")] = None,
) -> None:
    """Train what is missing of the study of the small DAWNBench recipe; then show what is finished."""
    from benchmarks.studies.recipe import jobs, results as told
    from benchmarks.studies.recipe.ways import Run, runs

    failures: list[str] = []
    with command.ended_in_words("benchmarks.studies recipe"):
        command.check_folder("--json", json_file)
        command.check_folder("--plot", plot_file)
        console = command.table_console()
        chosen = runs(command.names(seeds), command.names(ways))
        left = [run for run in chosen if not jobs.rows(folder, run)]
        if missing:
            console.print(*(run.name for run in left), f"{len(left)} of {len(chosen)} trainings are missing", sep="\n")
            return

        def tell(run: Run, line: str) -> None:
            print(f"{run.name}: {line}", file=sys.stderr, flush=True)

        failures = jobs.train(left, folder, pictures, few, tell)
        found = told.collected(folder)
        if json_file is not None:
            results.save(json_file, found)
        if plot_file is not None:
            told.draw(found, plot_file)
        console.print(told.table(found))
        command.say(console, failures, "bold red")
    sys.exit(1 if failures else 0)
