"""The plot of the top-k benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_ext.bench.plots import DPI
from hvd_ext.bench.topk import NAMES
from hvd_ext.bench.topk_inputs import ORDINARY
from hvd_ext.bench.topk_results import place_of, share_of
from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = ("bars", "sizes")
# The no-op is not drawn: it would make the axis two decades longer. Okabe and Ito's palette, as in the other plots;
# ours are the warm ones, opponents cold or grey.
COLOURS = {
    "exact": "#D55E00",
    "graph": "#E69F00",
    "segments": "#CC79A7",
    "mstopk": "#F0E442",
    "dgc": "#999933",
    "threshold": "#882255",
    "random": "#AA4499",
    "algorithm1": "#0072B2",
    "algorithm1-tf": "#56B4E9",
    "dgc-tf": "#44AA99",
    "tf": "#009E73",
    "torch": "#332288",
    "numpy": "#777777",
}


def draw(rows: Sequence[Mapping[str, Any]], path: Path, kind: str = "bars") -> None:
    """Draw rows into a PNG file; see `figure`.

    Args:
        rows: of one result or of several.
        path: of the file.
        kind: as for `figure`.

    Raises:
        InvalidError: an unknown kind, nothing to draw, or no matplotlib.
    """
    figure(rows, kind).savefig(path, dpi=DPI, format="png")


def figure(rows: Sequence[Mapping[str, Any]], kind: str = "bars") -> Figure:
    """Draw selections.

    Args:
        rows: of one result or of several; of two rows of the same kind the later counts. Drawn are distributions and
            gradients, and what stands beside a read pass.
        kind: "bars": the time over one read pass by input and contestant, a panel for each length, density and number
            of threads; "sizes": the time over the length (CommLib, Fig. 6), a panel for each density, number of threads
            and input.

    Returns:
        The panels; the pass is the dashed line.

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
        (place_of(row), row["input"], row["contestant"]): row
        for row in rows
        if row["beside"] == "pass" and row["input"] in ORDINARY and row["contestant"] in COLOURS
    }
    if not kept:
        raise InvalidError(
            "plot (no rows): there is nothing to draw; name results of bench topk with gauss or the like"
        )
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for row in kept.values():
        title = place_of(row) if kind == "bars" else f"{share_of(row)}, {row['input']}"
        panels.setdefault(title, []).append(row)
    columns = min(len(panels), 2)
    lines = -(-len(panels) // columns)
    drawn = Figure(figsize=(6.5 * columns + 3.0, 3.4 * lines), layout="constrained")
    axes = list(drawn.subplots(lines, columns, squeeze=False).flat)
    for (title, found), axis in zip(panels.items(), axes, strict=False):
        (_bars if kind == "bars" else _sizes)(axis, found)
        axis.set_title(title)
    for axis in axes[len(panels) :]:
        axis.remove()
    named = {
        label: handle for axis in drawn.axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    drawn.legend(named.values(), named.keys(), loc="outside right center", frameon=False)
    return drawn


def _bars(axis: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    inputs = [name for name in ORDINARY if any(row["input"] == name for row in rows)]
    contestants = [name for name in COLOURS if any(row["contestant"] == name for row in rows)]
    width = 0.85 / len(contestants)
    for number, name in enumerate(contestants):
        mine = [row for row in rows if row["contestant"] == name]
        x = [inputs.index(row["input"]) + (number + 0.5) * width - 0.425 for row in mine]
        axis.bar(x, [row["x_yardstick"] for row in mine], width, color=COLOURS[name], label=NAMES[name])
    axis.axhline(1.0, color="black", linestyle="--", linewidth=1.2, label="one prefetched read pass")
    axis.set(yscale="log", ylabel="time over one pass")
    axis.set_ylim(bottom=0.7 * min(1.0, *(row["x_yardstick"] for row in rows)))
    axis.set_xticks(range(len(inputs)), inputs)
    axis.grid(True, axis="y", linewidth=0.4, alpha=0.5)
    axis.set_axisbelow(True)


def _sizes(axis: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    for name in COLOURS:
        points = sorted((row["elements"], row["seconds_median"]) for row in rows if row["contestant"] == name)
        if points:
            axis.plot(*zip(*points, strict=True), "o-", color=COLOURS[name], markersize=4, label=NAMES[name])
    passes = {row["elements"]: row["yardstick_seconds_median"] for row in rows}
    axis.plot(*zip(*sorted(passes.items()), strict=True), "k--", linewidth=1.2, label="one prefetched read pass")
    axis.set(xscale="log", yscale="log", xlabel="elements", ylabel="seconds, median")
    axis.grid(True, which="major", linewidth=0.4, alpha=0.5)
