"""What came of the study of stragglers: its table on the terminal, its page, and its plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.studies.markdown import table as markdown_table, where
from hvd_ext.bench.plots import LINES, selected
from hvd_ext.bench.results import cluster_name
from hvd_ext.bench.table import WRONG, drawn, faults_of, ratio, seconds
from hvd_ext.commands.figures import finish, panels
from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BENCHMARK = "stragglers, trained steps with sleeps"
HEADINGS = (
    *("cluster", "workload", "what", "step", "median", "played", "x full", "x Horovod", "x full, played", "x played"),
    *("active ranks", "stale", "loss", "x full's loss"),
)
CAPTION = (
    "means of the time between two steps; x: full's step, or Horovod's, over this one, above 1 is faster; played: by "
    "the model of rounds, with the times that the ranks slept; x played: x full over the played one; active ranks: "
    "whose gradient is on time; stale: mean rounds by which gradients come late; loss: on data that was not trained"
)
NAMES = {"delay": "full, delay=1", "horovod": "Horovod"}

# From the palette of Okabe and Ito, in the order in which most readers want to compare them.
COLOURS = {
    "solo": "#E69F00",
    "majority": "#0072B2",
    "quorum": "#56B4E9",
    "auto": "#009E73",
    "horovod": "#555555",
    "delay": "#CC79A7",
}
BARS = LINES - 1  # the model is in the legend too


def words_of(row: Mapping[str, Any]) -> str:
    """Name a row of the study: the mode, and for how many gradients its rounds have waited at last."""
    name = NAMES.get(row["mode"], row["mode"])
    return name if row["quorum"] is None else f"{name} ({row['quorum'][-1]})"


def staleness(row: Mapping[str, Any]) -> float | None:
    """Give the mean staleness of the gradients of a row of the study; None where all wait for all."""
    counts = row["stale_gradients"]
    return None if counts is None else sum(late * count for late, count in enumerate(counts)) / sum(counts)


def cells_of(row: Mapping[str, Any]) -> list[str]:
    """Write a row of the study without its place."""
    active, stale = row["active_ranks"], staleness(row)
    return [
        words_of(row) + ("" if row["correct"] else WRONG),
        seconds(row["step_seconds_mean"]),
        seconds(row["step_seconds_median"]),
        "" if row["played_seconds_mean"] is None else seconds(row["played_seconds_mean"]),
        ratio(row["x_full"]),
        ratio(row["x_horovod"]),
        ratio(row["x_full_played"]),
        ratio(row["x_played"]),
        "" if active is None else f"{active:.1f}",
        ratio(stale),
        f"{row['loss']:.4g}",
        f"{row['loss_over_full']:.4f}",
    ]


def table(result: Mapping[str, Any]) -> Table:
    """Draw a result of the study: a row for each cluster, workload and mode."""
    lines = []
    last: Any = None
    for row in result["rows"]:
        place = (row["run"], row["ranks_per_host"], row["workload"])
        line = [
            "" if last is not None and place[:2] == last[:2] else cluster_name(row),
            "" if place == last else row["workload"],
            *cells_of(row),
        ]
        lines.append((place, line, not row["correct"]))
        last = place
    return drawn(result["benchmark"], CAPTION, HEADINGS, lines, ("cluster", "workload", "what"))


def faults(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write a line for each wrong row of the study."""
    return faults_of(rows, "training", lambda row: f"{words_of(row)}, {row['workload']}, {cluster_name(row)} ranks")


def markdown(result: Mapping[str, Any]) -> str:
    """Write a result of the study as Markdown: machine, versions, and a table with every row."""
    lines = [[cluster_name(row), row["workload"], *cells_of(row)] for row in result["rows"]]
    wrong = "".join(f"- {line}\n" for line in faults(result["rows"]))
    told = f"{where(result['runs'][0])} Means of {result['rows'][0]['steps']} steps."
    return f"{told}\n\n{markdown_table(HEADINGS, lines)}" + (f"\n{wrong}" if wrong else "")


def draw(rows: Sequence[Mapping[str, Any]], path: Path, only: Sequence[str] = ()) -> None:
    """Draw how many times as fast as "full" each mode is, by workload, a panel for each cluster.

    The black line across a bar is what the model of rounds says.

    Args:
        rows: of one result of the study or of several; of rows measured again, the last counts.
        path: of the file.
        only: at most five modes; empty: the first five of `COLOURS`.

    Raises:
        InvalidError: nothing to draw, an unknown mode, too many of them, or no matplotlib.
    """
    bars = {(cluster_name(row), row["workload"], row["mode"]): row for row in rows if row["mode"] in COLOURS}
    if not bars:
        raise InvalidError("plot (no rows): there is nothing to draw; name results of the study")
    present = [mode for mode in COLOURS if any(key[-1] == mode for key in bars)]
    names = selected(present, only, BARS)
    bars = {key: row for key, row in bars.items() if key[-1] in names}
    clusters = list(dict.fromkeys(key[0] for key in bars))
    most = max(len({key[1] for key in bars if key[0] == cluster}) for cluster in clusters)
    figure, axes = panels(len(clusters), 1, max(6.0, 1.0 + 1.4 * most), 3.8, 1.8)
    for cluster, axis in zip(clusters, axes, strict=True):
        _speeds(axis, [row for key, row in bars.items() if key[0] == cluster], names)
        axis.set_title(f"{cluster} ranks")
    left_out = [] if only else [NAMES.get(mode, mode) for mode in present if mode not in names]
    finish(figure, left_out, path)


def _speeds(axis: Axes, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    width = 0.8 / len(names)
    played: list[tuple[float, float]] = []
    for number, name in enumerate(names):
        mine = [row for row in rows if row["mode"] == name]
        x = [workloads.index(row["workload"]) + (number + 0.5) * width - 0.4 for row in mine]
        axis.bar(x, [row["x_full"] for row in mine], width, color=COLOURS[name], label=NAMES.get(name, name))
        played += [(at, row["x_full_played"]) for at, row in zip(x, mine, strict=True) if row["x_full_played"]]
    begins, ends = [at - width / 2 for at, _ in played], [at + width / 2 for at, _ in played]
    axis.hlines([speed for _, speed in played], begins, ends, color="black", linewidth=1.6, label="model of rounds")
    axis.axhline(1.0, color="black", linestyle=":", linewidth=0.8)
    axis.set_ylabel("times as fast as full")
    axis.set_xticks(range(len(workloads)), workloads)
