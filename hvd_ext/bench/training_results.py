"""The file, the table and the plot of the training benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hvd_ext.bench import results
from hvd_ext.bench.plots import LINES, STYLES, finish, selected
from hvd_ext.bench.results import cluster_name, result_of
from hvd_ext.bench.table import ratio, seconds
from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BENCHMARK = "training, Keras, handwritten digits"
NAMES = {"compute": "no communication", "horovod": "Horovod", "horovod-links2": "Horovod, 2 TCP links"}
# The digits of scikit-learn: what one epoch trains.
EPOCH = 1797
CAPTION = (
    "medians, of the slowest rank in each step; no communication: the same step with the plain optimizer; "
    "communication: what it adds; bound: of the bytes on the hosts' links; x: samples per second over Horovod's, "
    "above 1 is faster"
)
LEFT = ("model", "cluster", "what")
HEADINGS = (*LEFT, "samples/s", "step", "fastest", "communication", "bound", "x Horovod", "x links2")


def result(run: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Make the content of a file.

    Args:
        run: from `results.begin_run`, with what became known since.
        rows: of `training.measure`.

    Returns:
        One run and its rows, each with the number of its run.
    """
    return {**result_of(run, rows), "benchmark": BENCHMARK}


def load(path: Path) -> dict[str, Any]:
    """Read a file.

    Args:
        path: of the file.

    Returns:
        Its content.

    Raises:
        InvalidError: it cannot be read, or is no result of this benchmark.
    """
    return results.load(path, BENCHMARK, "bench training")


def words_of(row: Mapping[str, Any]) -> str:
    """Name a row: the algorithm, which one "auto" has chosen, and how Horovod was called."""
    name = NAMES.get(row["algorithm"], row["algorithm"])
    if row["chosen"] in ("", row["algorithm"]):
        return name
    return f"{name} ({row['chosen']})" if row["algorithm"] in NAMES else f"{name} -> {row['chosen']}"


def table(found: Mapping[str, Any]) -> Table:
    """Draw the result as a table.

    Args:
        found: from `result` or `load`.

    Returns:
        A row for each model, cluster and contestant; a wrong one is red.
    """
    drawn = Table(title=found["benchmark"], caption=CAPTION)
    for heading in HEADINGS:
        drawn.add_column(heading, justify="left" if heading in LEFT else "right", no_wrap=True)
    last: Any = None
    for row in found["rows"]:
        place = (row["run"], row["model"], row["ranks_per_host"])
        if place != last:
            drawn.add_section()
        bound, exposed = row["bound_seconds"], row["exposed_communication_seconds"]
        drawn.add_row(
            "" if place == last else f"{row['model']}, {row['bytes'] / 1e6:.1f} MB",
            "" if place == last else cluster_name(row),
            words_of(row) + (" WRONG" if row["correct"] is False else ""),
            f"{row['samples_per_second']:.4g}",
            seconds(row["step_seconds_median"]),
            seconds(row["step_seconds_min"]),
            "" if exposed is None else seconds(max(exposed, 0.0)),
            "" if bound is None else seconds(bound),
            ratio(row["against_horovod"]),
            ratio(row["against_horovod_links2"]),
            style="bold red" if row["correct"] is False else None,
        )
        last = place
    return drawn


def faults(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say what was wrong.

    Args:
        rows: of a result.

    Returns:
        A line for each wrong row.
    """
    return [
        f"wrong training: {words_of(row)}, {row['model']}, {cluster_name(row)} ranks: {row['wrong'][0]}"
        for row in rows
        if row["correct"] is False
    ]


def trials(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say in which way Horovod was called, and how fast the other one was.

    Args:
        rows: of a result.

    Returns:
        A line for each row that had a choice.
    """
    lines = []
    for row in rows:
        tried = row.get("trial_seconds", {})
        if tried:
            times = ", ".join(f"{way} calls {seconds(time_s)} a step" for way, time_s in tried.items())
            lines.append(f"{NAMES[row['algorithm']]}, {cluster_name(row)} ranks: {row['chosen']} calls ({times})")
    return lines


def draw(rows: Sequence[Mapping[str, Any]], path: Path, only: Sequence[str] = ()) -> None:
    """Draw the time of an epoch by cluster and algorithm, as figure 4 (f) of FlexReduce does (Lee et al. 2020).

    There is a panel for each model with a bar for each row; its dark part is computation.

    Args:
        rows: of one result or of several; of two rows of the same contestant, model and cluster the later counts.
        path: of the PNG file.
        only: at most five contestants; empty: the first five, as `STYLES` has them.

    Raises:
        InvalidError: nothing to draw, an unknown contestant, too many of them, or no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidError("plot (matplotlib): it is not installed; python -m pip install matplotlib") from error
    bars = {
        (row["model"], row["bytes"], cluster_name(row), row["algorithm"]): row
        for row in rows
        if row["algorithm"] != "compute"
    }
    if not bars:
        raise InvalidError("plot (no rows): there is nothing to draw; name results of bench training")
    order = [*STYLES, *NAMES]
    present = {row["algorithm"] for row in bars.values()}
    known = sorted(present, key=lambda name: order.index(name) if name in order else len(order))
    algorithms = selected(known, only, LINES - 1)
    bars = {key: row for key, row in bars.items() if row["algorithm"] in algorithms}
    models = list(dict.fromkeys(key[:2] for key in bars))
    most = max(len({key[2] for key in bars if key[:2] == model}) for model in models)
    figure = Figure(figsize=(max(6.0, 1.0 + 1.3 * most) + 1.8, 3.8 * len(models)), layout="constrained")
    for model, axis in zip(models, figure.subplots(len(models), 1, squeeze=False).flat, strict=True):
        _bars(axis, [row for key, row in bars.items() if key[:2] == model], algorithms)
    finish(figure, [] if only else [NAMES.get(name, name) for name in known if name not in algorithms], path)


def _epoch_s(row: Mapping[str, Any], step_s: float) -> float:
    return EPOCH / (row["ranks"] * row["batch"]) * step_s


def _bars(axis: Axes, rows: Sequence[Mapping[str, Any]], algorithms: Sequence[str]) -> None:
    clusters = sorted({(row["hosts"], row["ranks"], cluster_name(row)) for row in rows})
    places = {name: place for place, (_, _, name) in enumerate(clusters)}
    width = 0.8 / len(algorithms)
    for number, algorithm in enumerate(algorithms):
        mine = [row for row in rows if row["algorithm"] == algorithm]
        x = [places[cluster_name(row)] + (number + 0.5) * width - 0.4 for row in mine]
        colour = "#CCCCCC" if algorithm == "horovod-links2" else STYLES.get(algorithm, ("#444444", ""))[0]
        heights = [_epoch_s(row, row["step_seconds_median"]) for row in mine]
        axis.bar(x, heights, width, color=colour, label=NAMES.get(algorithm, algorithm))
        alone = [_epoch_s(row, min(row["compute_seconds"], row["step_seconds_median"])) for row in mine]
        label = "computation of it" if number == len(algorithms) - 1 else None
        axis.bar(x, alone, width, color="#333333", label=label)
    axis.set(ylabel=f"seconds per epoch ({EPOCH:,} digits)", xlabel="ranks on each host")
    one = rows[0]
    axis.set_title(f"{one['model']}, {one['bytes'] / 1e6:.1f} MB of gradients, {one['batch']} digits a rank and step")
    axis.set_xticks(range(len(clusters)), [name for _, _, name in clusters])
