"""Plots of sparse sums: all aggregations side by side, time over size, and the steps (CommLib, Fig. 6 to 8)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_ext.bench.hitopk_results import breakdown, place_of
from hvd_ext.bench.plots import finish, selected
from hvd_ext.bench.table import seconds
from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = ("bars", "sizes", "steps")
# Okabe and Ito's palette, by the contestants' or steps' order: in a plot every colour is there once.
COLOURS = ("#D55E00", "#E69F00", "#0072B2", "#56B4E9", "#009E73", "#CC79A7")


def draw(rows: Sequence[dict[str, Any]], path: Path, kind: str, only: Sequence[str] = ()) -> None:
    """Draw rows into a PNG file.

    Args:
        rows: of one result or of several; measured again, the later row counts, and measured ones before simulated.
        path: of the file.
        kind: "bars": time by contestant, a panel for each cluster and size; "sizes": time over elements, a panel for
            each cluster; "steps": hitopk's steps, stacked.
        only: at most six contestants by name; empty: the first six.

    Raises:
        InvalidError: an unknown kind or contestant, too many of them, nothing to draw, or no matplotlib.
    """
    if kind not in KINDS:
        raise InvalidError(f"kind ({kind!r}): must be one of {', '.join(KINDS)}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidError("plot (matplotlib): it is not installed; python -m pip install matplotlib") from error
    kept = {
        (place_of(row), row["elements"], row["name"]): row for row in sorted(rows, key=lambda row: not row["simulated"])
    }
    chosen = breakdown(list(kept.values())) if kind == "steps" else list(kept.values())
    present = list(dict.fromkeys(row["name"] for row in chosen))
    drawn = selected(present, only)
    chosen = [row for row in chosen if row["name"] in drawn]
    panels: dict[Any, list[dict[str, Any]]] = {}
    for row in sorted(chosen, key=lambda row: (row["ranks"], row["elements"])):
        of_size = kind == "sizes"
        panels.setdefault(place_of(row) if of_size else (place_of(row), row["elements"]), []).append(row)
    if not panels:
        raise InvalidError("plot (no rows): there is nothing to draw")
    columns = min(len(panels), 3)
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.6 * columns + 2.2, 3.4 * lines), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    drawing = {"bars": _bars, "sizes": _sizes, "steps": _steps}[kind]
    for (place, found), axis in zip(panels.items(), axes, strict=False):
        drawing(axis, found, drawn)
        title = f"{place} ranks" if isinstance(place, str) else f"{place[0]} ranks, {place[1] / 1e6:g} M elements"
        axis.set_title(title, fontsize="medium")
    for axis in axes[len(panels) :]:
        axis.remove()
    finish(figure, [] if only else [name for name in present if name not in drawn], path)


def _bars(axis: Axes, rows: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    for name, colour in zip(names, COLOURS, strict=False):
        for row in (row for row in rows if row["name"] == name):
            bar = axis.barh(names.index(name), row["seconds_median"], color=colour, label=name)
            axis.bar_label(bar, [seconds(row["seconds_median"]) + _star(row)], padding=2, fontsize="small")
    axis.invert_yaxis()
    axis.set_yticks([])
    axis.set(xlabel="seconds, median", xlim=(0, 1.25 * max(row["seconds_median"] for row in rows)))
    axis.grid(True, axis="x", linewidth=0.4, alpha=0.5)
    axis.set_axisbelow(True)


def _star(row: dict[str, Any]) -> str:
    return "*" if row["simulated"] else ""


def _sizes(axis: Axes, rows: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    for name, colour in zip(names, COLOURS, strict=False):
        points = sorted(
            (row["elements"], row["seconds_median"], row["simulated"]) for row in rows if row["name"] == name
        )
        axis.plot([x for x, _, _ in points], [y for _, y, _ in points], color=colour, linewidth=1.4, label=name)
        measured = [(x, y) for x, y, is_simulated in points if not is_simulated]
        # what was measured is a filled mark, the planner's price has none
        axis.plot([x for x, _ in measured], [y for _, y in measured], "o", markersize=4, color=colour)
    measured_too = any(not row["simulated"] for row in rows)
    ylabel = "seconds; marks: measured" if measured_too else "seconds, the planner's price"
    axis.set(xscale="log", yscale="log", xlabel="elements", ylabel=ylabel)
    axis.grid(True, which="major", linewidth=0.4, alpha=0.5)


def _steps(axis: Axes, rows: Sequence[dict[str, Any]], _: Sequence[str]) -> None:
    names = [row["name"] + _star(row) for row in rows]
    left = [0.0] * len(rows)
    steps = list(dict.fromkeys(name for row in rows for name in row["levels_seconds"]))
    # of the end, so that a step has the same colour whether or not the copies are known, which come first and last
    first = 0 if len(steps) > len(COLOURS) - 2 else 1
    for step, colour in zip(steps, COLOURS[first:], strict=False):
        widths = [1e3 * row["levels_seconds"].get(step, 0.0) for row in rows]
        axis.barh(names, widths, left=left, color=colour, label=step)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axis.invert_yaxis()
    axis.set(xlabel="milliseconds, mean over the ranks")
