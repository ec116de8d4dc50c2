"""`python -m hvd_ext trace`: merges the traces of all ranks into one file for Perfetto, and sums up each step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hvd_ext.commands.app import App, ended_in_words, figures_table, say, writing
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
    with ended_in_words("hvd_ext trace"):
        merged = merge.read(folder)
        with writing(f"--output {path}"):
            write(path, merged.document())
        if model is not None:
            times = step_times.of_trace(merged.ranks)
            with writing(f"--model {model}"):
                planning_times.write(times, model)
    say(Console(stderr=True), [f"hvd_ext trace: {problem}" for problem in merged.problems])
    if model is not None:
        say(console, [f"{model}: {len(times.tensors)} gradients"])
    steps = summary.steps_of(merged.events)
    if summarize and steps:
        console.print(table_of(steps, len(merged.ranks), shown))
        say(console, remarks(steps, merged.uncertainty_us))
    elif summarize:
        console.print("the trace has no complete step of a channel: was it recorded during training?")
    if summarize:
        for name, partial in rounds.of_trace(merged.events).items():
            console.print(partial.table(name))
    say(console, [f"{path}: {len(merged.events)} events of {len(merged.ranks)} ranks, for https://ui.perfetto.dev"])


def table_of(steps: Sequence[summary.Step], ranks: int, shown: int) -> Table:
    """Make the table of steps: the last `shown` ones, then the median and the 90th percentile over all."""
    title = f"{len(steps)} steps of {ranks} rank{'s' * (ranks != 1)}; times in ms"
    headings = ("step", "communication", "exposed", "hidden", "slowest bucket", "last rank")
    table = figures_table(title, headings, ("step",))
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
    times = ("communication_us", "exposed_us", "slowest_us", "late_us")
    columns = [summary.total([getattr(step, time) for step in steps]) for time in times]
    for name in ("median", "p90"):
        communication, exposed, slowest, late = (_ms(getattr(column, name)) for column in columns)
        share = f"{getattr(summary.total(hidden), name):.0%}" if hidden else "-"
        table.add_row(name, communication, exposed, share, slowest, f"+{late}" if ranks > 1 else "-", style="bold")
    return table


def remarks(steps: Sequence[summary.Step], uncertainty_us: float) -> list[str]:
    """Say which ranks came last, and how exactly the clocks agree; nothing for a trace of one rank."""
    last = summary.stragglers(steps)
    ranks = ", ".join(f"rank {rank} in {count}" for rank, count in last[:5])
    return [f"came last: {ranks} of {len(steps)} steps; clocks agree to {_ms(uncertainty_us)} ms"] if last else []


def _ms(us: float) -> str:
    return f"{us / 1e3:.3f}"
