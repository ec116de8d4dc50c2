"""The plot of the straggler benchmark, as a PNG file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_ext.bench.plots import LINES, finish, panels, selected
from hvd_ext.bench.results import cluster_name
from hvd_ext.bench.table import STRAGGLERS_NAMES
from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


def draw_stragglers(rows: Sequence[Mapping[str, Any]], path: Path, only: Sequence[str] = ()) -> None:
    """Draw how many times as fast as "full" each mode is, by workload, a panel for each cluster.

    The black line across a bar is what the model of rounds says.

    Args:
        rows: of one result of bench stragglers or of several; of rows measured again, the last counts.
        path: of the file.
        only: at most five modes; empty: the first five of `COLOURS`.

    Raises:
        InvalidError: nothing to draw, an unknown mode, too many of them, or no matplotlib.
    """
    bars = {(cluster_name(row), row["workload"], row["mode"]): row for row in rows if row["mode"] in COLOURS}
    if not bars:
        raise InvalidError("plot (no rows): there is nothing to draw; name results of bench stragglers")
    present = [mode for mode in COLOURS if any(key[-1] == mode for key in bars)]
    names = selected(present, only, BARS)
    bars = {key: row for key, row in bars.items() if key[-1] in names}
    clusters = list(dict.fromkeys(key[0] for key in bars))
    most = max(len({key[1] for key in bars if key[0] == cluster}) for cluster in clusters)
    figure, axes = panels(len(clusters), 1, max(6.0, 1.0 + 1.4 * most), 3.8, 1.8)
    for cluster, axis in zip(clusters, axes, strict=True):
        _speeds(axis, [row for key, row in bars.items() if key[0] == cluster], names)
        axis.set_title(f"{cluster} ranks")
    left_out = [] if only else [STRAGGLERS_NAMES.get(mode, mode) for mode in present if mode not in names]
    finish(figure, left_out, path)


def _speeds(axis: Axes, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    width = 0.8 / len(names)
    played: list[tuple[float, float]] = []
    for number, name in enumerate(names):
        mine = [row for row in rows if row["mode"] == name]
        x = [workloads.index(row["workload"]) + (number + 0.5) * width - 0.4 for row in mine]
        axis.bar(x, [row["x_full"] for row in mine], width, color=COLOURS[name], label=STRAGGLERS_NAMES.get(name, name))
        played += [(at, row["x_full_played"]) for at, row in zip(x, mine, strict=True) if row["x_full_played"]]
    begins, ends = [at - width / 2 for at, _ in played], [at + width / 2 for at, _ in played]
    axis.hlines([speed for _, speed in played], begins, ends, color="black", linewidth=1.6, label="model of rounds")
    axis.axhline(1.0, color="black", linestyle=":", linewidth=0.8)
    axis.set_ylabel("times as fast as full")
    axis.set_xticks(range(len(workloads)), workloads)
