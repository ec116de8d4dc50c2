"""The commands `convergence` and `plot-convergence`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.studies.options import Only, Output
from hvd_ext.bench import command, results


def convergence(
    study: Annotated[Path, typer.Argument(help="The plan, such as benchmarks/convergence.yaml.")],
    folder: Annotated[Path, typer.Option(help="A file for each run; finished ones are not run again.")],
    images: Annotated[Path, typer.Option(help="The image set of examples/make_images.py.")] = Path("out/images"),
    models: Annotated[str, typer.Option(help="Only these, with commas.")] = "",
    settings: Annotated[str, typer.Option(help="Only these, with commas.")] = "",
    seeds: Annotated[str, typer.Option(help="Only these, with commas; time: the times of steps.")] = "",
    missing: Annotated[bool, typer.Option("--missing", help="Only say which runs are missing.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write what is finished to this file.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw what is finished into this PNG file.")] = None,
    silence: Annotated[float, typer.Option(help="A job that says nothing for so long has failed, seconds.")] = 900.0,
    pytorch: Annotated[str, typer.Option(help="A Python that has PyTorch, for settings with a peer.")] = "",
) -> None:
    """Train what is missing of a study of convergence, in jobs of real ranks; then show what is finished."""
    from benchmarks.studies.convergence import jobs, plan as plans, results as told

    failures: list[str] = []
    with command.ended_in_words("benchmarks.studies convergence"):
        plan = plans.read(study)
        command.check_folder("--json", json_file)
        command.check_folder("--plot", plot_file)
        runs = plans.runs_of(plan, command.names(models), command.names(settings))
        wanted = command.names(seeds)
        chosen = [run for run in runs if not wanted or ("time" if run.seed is None else str(run.seed)) in wanted]
        left = plans.missing(folder, plan, chosen)
        console = command.table_console()
        if missing:
            for run in left:
                console.print(run.name, markup=False, highlight=False)
            console.print(f"{len(left)} of {len(chosen)} runs are missing", highlight=False)
            return
        jobs.check_folder(folder)
        if left:
            data = jobs.data_files(plan, list(dict.fromkeys(run.model for run in left)), folder, images)
            with _Bar(len(left)) as tell:
                failures = jobs.train(plan, left, folder, data, tell, silence, pytorch)
        found = told.collected(folder, plan)
        if json_file is not None:
            results.save(json_file, found)
        if plot_file is not None:
            told.draw(found, plot_file)
        console.print(told.table(found))
        command.say(console, failures, "bold red")
    sys.exit(1 if failures else 0)


class _Bar:
    """A bar on stderr if that is a terminal, and a line for each finished run elsewhere."""

    def __init__(self, total: int) -> None:
        self._progress = command.progress_bar()
        self._seen = self._progress.console.is_terminal
        self._task = self._progress.add_task("", total=total)
        self._last: dict[str, Any] = {}

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, kind: str, event: dict[str, Any]) -> None:
        title = event["name"]
        if kind == "epoch":
            self._last = event
            title += f" epoch {event['epoch']} of {event['epochs']}: {event['accuracy']:.1%}"
        ended = kind in ("done", "failed")
        self._progress.update(self._task, description=title, advance=int(ended))
        if ended and not self._seen:
            reached = f" {self._last['accuracy']:.2%}" if self._last.get("name") == event["name"] else ""
            print(f"{event['name']}: {kind}{reached}", file=sys.stderr, flush=True)


def plot_convergence(
    file: Annotated[Path, typer.Argument(help="Result of convergence --json.")],
    output: Output,
    only: Only = "",
) -> None:
    """Draw accuracy over epochs and over time, a column for each model."""
    from benchmarks.studies.convergence import results as told

    with command.ended_in_words("benchmarks.studies plot-convergence"):
        command.check_folder("--output", output)
        told.draw(results.load(file, told.BENCHMARK), output, command.names(only))
