"""Plots of sparse sums: all aggregations side by side, time over size, and the steps (CommLib, Fig. 6 to 8)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_ext.bench.hitopk_results import breakdown, place_of
from hvd_ext.bench.plots import DPI, STYLES
from hvd_ext.bench.table import seconds
from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = ("bars", "sizes", "steps")
COLOURS = {
    **{name: colour for name, (colour, _) in STYLES.items()},
    "hitopk": "#D55E00",
    "naive_allgather": "#56B4E9",
    "gtopk": "#CC79A7",
    "flexreduce": "#E69F00",
}
STEPS = ("#009E73", "#E69F00", "#D55E00", "#0072B2", "#CC79A7", "#999933")


def draw(rows: Sequence[dict[str, Any]], path: Path, kind: str) -> None:
    """Draw rows into a PNG file.

    Args:
        rows: of one result or of several; measured again, the later row counts, and measured ones before simulated.
        path: of the file.
        kind: "bars": time by contestant, a panel for each cluster and size; "sizes": time over elements, a panel for
            each cluster; "steps": hitopk's steps, stacked.

    Raises:
        InvalidError: an unknown kind, nothing to draw, or no matplotlib.
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
    panels: dict[Any, list[dict[str, Any]]] = {}
    for row in sorted(chosen, key=lambda row: (row["ranks"], row["elements"])):
        of_size = kind == "sizes"
        panels.setdefault(place_of(row) if of_size else (place_of(row), row["elements"]), []).append(row)
    if not panels:
        raise InvalidError("plot (no rows): there is nothing to draw")
    columns = min(len(panels), 3)
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.6 * columns + 1, 4.2 * lines), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    drawing = {"bars": _bars, "sizes": _sizes, "steps": _steps}[kind]
    for (place, found), axis in zip(panels.items(), axes, strict=False):
        drawing(axis, found)
        axis.set_title(f"{place} ranks" if isinstance(place, str) else f"{place[0]} ranks, {place[1]:,} elements")
    for axis in axes[len(panels) :]:
        axis.remove()
    named = {text: one for axis in figure.axes for one, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    if named:
        figure.legend(named.values(), named.keys(), loc="outside right center", frameon=False, fontsize="small")
    figure.savefig(path, dpi=DPI, format="png")


def _bars(axis: Axes, rows: Sequence[dict[str, Any]]) -> None:
    names = [row["name"] + ("*" if row["simulated"] else "") for row in rows]
    times = [row["seconds_median"] for row in rows]
    bars = axis.barh(names, times, color=[COLOURS.get(row["algorithm"], "#444444") for row in rows])
    axis.bar_label(bars, [seconds(time_s) for time_s in times], padding=2, fontsize="small")
    axis.invert_yaxis()
    axis.set(xlabel="seconds, median", xlim=(0, 1.18 * max(times)))
    axis.grid(True, axis="x", linewidth=0.4, alpha=0.5)
    axis.set_axisbelow(True)


def _sizes(axis: Axes, rows: Sequence[dict[str, Any]]) -> None:
    densities = sorted({row["density"] for row in rows if row["density"]}, reverse=True)
    for name in dict.fromkeys(row["name"] for row in rows):
        points = sorted(
            (row["elements"], row["seconds_median"], row["simulated"]) for row in rows if row["name"] == name
        )
        algorithm = name.split("@")[0].split(":")[0]
        colour, dashed = COLOURS.get(algorithm, "#444444"), ":" if name.endswith(":fp16") else "-"
        density = next(row["density"] for row in rows if row["name"] == name)
        # the lower densities are paler
        style: dict[str, Any] = {"color": colour, "alpha": 1.0 if density in (None, *densities[:1]) else 0.5}
        axis.plot([x for x, _, _ in points], [y for _, y, _ in points], dashed, linewidth=1.3, label=name, **style)
        measured = [(x, y) for x, y, is_simulated in points if not is_simulated]
        # what was measured is a filled mark, the planner's price has none
        axis.plot([x for x, _ in measured], [y for _, y in measured], "o", markersize=4, **style)
    axis.set(xscale="log", yscale="log", xlabel="elements", ylabel="seconds; marks: measured")
    axis.grid(True, which="major", linewidth=0.4, alpha=0.5)


def _steps(axis: Axes, rows: Sequence[dict[str, Any]]) -> None:
    names = [row["name"] + ("*" if row["simulated"] else "") for row in rows]
    left = [0.0] * len(rows)
    steps = list(dict.fromkeys(name for row in rows for name in row["levels_seconds"]))
    for step, colour in zip(steps, STEPS, strict=False):
        widths = [row["levels_seconds"].get(step, 0.0) for row in rows]
        axis.barh(names, widths, left=left, color=colour, label=step)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axis.invert_yaxis()
    axis.set(xlabel="seconds, mean over the ranks")
