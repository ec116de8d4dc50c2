"""The plot of the schedule benchmark, as a PNG file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_ext.bench.plots import LINES, finish, panels, selected
from hvd_ext.bench.results import cluster_name
from hvd_ext.commands.figures import BUCKETERS
from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ORDER = ("auto", "mgwfbp", "wfbp", "single", "by_size", "optimal")  # in which most readers want to compare them
BARS = LINES - 2  # computing and the prediction are in the legend too


def draw_schedule(rows: Sequence[Mapping[str, Any]], path: Path, only: Sequence[str] = ()) -> None:
    """Draw the step by ratio and bucketer, a panel for each model and cluster.

    The dark part of a bar is computing, and the black line across it the predicted step.

    Args:
        rows: of one result of bench schedule or of several; of rows measured again, the last counts.
        path: of the file.
        only: at most four bucketers; empty: the first four of `ORDER`.

    Raises:
        InvalidError: nothing to draw, an unknown bucketer, too many of them, or no matplotlib.
    """
    bars = {(row["model"], row["bytes"], cluster_name(row), row["ratio"], row["bucketer"]): row for row in rows}
    if not bars:
        raise InvalidError("plot (no rows): there is nothing to draw; name results of bench schedule")
    present = list(dict.fromkeys([*(name for name in ORDER if any(key[-1] == name for key in bars)), *_others(bars)]))
    names = selected(present, only, BARS)
    bars = {key: row for key, row in bars.items() if key[-1] in names}
    places = list(dict.fromkeys(key[:3] for key in bars))
    figure, axes = panels(len(places), 3, 4.6, 3.8, 1.4)
    for place, axis in zip(places, axes, strict=True):
        _steps(axis, [row for key, row in bars.items() if key[:3] == place], names)
    finish(figure, [] if only else [name for name in present if name not in names], path)


def _others(bars: Mapping[tuple[Any, ...], Any]) -> list[str]:
    return sorted({key[-1] for key in bars} - set(ORDER))


def _steps(axis: Axes, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    ratios = sorted({row["ratio"] for row in rows})
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        mine = [row for row in rows if row["bucketer"] == name]
        x = [ratios.index(row["ratio"]) + (number + 0.5) * width - 0.4 for row in mine]
        colour, _ = BUCKETERS.get(name, ("#999999", ""))
        axis.bar(x, [row["seconds_median"] for row in mine], width, color=colour, label=name)
        last = number == len(names) - 1
        computing = [row["compute_seconds"] for row in mine]
        axis.bar(x, computing, width, color="#333333", label="computing" if last else None)
        predicted = [row["predicted_seconds"] for row in mine]
        begins, ends = [at - width / 2 for at in x], [at + width / 2 for at in x]
        axis.hlines(predicted, begins, ends, color="black", linewidth=1.6, label="predicted" if last else None)
    one = rows[0]
    axis.set(ylabel="seconds per step, median", xlabel="communication over computing")
    axis.set_title(f"{one['model']}, {one['bytes'] / 1e6:.1f} MB, {cluster_name(one)} ranks")
    axis.set_xticks(range(len(ratios)), [f"{ratio:.3g}" for ratio in ratios])
