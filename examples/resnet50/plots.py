"""The plot of a training, as a PNG file; matplotlib is needed for it alone."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from images.manifest import write_whole

from .rows import Row
from .settings import Settings
from .views import kind_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette.
TOP1, TOP5, SPEED, RATE, MOMENTUM = "#E69F00", "#0072B2", "#009E73", "#D55E00", "#CC79A7"
SHADES = ("#F5F5F5", "#E6E6E6")
# Above the lines there is room for the phases' names; a phase with less than this share of the width has none.
ROOM, NARROWEST = 1.2, 0.06


def draw(settings: Settings, rows: Sequence[Row], path: Path) -> None:
    """Draw accuracy over the hours, and images per second, learning rate and momentum over the epochs.

    Args:
        settings: of the training.
        rows: of its epochs, at least one.
        path: of the picture; an older one is replaced when the new one is whole.
    """
    from matplotlib.figure import Figure

    # without pyplot, which would look for a display and keep the figure open
    figure = Figure(figsize=(11, 7), layout="constrained")
    panels = figure.subplot_mosaic([["accuracy", "accuracy"], ["speed", "rate"]], height_ratios=(5, 4))
    _accuracy(panels["accuracy"], settings, rows)
    _speed(panels["speed"], rows)
    _rate(panels["rate"], rows)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, format="png")
    write_whole(path, drawn.getvalue())


def _accuracy(axis: Axes, settings: Settings, rows: Sequence[Row]) -> None:
    ends = [row["hours"] for row in rows]
    axis.set_xlim(0, ends[-1])
    _shade(axis, rows, [row["hours"] - row["seconds"] / 3600 for row in rows], ends)
    seen = [row for row in rows if "top5" in row]
    for key, label, colour in (("top5", "top-5", TOP5), ("top1", "top-1", TOP1)):
        if seen:
            axis.plot(
                [row["hours"] for row in seen],
                [100 * row[key] for row in seen],
                "o-",
                color=colour,
                markersize=3.5,
                label=f"{label}: {seen[-1][key]:.1%} at the end",
            )
    if settings.target is not None:
        label = f"target: top-5 of {settings.target:.1%}"
        axis.axhline(100 * settings.target, color="black", linewidth=0.8, linestyle=":", label=label)
    axis.set(
        title="accuracy over the hours that count; white: starts of jobs and phases",
        xlabel="hours",
        ylabel="validation pictures right, %",
    )
    highest = [settings.target or 0.0, *(row["top5"] for row in seen)]
    axis.set_ylim(0, ROOM * 100 * (max(highest) or 1))
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[1]:
        axis.legend(loc="best")


def _speed(axis: Axes, rows: Sequence[Row]) -> None:
    numbers = _over_epochs(axis, rows)
    axis.plot(numbers, [row["images_per_s"] for row in rows], "o-", color=SPEED, markersize=3.5)
    axis.set(title="speed, without the first step of an epoch", ylabel="images per second")
    axis.set_ylim(0, ROOM * max(row["images_per_s"] for row in rows))
    axis.grid(alpha=0.3)


def _rate(axis: Axes, rows: Sequence[Row]) -> None:
    numbers = _over_epochs(axis, rows)
    other = axis.twinx()
    axis.set_title("at the end of each epoch")
    for one, key, colour, style in ((axis, "learning_rate", RATE, "o-"), (other, "momentum", MOMENTUM, "s--")):
        values = [row[key] for row in rows]
        one.plot(numbers, values, style, color=colour, markersize=3.5)
        one.set_ylabel(key.replace("_", " "), color=colour)
        one.tick_params("y", labelcolor=colour)
        lowest = 0.0 if one is axis else min(values) - 0.01
        one.set_ylim(lowest, lowest + ROOM * (max(values) - lowest or 1))
    axis.grid(alpha=0.3)


def _over_epochs(axis: Axes, rows: Sequence[Row]) -> list[int]:
    """Prepare an axis over epochs; give their numbers, from 1."""
    from matplotlib.ticker import MaxNLocator

    numbers = [row["epoch"] + 1 for row in rows]
    axis.set_xlabel("epoch")
    axis.set_xlim(numbers[0] - 0.5, numbers[-1] + 0.5)
    _shade(axis, rows, [number - 0.5 for number in numbers], [number + 0.5 for number in numbers])
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return numbers


def _shade(axis: Axes, rows: Sequence[Row], begins: Sequence[float], ends: Sequence[float]) -> None:
    """Give each phase its background, and its name if it is wide enough; the limits of the axis are known."""
    left, right = axis.get_xlim()
    for number in sorted({row["phase"] for row in rows}):
        here = [place for place, row in enumerate(rows) if row["phase"] == number]
        begin, end, row = begins[here[0]], ends[here[-1]], rows[here[0]]
        axis.axvspan(begin, end, color=SHADES[number % 2], linewidth=0, zorder=0)
        if end - begin < NARROWEST * (right - left):
            continue
        axis.annotate(
            f"{row['pixels']} px\n{kind_of(row['compression'])}",
            ((begin + end) / 2, 1),
            (0, -3),
            xycoords=axis.get_xaxis_transform(),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize="x-small",
            color="#555555",
        )
