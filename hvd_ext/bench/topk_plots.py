"""The plot of the top-k benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_ext.bench.plots import LINES, finish, selected
from hvd_ext.bench.topk import NAMES
from hvd_ext.bench.topk_inputs import ORDINARY
from hvd_ext.bench.topk_results import place_of, share_of
from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = ("bars", "sizes")
# The no-op is not drawn: it would make the axis two decades longer. Okabe and Ito's palette, and Tol's; the first ones
# are what most readers want to compare.
COLOURS = {
    "exact": "#D55E00",
    "algorithm1": "#0072B2",
    "tf": "#009E73",
    "torch": "#332288",
    "numpy": "#999999",
    "dgc-tf": "#44AA99",
    "graph": "#E69F00",
    "segments": "#CC79A7",
    "mstopk": "#F0E442",
    "dgc": "#999933",
    "threshold": "#882255",
    "random": "#AA4499",
    "algorithm1-tf": "#56B4E9",
}


def draw(rows: Sequence[Mapping[str, Any]], path: Path, kind: str = "bars", only: Sequence[str] = ()) -> None:
    """Draw selections into a PNG file.

    Args:
        rows: of one result or of several; of two rows of the same kind the later counts. Drawn are distributions and
            gradients, and what stands beside a read pass.
        path: of the file.
        kind: "bars": the time over one read pass by input and contestant, a panel for each length, density and number
            of threads; "sizes": the time over the length (CommLib, Fig. 6), a panel for each density, number of threads
            and input. The pass is the dashed line.
        only: at most five contestants; empty: the first five of `COLOURS`.

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
        (place_of(row), row["input"], row["contestant"]): row
        for row in rows
        if row["beside"] == "pass" and row["input"] in ORDINARY and row["contestant"] in COLOURS
    }
    if not kept:
        raise InvalidError(
            "plot (no rows): there is nothing to draw; name results of bench topk with gauss or the like"
        )
    present = [name for name in COLOURS if any(row["contestant"] == name for row in kept.values())]
    names = selected(present, only, LINES - 1)
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for row in (row for row in kept.values() if row["contestant"] in names):
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
    finish(drawn, [] if only else [NAMES[name] for name in present if name not in names], path)


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
