"""One training step in its parts, each found by leaving it out: what is asked for, the job, the table and the bars."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from hvd_ext.bench.breakdown_worker import PARTS, Request
from hvd_ext.bench.jobs import Launcher, Tell, events_of
from hvd_ext.bench.results import cluster_name
from hvd_ext.bench.sampling import EVENTS, Follower
from hvd_ext.bench.table import drawn
from hvd_ext.commands.figures import finish, panels
from hvd_ext.errors import InvalidError
from hvd_ext.runner.launcher import Job, job_environment

MOST_OFF = 0.1  # by so much of the whole the parts may miss it together
NAMES = {
    "dense": "dense, auto",
    "topk": "top-k of each rank, exact, naive_allgather",
    "hitopk": "MSTopK, hitopk",
    "cached": "MSTopK, hitopk, DataCache",
}
HEADINGS = ("ranks", "pixels", "scheme", *PARTS, "step", "missed")
# From the palette of Okabe and Ito.
COLOURS = dict(zip(PARTS, ("#56B4E9", "#E69F00", "#009E73", "#D55E00", "#CC79A7"), strict=True))


def measure(request: Request, launcher: Launcher, tell: Tell) -> list[dict[str, Any]]:
    """Measure what was asked for, in one job; `tell` takes what runs now, and how many rows have been completed.

    Raises:
        JobError: the job failed, or told nothing for too long.
    """
    tell("models are made", 0)
    with tempfile.TemporaryDirectory(prefix="hvd_ext_breakdown_") as folder:
        program = [sys.executable, "-m", "hvd_ext.bench.breakdown_worker", folder, request.write()]
        with Job(launcher.command(request.ranks, program), Path(folder) / "log", job_environment()) as job:
            rows = []
            for event in events_of(job, Follower(Path(folder) / EVENTS), request.timeout_s, "bench breakdown"):
                rows.append(event["row"])
                tell(f"{event['row']['pixels']} pixels", 1)
    return rows


def missed(row: Mapping[str, Any]) -> float:
    """Give the seconds of a step that are in none of its parts: below 0 where parts hide behind each other."""
    return float(row["step_seconds"] - sum(row["parts"].values()))


def cells(row: Mapping[str, Any]) -> list[str]:
    """Write a row with a text for each of `HEADINGS`."""
    parts = [f"{1e3 * row['parts'][name]:.1f}" for name in PARTS]
    step = row["step_seconds"]
    named = [cluster_name(row), str(row["pixels"]), NAMES[row["scheme"]]]
    return [*named, *parts, f"{1e3 * step:.1f}", f"{missed(row) / step:+.0%}"]


def breakdown_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Show the parts of each scheme in milliseconds, and what the parts together miss of the step."""
    title = "One training step in its parts: what it saves without each of them, medians, ms"
    return drawn(title, None, HEADINGS, [(row["pixels"], cells(row), False) for row in rows], HEADINGS[:3])


def doubts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say where the parts do not add up to the step within a tenth."""
    return [
        f"{row['pixels']} pixels, {NAMES[row['scheme']]}: the parts miss {missed(row) / row['step_seconds']:+.0%} of "
        "the step; they are hidden behind each other, or the machine was not quiet"
        for row in rows
        if abs(missed(row)) > MOST_OFF * row["step_seconds"]
    ]


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the parts as bars on each other, a panel for each size, as CommLib's Fig. 1.

    Raises:
        InvalidError: there are no rows, or no matplotlib.
    """
    if not rows:
        raise InvalidError("plot (no rows): there is nothing to draw; name results of bench breakdown")
    sizes = list(dict.fromkeys(row["pixels"] for row in rows))
    figure, axes = panels(len(sizes), len(sizes), 3.6, 3.8, 1.8)
    for size, axis in zip(sizes, axes, strict=True):
        mine = [row for row in rows if row["pixels"] == size]
        bottoms = [0.0] * len(mine)
        for part in PARTS:
            heights = [max(0.0, 1e3 * row["parts"][part]) for row in mine]
            axis.bar(range(len(mine)), heights, 0.6, bottoms, color=COLOURS[part], label=part)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        axis.plot(range(len(mine)), [1e3 * row["step_seconds"] for row in mine], "k_", markersize=18, label="step")
        axis.set_xticks(range(len(mine)), [row["scheme"] for row in mine])
        axis.set_ylabel("ms")
        axis.set_title(f"{size} pixels, {cluster_name(mine[0])} ranks")
    finish(figure, [], path)
