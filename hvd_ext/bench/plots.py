"""Plots of results: time over the size of the buffer, and time over the bound by cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_ext.bench.results import cluster_name
from hvd_ext.bench.table import NAMES
from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = ("auto", "sizes", "clusters")
HOWS = ("auto", "graph", "engine", "eager")
# More than six lines in a panel cannot be told apart; a bound or a yardstick is one of them.
LINES = 6
# Okabe and Ito's palette and some of Tol's, told apart also by those who see fewer colours. An algorithm keeps its
# colour and mark in all plots of allreduce, and no two have the same. Of too many the first ones are drawn.
STYLES = {
    "flexreduce": ("#D55E00", "o"),
    "blueconnect": ("#0072B2", "s"),
    "ring": ("#E69F00", "v"),
    "auto": ("#DDCC77", "*"),
    "mpi": ("#999999", "h"),
    "horovod": ("#555555", "p"),
    "torus2d": ("#009E73", "^"),
    "two_level": ("#CC79A7", "D"),
    "halving_doubling": ("#56B4E9", "P"),
    "recursive_doubling": ("#332288", "X"),
    "binary_tree": ("#882255", "<"),
    "tree": ("#999933", ">"),
}
DPI = 150


def selected(present: Sequence[str], only: Sequence[str], most: int = LINES) -> list[str]:
    """Choose the contestants of a plot.

    Args:
        present: those that there are, in the order in which they count.
        only: those that are asked for, in their order; empty: the first ones.
        most: how many there may be.

    Returns:
        At most `most` of them.

    Raises:
        InvalidError: one that is asked for is not there, or there are too many of them.
    """
    for name in only:
        if name not in present:
            raise InvalidError(f"only ({name!r}): must be one of the file's, which are {', '.join(present)}")
    if len(only) > most:
        raise InvalidError(f"only ({len(only)} names): a panel has at most {most} beside a bound; name fewer of them")
    return list(only) or list(present[:most])


def finish(figure: Figure, left_out: Sequence[str], path: Path) -> None:
    """Give a figure its legend, say what is not drawn, and write it.

    Args:
        figure: with its panels.
        left_out: contestants that nobody has left out by name.
        path: of the PNG file.
    """
    named = {text: one for axis in figure.axes for one, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    if named:
        figure.legend(named.values(), named.keys(), loc="outside right center", frameon=False)
    if left_out:
        figure.supxlabel(f"not drawn: {', '.join(left_out)}", fontsize="small", wrap=True)
    figure.savefig(path, dpi=DPI, format="png")


def draw(
    rows: Sequence[dict[str, Any]], path: Path, kind: str = "auto", how: str = "auto", only: Sequence[str] = ()
) -> None:
    """Draw rows into a PNG file.

    Args:
        rows: of one result or of several.
        path: of the file.
        kind: "sizes": time over bytes, a panel for each cluster, the bound dashed; "clusters": bars of the time over
            the bound by cluster, a panel for each size; "auto": the first where a cluster has several sizes.
        how: which of our calls: "graph", "engine", "eager"; "auto": of each cluster the first of these that is there.
        only: at most five algorithms, "mpi" and "horovod" too; empty: the first five of `STYLES`.

    Raises:
        InvalidError: an unknown kind, way or algorithm, too many of them, nothing to draw, or no matplotlib.
    """
    for name, value, valid in (("kind", kind, KINDS), ("how", how, HOWS)):
        if value not in valid:
            raise InvalidError(f"{name} ({value!r}): must be one of {', '.join(valid)}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidError("plot (matplotlib): it is not installed; python -m pip install matplotlib") from error
    chosen = _of_one_kind(rows, how)
    present = _ordered(chosen)
    drawn = selected(present, only, LINES - 1)
    chosen = [row for row in chosen if row["algorithm"] in drawn]
    clusters = list(dict.fromkeys(cluster_name(row) for row in chosen))
    sizes = sorted({row["bytes"] for row in chosen})
    several = any(len({row["bytes"] for row in chosen if cluster_name(row) == name}) > 1 for name in clusters)
    by_size = kind == "sizes" or (kind == "auto" and several)
    if not by_size:
        chosen = [row for row in chosen if row["bound_seconds"]]
        clusters = [name for name in clusters if any(cluster_name(row) == name for row in chosen)]
        sizes = sorted({row["bytes"] for row in chosen})
    if not chosen:
        raise InvalidError("plot (no rows): there is nothing to draw; bars over the bound need rows with bound_seconds")
    panels = clusters if by_size else sizes
    columns = min(len(panels), 3 if by_size else 1)
    lines = -(-len(panels) // columns)
    width = 5.0 * columns if by_size else max(6.0, 1.0 + 1.3 * len(clusters))
    # no pyplot: nothing of this process's display is touched, and nothing stays open
    figure = Figure(figsize=(width + 1.6, 3.8 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flat
    for panel, axis in zip(panels, axes, strict=False):
        if by_size:
            _times(axis, [row for row in chosen if cluster_name(row) == panel], str(panel))
        else:
            _bars(axis, [row for row in chosen if row["bytes"] == panel], int(panel))
    for axis in list(figure.axes)[len(panels) :]:
        axis.remove()
    finish(figure, [] if only else [NAMES.get(name, name) for name in present if name not in drawn], path)


def _of_one_kind(rows: Sequence[dict[str, Any]], how: str) -> list[dict[str, Any]]:
    """Of each cluster the rows of one way to call, so that bars and lines of it can be compared."""
    found: dict[tuple[str, int, str], dict[str, Any]] = {}
    for cluster in dict.fromkeys(cluster_name(row) for row in rows):
        here = [row for row in rows if cluster_name(row) == cluster]
        ours = {row["how"] for row in here if row["algorithm"] not in NAMES}
        way = next((name for name in HOWS[1:] if name in ours), "") if how == "auto" else how
        theirs = {row["how"] for row in here if row["algorithm"] == "horovod"}
        wanted = {"mpi": "engine", "horovod": way if way in theirs else "graph"}
        for row in here:
            if row["algorithm"] != "noop" and row["how"] == wanted.get(row["algorithm"], way):
                found[cluster, row["bytes"], row["algorithm"]] = row  # measured again, the later row counts
    return list(found.values())


def _label(algorithm: str) -> str:
    return NAMES.get(algorithm, algorithm)


def _times(axis: Axes, rows: Sequence[dict[str, Any]], cluster: str) -> None:
    for algorithm in _ordered(rows):
        points = sorted((row["bytes"], row["seconds_median"]) for row in rows if row["algorithm"] == algorithm)
        colour, mark = STYLES.get(algorithm, ("#444444", "o"))
        x, y = zip(*points, strict=True)
        axis.plot(x, y, color=colour, marker=mark, markersize=5, linewidth=1.4, label=_label(algorithm))
    bound = sorted(
        {(row["bytes"], row["bound_seconds"]) for row in rows if row["bound_seconds"] and row["algorithm"] != "ring"}
    )
    if bound:
        x, y = zip(*bound, strict=True)
        axis.plot(x, y, color="black", linestyle="--", linewidth=1.2, label="bound")
    axis.set(xscale="log", yscale="log", xlabel="bytes", ylabel="seconds, median", title=f"{cluster} ranks")
    axis.grid(True, which="major", linewidth=0.4, alpha=0.5)


def _bars(axis: Axes, rows: Sequence[dict[str, Any]], nbytes: int) -> None:
    clusters = list(dict.fromkeys(cluster_name(row) for row in rows))
    algorithms = _ordered(rows)
    width = 0.8 / len(algorithms)
    # every bar over the bound of any allreduce, also the ring's: else it would look as good as the others
    bounds = {cluster_name(row): row["bound_seconds"] for row in sorted(rows, key=lambda row: -row["bound_seconds"])}
    for place, algorithm in enumerate(algorithms):
        values = [
            (clusters.index(name) + (place + 0.5) * width - 0.4, row["seconds_median"] / bounds[name])
            for row in rows
            if row["algorithm"] == algorithm and (name := cluster_name(row))
        ]
        x, y = zip(*values, strict=True)
        axis.bar(x, y, width, color=STYLES.get(algorithm, ("#444444", "o"))[0], label=_label(algorithm))
    axis.axhline(1.0, color="black", linestyle="--", linewidth=1.2, label="bound")
    axis.set(ylabel="time over the bound", title=f"allreduce of {nbytes / 1e6:g} MB")
    axis.set_xticks(range(len(clusters)), clusters)
    axis.set_xlim(-0.5, len(clusters) - 0.5)
    axis.set_xlabel("ranks on each host")


def _ordered(rows: Sequence[dict[str, Any]]) -> list[str]:
    present = list(dict.fromkeys(row["algorithm"] for row in rows))
    order = list(STYLES)
    return sorted(present, key=lambda name: order.index(name) if name in order else len(order))
