"""The plots of the benchmarks, as PNG files; matplotlib is needed for them alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_ext.bench.jobs import check_choices
from hvd_ext.bench.results import YARDSTICKS, cluster_name
from hvd_ext.bench.table import NAMES, TRAINING_NAMES
from hvd_ext.commands.figures import finish, panels
from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = ("auto", "sizes", "clusters")
HOWS = ("auto", "graph", "engine", "eager")
# More than six lines in a panel cannot be told apart; a bound or a yardstick counts as one.
LINES = 6
# The palette of Okabe and Ito with some colours of Tol's, which people with few colours can tell apart too. An
# algorithm has the same colour and mark in all plots, and no two algorithms share one. Of too many the first are drawn.
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
    "tcp": ("#117733", "d"),
    "memory": ("#AA4499", "H"),
}
# The digits of scikit-learn, which one epoch trains.
EPOCH = 1797


def selected(present: Sequence[str], only: Sequence[str], most: int = LINES) -> list[str]:
    """Choose the contestants of a plot.

    Args:
        present: those that there are, the most important first.
        only: those that the user wants; empty for the first ones.

    Raises:
        InvalidError: one of `only` is not there, or there are too many.
    """
    for name in only:
        if name not in present:
            raise InvalidError(f"only ({name!r}): must be one of the names in the file, which are {', '.join(present)}")
    if len(only) > most:
        raise InvalidError(f"only ({len(only)} names): a panel shows at most {most} beside a bound; name fewer")
    return list(only) or list(present[:most])


def _ordered(names: Sequence[str], order: Sequence[str]) -> list[str]:
    present = list(dict.fromkeys(names))
    return sorted(present, key=lambda name: order.index(name) if name in order else len(order))


def _algorithms(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return _ordered([row["algorithm"] for row in rows], list(STYLES))


def draw_allreduce(
    rows: Sequence[dict[str, Any]], path: Path, kind: str = "auto", how: str = "auto", only: Sequence[str] = ()
) -> None:
    """Draw rows of bench allreduce.

    Args:
        kind: "sizes": time over bytes, a panel for each cluster, the bound dashed; "clusters": bars of the time over
            the bound by cluster, a panel for each size; "auto": the first if a cluster has several sizes.
        how: which of our calls: "graph", "engine", "eager"; "auto": of each cluster the first of these that is there.
        only: at most five algorithms, "mpi", "horovod", "tcp" and "memory" too; empty: the first five of `STYLES`.

    Raises:
        InvalidError: an unknown kind, way or algorithm, too many of them, nothing to draw, or no matplotlib.
    """
    check_choices("kind", (kind,), KINDS)
    check_choices("how", (how,), HOWS)
    chosen = _of_one_kind(rows, how)
    present = _algorithms(chosen)
    names = selected(present, only, LINES - 1)
    chosen = [row for row in chosen if row["algorithm"] in names]
    clusters = list(dict.fromkeys(cluster_name(row) for row in chosen))
    several = any(len({row["bytes"] for row in chosen if cluster_name(row) == name}) > 1 for name in clusters)
    by_size = kind == "sizes" or (kind == "auto" and several)
    if not by_size:
        chosen = [row for row in chosen if row["bound_seconds"]]
        clusters = [name for name in clusters if any(cluster_name(row) == name for row in chosen)]
    if not chosen:
        raise InvalidError("plot (no rows): there is nothing to draw; bars over the bound need rows with bound_seconds")
    if by_size:
        figure, axes = panels(len(clusters), 3, 5.0, 3.8, 1.6)
        for cluster, axis in zip(clusters, axes, strict=True):
            _times(axis, [row for row in chosen if cluster_name(row) == cluster], cluster)
    else:
        sizes = sorted({row["bytes"] for row in chosen})
        figure, axes = panels(len(sizes), 1, max(6.0, 1.0 + 1.3 * len(clusters)), 3.8, 1.6)
        for nbytes, axis in zip(sizes, axes, strict=True):
            _bars_over_bound(axis, [row for row in chosen if row["bytes"] == nbytes], nbytes)
    finish(figure, [] if only else [NAMES.get(name, name) for name in present if name not in names], path)


def _of_one_kind(rows: Sequence[dict[str, Any]], how: str) -> list[dict[str, Any]]:
    """Keep for each cluster the rows of one kind of call, so that its bars and lines can be compared."""
    kept: dict[tuple[str, int, str], dict[str, Any]] = {}
    for cluster in dict.fromkeys(cluster_name(row) for row in rows):
        here = [row for row in rows if cluster_name(row) == cluster]
        ours = {row["how"] for row in here if row["algorithm"] not in NAMES}
        way = next((name for name in HOWS[1:] if name in ours), "") if how == "auto" else how
        theirs = {row["how"] for row in here if row["algorithm"] == "horovod"}
        way_of = {**dict.fromkeys(("mpi", *YARDSTICKS), "engine"), "horovod": way if way in theirs else "graph"}
        for row in here:
            if row["algorithm"] != "noop" and row["how"] == way_of.get(row["algorithm"], way):
                kept[cluster, row["bytes"], row["algorithm"]] = row  # of rows measured again, the last counts
    return list(kept.values())


def _times(axis: Axes, rows: Sequence[dict[str, Any]], cluster: str) -> None:
    for algorithm in _algorithms(rows):
        points = sorted((row["bytes"], row["seconds_median"]) for row in rows if row["algorithm"] == algorithm)
        colour, mark = STYLES.get(algorithm, ("#444444", "o"))
        x, y = zip(*points, strict=True)
        label = NAMES.get(algorithm, algorithm)
        axis.plot(x, y, color=colour, marker=mark, markersize=5, linewidth=1.4, label=label)
    bound = sorted(
        {(row["bytes"], row["bound_seconds"]) for row in rows if row["bound_seconds"] and row["algorithm"] != "ring"}
    )
    if bound:
        x, y = zip(*bound, strict=True)
        axis.plot(x, y, color="black", linestyle="--", linewidth=1.2, label="bound")
    axis.set(xscale="log", yscale="log", xlabel="bytes", ylabel="seconds, median", title=f"{cluster} ranks")
    axis.grid(True, which="major", linewidth=0.4, alpha=0.5)


def _bars_over_bound(axis: Axes, rows: Sequence[dict[str, Any]], nbytes: int) -> None:
    clusters = list(dict.fromkeys(cluster_name(row) for row in rows))
    algorithms = _algorithms(rows)
    width = 0.8 / len(algorithms)
    # all bars over the least bound: a ring over its own, higher bound would look as good as the others
    bounds = {cluster_name(row): row["bound_seconds"] for row in sorted(rows, key=lambda row: -row["bound_seconds"])}
    for place, algorithm in enumerate(algorithms):
        values = [
            (clusters.index(name) + (place + 0.5) * width - 0.4, row["seconds_median"] / bounds[name])
            for row in rows
            if row["algorithm"] == algorithm and (name := cluster_name(row))
        ]
        x, y = zip(*values, strict=True)
        colour, _ = STYLES.get(algorithm, ("#444444", "o"))
        axis.bar(x, y, width, color=colour, label=NAMES.get(algorithm, algorithm))
    axis.axhline(1.0, color="black", linestyle="--", linewidth=1.2, label="bound")
    axis.set(ylabel="time over the bound", title=f"allreduce of {nbytes / 1e6:g} MB")
    axis.set_xticks(range(len(clusters)), clusters)
    axis.set_xlim(-0.5, len(clusters) - 0.5)
    axis.set_xlabel("ranks on each host")


def draw_training(rows: Sequence[Mapping[str, Any]], path: Path, only: Sequence[str] = ()) -> None:
    """Draw the time of an epoch by cluster and algorithm, as figure 4 (f) of FlexReduce does (Lee et al. 2020).

    There is a panel for each model with a bar for each row; its dark part is computation.

    Args:
        rows: of one result of bench training or of several; of rows measured again, the last counts.
        only: at most five contestants; empty: the first five, as `STYLES` has them.

    Raises:
        InvalidError: nothing to draw, an unknown contestant, too many of them, or no matplotlib.
    """
    bars = {
        (row["model"], row["bytes"], cluster_name(row), row["algorithm"]): row
        for row in rows
        if row["algorithm"] != "compute"
    }
    if not bars:
        raise InvalidError("plot (no rows): there is nothing to draw; name results of bench training")
    present = _ordered([row["algorithm"] for row in bars.values()], [*STYLES, *TRAINING_NAMES])
    names = selected(present, only, LINES - 1)
    bars = {key: row for key, row in bars.items() if row["algorithm"] in names}
    models = list(dict.fromkeys(key[:2] for key in bars))
    most = max(len({key[2] for key in bars if key[:2] == model}) for model in models)
    figure, axes = panels(len(models), 1, max(6.0, 1.0 + 1.3 * most), 3.8, 1.8)
    for model, axis in zip(models, axes, strict=True):
        _epochs(axis, [row for key, row in bars.items() if key[:2] == model], names)
    finish(figure, [] if only else [TRAINING_NAMES.get(name, name) for name in present if name not in names], path)


def _epochs(axis: Axes, rows: Sequence[Mapping[str, Any]], algorithms: Sequence[str]) -> None:
    clusters = sorted({(row["hosts"], row["ranks"], cluster_name(row)) for row in rows})
    places = {name: place for place, (_, _, name) in enumerate(clusters)}
    width = 0.8 / len(algorithms)
    for number, algorithm in enumerate(algorithms):
        mine = [row for row in rows if row["algorithm"] == algorithm]
        x = [places[cluster_name(row)] + (number + 0.5) * width - 0.4 for row in mine]
        colour = "#CCCCCC" if algorithm == "horovod-links2" else STYLES.get(algorithm, ("#444444", ""))[0]
        steps = [EPOCH / (row["ranks"] * row["batch"]) for row in mine]
        heights = [count * row["step_seconds_median"] for count, row in zip(steps, mine, strict=True)]
        axis.bar(x, heights, width, color=colour, label=TRAINING_NAMES.get(algorithm, algorithm))
        alone = [
            count * min(row["compute_seconds"], row["step_seconds_median"])
            for count, row in zip(steps, mine, strict=True)
        ]
        label = "computation of it" if number == len(algorithms) - 1 else None
        axis.bar(x, alone, width, color="#333333", label=label)
    axis.set(ylabel=f"seconds per epoch ({EPOCH:,} digits)", xlabel="ranks on each host")
    first = rows[0]
    axis.set_title(
        f"{first['model']}, {first['bytes'] / 1e6:.1f} MB of gradients, {first['batch']} digits a rank and step"
    )
    axis.set_xticks(range(len(clusters)), [name for _, _, name in clusters])
