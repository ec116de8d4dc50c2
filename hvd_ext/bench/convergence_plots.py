"""Plots of a convergence study: accuracy over epochs and over time, a column for each model."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_ext.bench.convergence_results import DENSE, mean_curve, seconds_after
from hvd_ext.bench.plots import finish, selected
from hvd_ext.errors import InvalidError

# Okabe and Ito's palette.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00")


def draw(found: Mapping[str, Any], path: Path, only: Sequence[str] = ()) -> None:
    """Draw the curves into a PNG file.

    Args:
        found: of `convergence_results.collected`.
        path: of the file.
        only: at most six settings; empty: the first six of the study.

    Raises:
        InvalidError: an unknown setting, too many of them, nothing to draw, or no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidError("plot (matplotlib): it is not installed; python -m pip install matplotlib") from error
    models = list(dict.fromkeys(row["model"] for row in found["rows"]))
    if not models:
        raise InvalidError("plot (no runs): there is nothing to draw")
    present = [name for name in found["study"]["settings"] if any(row["setting"] == name for row in found["rows"])]
    drawn = selected(present, only)
    # dense is black
    colour_of = {DENSE: "#000000", **dict(zip((name for name in drawn if name != DENSE), COLOURS, strict=False))}
    figure = Figure(figsize=(5.0 * len(models) + 1.5, 7.6), layout="constrained")
    axes = figure.subplots(2, len(models), squeeze=False)
    for column, model in enumerate(models):
        rows = [row for row in found["rows"] if row["model"] == model and row["setting"] in drawn]
        for row in sorted(rows, key=lambda row: drawn.index(row["setting"])):
            curve = mean_curve(row)
            values = [100 * accuracy for _, accuracy in curve]
            style = {"color": colour_of[row["setting"]], "linewidth": 2.0 if row["setting"] == DENSE else 1.2}
            epochs = range(1, len(curve) + 1)
            axes[0][column].plot(epochs, values, label=row["setting"], **style)
            spread = [
                100 * statistics.stdev(point["accuracy"] for point in points) if len(points) > 1 else 0.0
                for points in zip(*row["curves"].values(), strict=True)
            ]
            low, high = ([value + sign * s for value, s in zip(values, spread, strict=True)] for sign in (-1, 1))
            axes[0][column].fill_between(epochs, low, high, color=style["color"], alpha=0.12, linewidth=0)
            times = [seconds_after(row, steps) for steps, _ in curve]
            known = [(time_s, value) for time_s, value in zip(times, values, strict=True) if time_s is not None]
            axes[1][column].plot([x for x, _ in known], [y for _, y in known], label=row["setting"], **style)
        axes[0][column].set(title=model, xlabel="epochs", ylabel="accuracy, %")
        axes[0][column].xaxis.get_major_locator().set_params(integer=True)
        axes[1][column].set(xlabel=f"seconds at {found['study']['rate']}", ylabel="accuracy, %")
        if axes[1][column].lines and any(len(line.get_xdata()) for line in axes[1][column].lines):
            axes[1][column].set_xscale("log")
        else:
            axes[1][column].set_visible(False)
        for axis in (axes[0][column], axes[1][column]):
            axis.grid(True, linewidth=0.4, alpha=0.5)
    finish(figure, [] if only else [name for name in present if name not in drawn], path)
