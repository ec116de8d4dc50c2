"""The file of sparse sums, its tables, Markdown and plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.studies.markdown import table as markdown_table
from hvd_ext.bench import results
from hvd_ext.bench.plots import selected
from hvd_ext.bench.results import cluster_name
from hvd_ext.bench.table import WRONG, drawn, ratio, seconds
from hvd_ext.commands.figures import finish, panels
from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BENCHMARK = "sparse sums, float32"
CAPTION = (
    "engine: NumPy in and out, no TensorFlow; floor: bytes over the slowest link, for hitopk with the same run's steps "
    "inside the hosts; link: what the busiest host has sent, frames counted, and over the closed form's bytes; entry: "
    "of a value and its index on the way; x Horovod: median over theirs, below 1 is faster; *: not measured, the "
    "planner's price"
)
# The sizes of the paper's breakdown: ResNet-50 and a Transformer.
FIGURE_8 = (25_000_000, 110_000_000)
HEADINGS = ("cluster", "elements", "what", "median", "x floor", "price", "link MB", "x form", "entry B", "x Horovod")
KINDS = ("bars", "sizes", "steps")
# Okabe and Ito's palette, by the contestants' or steps' order: in a plot every colour is there once.
COLOURS = ("#D55E00", "#E69F00", "#0072B2", "#56B4E9", "#009E73", "#CC79A7")


def place_of(row: Mapping[str, Any]) -> str:
    """Name a row's cluster: "4 + 3", or "16 x 8" if many hosts are equal."""
    counts = row["ranks_per_host"]
    return f"{len(counts)} x {counts[0]}" if len(counts) > 4 and len(set(counts)) == 1 else cluster_name(row)


def cells_of(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write one of `rows`, which are of the same place, with a text for each heading from "what" on."""
    median = row["seconds_median"]
    theirs = [other["seconds_median"] for other in rows if other["name"] == "horovod" and not other["simulated"]]
    wire = row["wire_bytes"]
    beside = median / theirs[0] if theirs and row["algorithm"] != "horovod" and not row["simulated"] else None
    price = row["predicted_seconds"]
    return [
        row["name"] + ("*" if row["simulated"] else "") + (WRONG if row["correct"] is False else ""),
        seconds(median),
        ratio(median / row["floor_seconds"] if row["floor_seconds"] else None),
        ratio(price / median if price and not row["simulated"] else None),
        "" if wire is None else f"{wire / 1e6:.3g}",
        ratio(wire / row["host_bytes"] if wire and row["host_bytes"] else None),
        ratio(row["entry_bytes"]),
        ratio(beside),
    ]


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Write rows with a text for each heading, those of one place together."""
    return [
        [place_of(row), f"{row['elements']:,}", *cells_of(row, group)]
        for group in results.places(rows).values()
        for row in group
    ]


def breakdown(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Give the rows of hitopk on several hosts whose steps are known."""
    return [dict(row) for row in rows if row["algorithm"] == "hitopk" and row["hosts"] > 1 and row["levels_seconds"]]


def table(found: Mapping[str, Any]) -> Table:
    """Draw a result as a table: a row for each cluster, size and contestant; a wrong one is red."""
    lines = [(0, line, line[2].endswith(WRONG)) for line in lines_of(found["rows"])]
    return drawn(found["benchmark"], CAPTION, HEADINGS, lines)


def steps_table(found: Mapping[str, Any]) -> Table | None:
    """Draw the steps of hitopk, a column for each; None if there are none."""
    rows = breakdown(found["rows"])
    if not rows:
        return None
    names = list(dict.fromkeys(name for row in rows for name in row["levels_seconds"]))
    lines = [(0, _step_cells(row, names), False) for row in rows]
    return drawn(
        "steps of hitopk, means over the ranks", None, ("cluster", "elements", "what", *names), lines, wrap=True
    )


def _step_cells(row: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    times = [row["levels_seconds"].get(name) for name in names]
    star = "*" if row["simulated"] else ""
    shown = ["" if time_s is None else seconds(time_s) for time_s in times]
    return [place_of(row), f"{row['elements']:,}", row["name"] + star, *shown]


def faults(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write a line for each wrong row."""
    return [
        f"wrong sum: {row['name']}, {place_of(row)} ranks, {row['elements']:,} elements: {row['wrong'][0]}"
        for row in rows
        if row["correct"] is False
    ]


def markdown(found: Mapping[str, Any]) -> str:
    """Write every row as Markdown, and the steps of hitopk; if nothing was measured, the prices are sorted by size."""
    everything = found["rows"]
    rows = breakdown(everything)
    if all(row["simulated"] for row in everything):
        parts = ["The planner's prices; nothing was measured.\n", *_pivots(everything)]
        rows = [row for row in rows if row["elements"] in FIGURE_8]
    else:
        parts = [_written(HEADINGS, lines_of(everything))]
    if rows:
        names = list(dict.fromkeys(name for row in rows for name in row["levels_seconds"]))
        parts.append(_written(("cluster", "elements", "what", *names), [_step_cells(row, names) for row in rows]))
    parts += [f"- {line}\n" for line in faults(found["rows"])]
    return "\n".join(parts)


def _pivots(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write one table for each cluster: contestants down, sizes across."""
    tables = []
    for place in dict.fromkeys(place_of(row) for row in rows):
        here = [row for row in rows if place_of(row) == place]
        sizes = sorted({row["elements"] for row in here})
        times = {(row["name"], row["elements"]): seconds(row["seconds_median"]) for row in here}
        lines = [
            [name, *(times.get((name, size), "") for size in sizes)] for name in dict.fromkeys(n for n, _ in times)
        ]
        tables.append(_written((f"{place} ranks, elements", *(f"{size:,}" for size in sizes)), lines))
    return tables


def _written(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return markdown_table(headings, lines, " --- |")


def draw(rows: Sequence[dict[str, Any]], path: Path, kind: str, only: Sequence[str] = ()) -> None:
    """Draw sparse and dense sums.

    Args:
        rows: of one result or of several; of rows of the same sum the last counts, and measured ones before simulated.
        path: of the PNG file.
        kind: "bars": time by contestant, a panel for each cluster and size; "sizes": time over elements, a panel for
            each cluster; "steps": hitopk's steps, stacked.
        only: at most six contestants by name; empty: the first six.

    Raises:
        InvalidError: an unknown kind or contestant, too many of them, nothing to draw, or no matplotlib.
    """
    if kind not in KINDS:
        raise InvalidError(f"kind ({kind!r}): must be one of {', '.join(KINDS)}")
    kept = {
        (place_of(row), row["elements"], row["name"]): row for row in sorted(rows, key=lambda row: not row["simulated"])
    }
    chosen = breakdown(list(kept.values())) if kind == "steps" else list(kept.values())
    present = list(dict.fromkeys(row["name"] for row in chosen))
    names = selected(present, only)
    chosen = [row for row in chosen if row["name"] in names]
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(chosen, key=lambda row: (row["ranks"], row["elements"])):
        size = "" if kind == "sizes" else f", {row['elements'] / 1e6:g} M elements"
        groups.setdefault(f"{place_of(row)} ranks{size}", []).append(row)
    if not groups:
        raise InvalidError("plot (no rows): there is nothing to draw")
    figure, axes = panels(len(groups), 3, 4.6, 3.4, 2.2)
    drawing = {"bars": _bars, "sizes": _sizes, "steps": _steps}[kind]
    for (title, found), axis in zip(groups.items(), axes, strict=True):
        drawing(axis, found, names)
        axis.set_title(title, fontsize="medium")
    finish(figure, [] if only else [name for name in present if name not in names], path)


def _bars(axis: Axes, rows: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    for name, colour in zip(names, COLOURS, strict=False):
        for row in (row for row in rows if row["name"] == name):
            bar = axis.barh(names.index(name), row["seconds_median"], color=colour, label=name)
            words = seconds(row["seconds_median"]) + ("*" if row["simulated"] else "")
            axis.bar_label(bar, [words], padding=2, fontsize="small")
    axis.invert_yaxis()
    axis.set_yticks([])
    axis.set(xlabel="seconds, median", xlim=(0, 1.25 * max(row["seconds_median"] for row in rows)))
    axis.grid(True, axis="x", linewidth=0.4, alpha=0.5)
    axis.set_axisbelow(True)


def _sizes(axis: Axes, rows: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    for name, colour in zip(names, COLOURS, strict=False):
        points = sorted(
            (row["elements"], row["seconds_median"], row["simulated"]) for row in rows if row["name"] == name
        )
        axis.plot([x for x, _, _ in points], [y for _, y, _ in points], color=colour, linewidth=1.4, label=name)
        measured = [(x, y) for x, y, is_simulated in points if not is_simulated]
        # what was measured has a filled mark, and the planner's price has none
        axis.plot([x for x, _ in measured], [y for _, y in measured], "o", markersize=4, color=colour)
    measured_too = any(not row["simulated"] for row in rows)
    ylabel = "seconds; marks: measured" if measured_too else "seconds, the planner's price"
    axis.set(xscale="log", yscale="log", xlabel="elements", ylabel=ylabel)
    axis.grid(True, which="major", linewidth=0.4, alpha=0.5)


def _steps(axis: Axes, rows: Sequence[dict[str, Any]], _: Sequence[str]) -> None:
    names = [row["name"] + ("*" if row["simulated"] else "") for row in rows]
    left = [0.0] * len(rows)
    steps = list(dict.fromkeys(name for row in rows for name in row["levels_seconds"]))
    # The copies are the first and the last step and may be unknown; the other steps have the same colours without them.
    first = 0 if len(steps) > len(COLOURS) - 2 else 1
    for step, colour in zip(steps, COLOURS[first:], strict=False):
        widths = [1e3 * row["levels_seconds"].get(step, 0.0) for row in rows]
        axis.barh(names, widths, left=left, color=colour, label=step)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axis.invert_yaxis()
    axis.set(xlabel="milliseconds, mean over the ranks")
