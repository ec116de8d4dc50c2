"""What came of the study of buckets: its table on the terminal, its page, and its plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.studies.markdown import facts, table as markdown_table
from hvd_ext.bench.plots import LINES, selected
from hvd_ext.bench.results import cluster_name
from hvd_ext.bench.table import WRONG, drawn, faults_of, ratio, seconds
from hvd_ext.commands.figures import BUCKETERS, finish, panels
from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BENCHMARK = "schedule, replayed steps, float32"
HEADINGS = (
    *("cluster", "model", "ratio", "bucketer", "buckets", "predicted", "step", "fastest", "x predicted", "exposed"),
    *("x best", "x single", "late"),
)
CAPTION = (
    "medians of the slowest rank's steps; ratio: communication, of all gradients in one bucket and alone, over "
    "computing; delay: results come one step late; x predicted: step over the predicted one; exposed: what "
    "communication adds to computing; x best: step over that of the fastest bucketer but auto; x single: single's step "
    "over this one, above 1 is faster; late: how late tensors were handed over, 99th percentile"
)
ORDER = ("auto", "mgwfbp", "wfbp", "single", "by_size", "optimal")  # in which most readers want to compare them
BARS = LINES - 2  # computing and the prediction are in the legend too


def words_of(row: Mapping[str, Any]) -> str:
    """Name a row of the study: the bucketer, and which one "auto" has chosen."""
    return row["bucketer"] if row["chosen"] in ("", row["bucketer"]) else f"{row['bucketer']} -> {row['chosen']}"


def place_of(row: Mapping[str, Any]) -> str:
    """Name what was replayed: "resnet50 x 0.0625, ratio 1"."""
    scale = "" if row["scale"] == 1 else f" x {row['scale']:g}"
    return f"{row['model']}{scale}, ratio {row['ratio']:.3g}"


def cells_of(row: Mapping[str, Any]) -> list[str]:
    """Write a row, one text for each of `HEADINGS`."""
    return [
        cluster_name(row),
        f"{row['model']}, {row['bytes'] / 1e6:.1f} MB",
        f"{row['ratio']:.3g}",
        words_of(row) + ("" if row["correct"] else WRONG),
        str(len(row["buckets"])),
        seconds(row["predicted_seconds"]),
        seconds(row["seconds_median"]),
        seconds(row["seconds_min"]),
        ratio(row["x_predicted"]),
        seconds(max(row["exposed_seconds"], 0.0)),
        ratio(row["x_best"]),
        ratio(row["x_single"]),
        seconds(row["late_seconds_p99"]),
    ]


def table(result: Mapping[str, Any]) -> Table:
    """Draw a result of the study: a row for each cluster, model, ratio and bucketer."""
    lines = []
    last: tuple[Any, ...] = ()
    for row in result["rows"]:
        place = (row["run"], row["ranks_per_host"], row["model"], row["ratio"])
        cells = cells_of(row)
        for column in range(3):  # what the row has in common with the one above it
            if place[: column + 2] == last[: column + 2]:
                cells[column] = ""
        lines.append((place, cells, not row["correct"]))
        last = place
    return drawn(result["benchmark"], CAPTION, HEADINGS, lines, ("cluster", "model", "bucketer"))


def faults(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write a line for each wrong row of the study."""
    return faults_of(rows, "result", lambda row: f"{words_of(row)}, {place_of(row)}, {cluster_name(row)} ranks")


def markdown(result: Mapping[str, Any]) -> str:
    """Write a result of the study as Markdown: machine, versions, and a table with every row."""
    lines = map(cells_of, result["rows"])
    wrong = "".join(f"- {line}\n" for line in faults(result["rows"]))
    return f"{facts(result)}\n\n{markdown_table(('ranks', *HEADINGS[1:]), lines)}" + (f"\n{wrong}" if wrong else "")


def draw(rows: Sequence[Mapping[str, Any]], path: Path, only: Sequence[str] = ()) -> None:
    """Draw the step by ratio and bucketer, a panel for each model and cluster.

    The dark part of a bar is computing, and the black line across it the predicted step.

    Args:
        rows: of one result of the study or of several; of rows measured again, the last counts.
        path: of the file.
        only: at most four bucketers; empty: the first four of `ORDER`.

    Raises:
        InvalidError: nothing to draw, an unknown bucketer, too many of them, or no matplotlib.
    """
    bars = {(row["model"], row["bytes"], cluster_name(row), row["ratio"], row["bucketer"]): row for row in rows}
    if not bars:
        raise InvalidError("plot (no rows): there is nothing to draw; name results of the study")
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
