"""`python -m hvd_ext trace`: merges the traces of all ranks into one file for Perfetto, and sums up each step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hvd_ext.commands.app import App
from hvd_ext.errors import InvalidError
from hvd_ext.job.recording import write
from hvd_ext.planning import step_times as planning_times
from hvd_ext.trace import merge, rounds, step_times, summary

app = App()


@app.command()
def trace(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="that of HVD_EXT_TRACE or hvd.start_trace", show_default=False)
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="the merged trace; FOLDER/trace.json by default"),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="write when each gradient was ready, for the command `simulate`"),
    ] = None,
    summarize: Annotated[
        bool, typer.Option("--summary", help="print communication per step, and which ranks were late")
    ] = False,
    shown: Annotated[
        int, typer.Option("--steps", metavar="N", help="so many steps in the table, the last", min=0)
    ] = 20,
) -> None:
    """Merge the traces of all ranks for https://ui.perfetto.dev, and say how much communication was exposed."""
    console = Console()
    path = output or folder / "trace.json"
    try:
        merged = merge.read(folder)
        try:
            write(path, merged.document())
        except OSError as error:
            raise InvalidError(f"--output {path}: it cannot be written: {error.strerror or error}") from error
        if model is not None:
            times = step_times.of_trace(merged.ranks)
            try:
                planning_times.write(times, model)
            except OSError as error:
                raise InvalidError(f"--model {model}: it cannot be written: {error.strerror or error}") from error
    except InvalidError as error:
        Console(stderr=True).print(f"hvd_ext trace: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    for problem in merged.problems:
        Console(stderr=True).print(f"hvd_ext trace: {problem}", markup=False, highlight=False, soft_wrap=True)
    if model is not None:
        console.print(f"{model}: {len(times.tensors)} gradients", markup=False, highlight=False, soft_wrap=True)
    steps = summary.steps_of(merged.events)
    if summarize and steps:
        console.print(table_of(steps, len(merged.ranks), shown))
        for line in remarks(steps, merged.uncertainty_us):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    elif summarize:
        console.print("the trace has no complete step of a channel: was it recorded during training?")
    if summarize:
        for name, partial in rounds.of_trace(merged.events).items():
            console.print(partial.table(name))
    console.print(
        f"{path}: {len(merged.events)} events of {len(merged.ranks)} ranks, for https://ui.perfetto.dev",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def table_of(steps: Sequence[summary.Step], ranks: int, shown: int) -> Table:
    """Make the table of steps: the last ones, as many as are shown, then the median and the 90th percentile over all."""
    title = f"{len(steps)} steps of {ranks} rank{'s' * (ranks != 1)}; times in ms"
    table = Table(title=title, title_justify="left")
    table.add_column("step", no_wrap=True)
    for name in ("communication", "exposed", "hidden", "slowest bucket", "last rank"):
        table.add_column(name, justify="right", no_wrap=True)
    for step in steps[len(steps) - min(shown, len(steps)) :]:
        table.add_row(
            f"{step.channel} {step.step}",
            _ms(step.communication_us),
            _ms(step.exposed_us),
            "-" if step.hidden is None else f"{step.hidden:.0%}",
            "-" if step.slowest is None else f"{step.slowest}: {_ms(step.slowest_us)}",
            "-" if step.last is None else f"{step.last}: +{_ms(step.late_us)}",
        )
    table.add_section()
    hidden = [step.hidden for step in steps if step.hidden is not None]
    columns = [
        summary.total([step.communication_us for step in steps]),
        summary.total([step.exposed_us for step in steps]),
        summary.total([step.slowest_us for step in steps]),
        summary.total([step.late_us for step in steps]),
    ]
    for name in ("median", "p90"):
        communication, exposed, slowest, late = (_ms(getattr(column, name)) for column in columns)
        share = f"{getattr(summary.total(hidden), name):.0%}" if hidden else "-"
        table.add_row(name, communication, exposed, share, slowest, f"+{late}" if ranks > 1 else "-", style="bold")
    return table


def remarks(steps: Sequence[summary.Step], uncertainty_us: float) -> list[str]:
    """Say which ranks came last, and how exactly the clocks agree."""
    lines = []
    last = summary.stragglers(steps)
    if last:
        ranks = ", ".join(f"rank {rank} in {count}" for rank, count in last[:5])
        lines.append(f"came last: {ranks} of {len(steps)} steps; clocks agree to {_ms(uncertainty_us)} ms")
    return lines


def _ms(us: float) -> str:
    return f"{us / 1e3:.3f}"


if __name__ == "__main__":
    app(prog_name="python -m hvd_ext trace")
