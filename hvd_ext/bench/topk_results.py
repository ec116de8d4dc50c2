"""The file, the tables and the plot of the top-k benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hvd_ext.bench import results
from hvd_ext.bench.plots import DPI
from hvd_ext.bench.results import result_of
from hvd_ext.bench.table import ratio, seconds
from hvd_ext.bench.topk import NAMES
from hvd_ext.bench.topk_inputs import ORDINARY
from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BENCHMARK = "top-k by magnitude, float32"
CAPTION = (
    "medians, data cold; x pass: paired with one prefetched read of the same data (+: with the bare addition); "
    "CPU: the same of the processor's time; x ours: over hvd_ext.mstopk; picked: of the k asked for; recall: the share "
    "of k that is among the largest"
)
LEFT = ("input", "what")
HEADINGS = (*LEFT, "median", "fastest", "ns/element", "x pass", "CPU", "x ours", "picked / k", "recall")
TARGET_HEADINGS = ("target", "elements", "density", "threads", "must", "stretch", "measured", "CPU", "input", "verdict")
# Okabe and Ito's palette, as in the other plots; ours are the warm ones, opponents cold or grey.
COLOURS = {
    "noop": "#DDDDDD",
    "exact": "#D55E00",
    "graph": "#E69F00",
    "segments": "#CC79A7",
    "mstopk": "#F0E442",
    "dgc": "#999933",
    "threshold": "#882255",
    "random": "#AA4499",
    "algorithm1": "#0072B2",
    "algorithm1-tf": "#56B4E9",
    "dgc-tf": "#44AA99",
    "tf": "#009E73",
    "torch": "#332288",
    "numpy": "#777777",
}


def result(run: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], targets: Sequence[Mapping[str, Any]]) -> Any:
    """Make the content of a file.

    Args:
        run: from `results.begin_run`, with what became known since.
        rows: of `topk.measure`.
        targets: of `topk_targets.verdicts`.

    Returns:
        One run, its rows and its targets, each with the number of its run.
    """
    numbered = [{"run": 0, **target} for target in targets]
    return {**result_of(run, rows), "benchmark": BENCHMARK, "targets": numbered}


def joined(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Put one result behind another.

    Args:
        before: of earlier runs.
        after: of later ones.

    Returns:
        All runs, rows and targets; the later ones have new numbers of runs.
    """
    count = len(before["runs"])
    later = [{**target, "run": target["run"] + count} for target in after["targets"]]
    return {**results.joined(before, after), "targets": [*before["targets"], *later]}


def load(path: Path) -> dict[str, Any]:
    """Read a file.

    Args:
        path: of the file.

    Returns:
        Its content.

    Raises:
        InvalidError: it cannot be read, or is no result of this benchmark.
    """
    return results.load(path, BENCHMARK, "bench topk")


def place_of(row: Mapping[str, Any]) -> str:
    """Name what a row's selection was of: "25,000,000 elements, k = 0.001 d, 1 thread"."""
    threads = f"{row['threads']} thread" + ("" if row["threads"] == 1 else "s")
    return f"{row['elements']:,} elements, k = {row['density']:g} d, {threads}"


def places(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Sort rows by run and place, in the order in which they came."""
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["run"], place_of(row)), []).append(dict(row))
    return found


def cells(row: Mapping[str, Any]) -> list[str]:
    """Write a row of the table, without its input.

    Args:
        row: of a result.

    Returns:
        As `HEADINGS` says from "what" on.
    """
    beside = "" if row["beside"] == "pass" else "+ "
    returned, recall = row["returned"], row["recall"]
    picked = "" if returned is None or not row["k"] else f"{returned / row['k']:.4g}"
    return [
        NAMES[row["contestant"]] + (" WRONG" if row["correct"] is False else ""),
        seconds(row["seconds_median"]),
        seconds(row["seconds_min"]),
        f"{row['ns_per_element']:.3g}",
        beside + ratio(row["x_yardstick"]),
        ratio(row["x_yardstick_cpu"]) if row["threads"] == 1 else "",
        ratio(row["x_ours"]),
        picked,
        "" if recall is None else f"{recall:.4g}",
    ]


def target_cells(target: Mapping[str, Any]) -> list[str]:
    """Write a line of the table of targets, as `TARGET_HEADINGS` says."""
    figures = [f"{target[name]:.3g}" for name in ("must", "stretch", "measured")]
    numbers = [f"{target['elements']:,}", f"{target['density']:g}", str(target["threads"])]
    cpu = "" if target["measured_cpu"] is None else f"{target['measured_cpu']:.3g}"
    return [target["item"], *numbers, *figures, cpu, target["input"], target["verdict"]]


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Draw the result as tables.

    Args:
        found: from `result` or `load`.

    Returns:
        One for each place, with a row for each input and contestant; and the targets, where there are any. What is
        wrong or missed is red.
    """
    drawn = []
    for (_, place), rows in places(found["rows"]).items():
        table = Table(title=f"{found['benchmark']}: {place}", caption=CAPTION)
        for heading in HEADINGS:
            table.add_column(heading, justify="left" if heading in LEFT else "right", no_wrap=True)
        last = ""
        for row in rows:
            if row["input"] != last:
                table.add_section()
            name = "" if row["input"] == last else row["input"]
            table.add_row(name, *cells(row), style="bold red" if row["correct"] is False else None)
            last = row["input"]
        drawn.append(table)
    if found["targets"]:
        table = Table(title="what is asked for, and the worst input")
        for heading in TARGET_HEADINGS:
            words = heading in ("target", "input", "verdict")
            table.add_column(heading, justify="left" if words else "right", no_wrap=True)
        for target in found["targets"]:
            table.add_row(*target_cells(target), style=None if target["met"] else "red")
        drawn.append(table)
    return drawn


def faults(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say which answers were wrong.

    Args:
        rows: of a result.

    Returns:
        A line for each wrong row.
    """
    return [
        f"wrong answer: {NAMES[row['contestant']]}, {row['input']}, {place_of(row)}: {row['wrong']}"
        for row in rows
        if row["correct"] is False
    ]


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw rows into a PNG file; see `figure`.

    Args:
        rows: of one result or of several.
        path: of the file.

    Raises:
        InvalidError: nothing to draw, or no matplotlib.
    """
    figure(rows).savefig(path, dpi=DPI, format="png")


def figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the time over one read pass by input and contestant.

    Args:
        rows: of one result or of several; of two rows of the same kind the later counts. Drawn are distributions and
            gradients, and what stands beside a read pass.

    Returns:
        A panel for each length, density and number of threads with a bar for each row; the pass is the dashed line.

    Raises:
        InvalidError: nothing to draw, or no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidError("plot (matplotlib): it is not installed; python -m pip install matplotlib") from error
    bars = {
        (place_of(row), row["input"], row["contestant"]): row
        for row in rows
        if row["beside"] == "pass" and row["input"] in ORDINARY
    }
    if not bars:
        raise InvalidError(
            "plot (no rows): there is nothing to draw; name results of bench topk with gauss or the like"
        )
    panels = list(dict.fromkeys(place for place, _, _ in bars))
    drawn = Figure(figsize=(11.0, 3.6 * len(panels)), layout="constrained")
    for panel, axis in zip(panels, drawn.subplots(len(panels), 1, squeeze=False).flat, strict=True):
        _bars(axis, [row for (place, _, _), row in bars.items() if place == panel], panel)
    named = {
        label: handle for axis in drawn.axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    drawn.legend(named.values(), named.keys(), loc="outside right center", frameon=False)
    return drawn


def _bars(axis: Axes, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    inputs = [name for name in ORDINARY if any(row["input"] == name for row in rows)]
    contestants = [name for name in COLOURS if any(row["contestant"] == name for row in rows)]
    width = 0.85 / len(contestants)
    for number, name in enumerate(contestants):
        mine = [row for row in rows if row["contestant"] == name]
        x = [inputs.index(row["input"]) + (number + 0.5) * width - 0.425 for row in mine]
        axis.bar(x, [row["x_yardstick"] for row in mine], width, color=COLOURS[name], label=NAMES[name])
    axis.axhline(1.0, color="black", linestyle="--", linewidth=1.2, label="one prefetched read pass")
    axis.set(yscale="log", ylabel="time over one pass", title=title)
    axis.set_xticks(range(len(inputs)), inputs)
    axis.grid(True, axis="y", linewidth=0.4, alpha=0.5)
    axis.set_axisbelow(True)


def markdown(found: Mapping[str, Any], facts: str) -> str:
    """Write the result as Markdown.

    Args:
        found: as `load` returns it.
        facts: machine, versions and samples in words.

    Returns:
        The targets, and for each place a table of contestants and inputs, those that are hard apart.
    """
    lines = [facts, ""]
    if found["targets"]:
        lines += _table(TARGET_HEADINGS, [target_cells(target) for target in found["targets"]])
    for (_, place), rows in places(found["rows"]).items():
        present = list(dict.fromkeys(row["input"] for row in rows))
        for inputs in (
            [name for name in present if name in ORDINARY],
            [name for name in present if name not in ORDINARY],
        ):
            if inputs:
                here = {(row["contestant"], row["input"]): row for row in rows}
                names = [name for name in NAMES if any((name, one) in here for one in inputs)]
                table = [[NAMES[name], *(_cell(here.get((name, one))) for one in inputs)] for name in names]
                lines += [f"{place}:", "", *_table(("what", *inputs), table)]
    lines += [f"- {line}" for line in [*faults(found["rows"]), *found["runs"][0].get("notes", [])]]
    return "\n".join([*lines, ""])


def _cell(row: Mapping[str, Any] | None) -> str:
    """Write the ratio to the yardstick, the median, and what was picked where it was not k."""
    if row is None:
        return ""
    beside = "x" if row["beside"] == "pass" else "add x"
    more = "" if row["returned"] in (None, row["k"]) else f", {row['returned'] / row['k']:.3g} k"
    return f"{beside}{row['x_yardstick']:.3g} ({seconds(row['seconds_median'])}{more})"


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    written = [f"| {' | '.join(cell or '-' for cell in line)} |" for line in [headings, *lines]]
    return [written[0], "|" + "---|" * len(headings), *written[1:], ""]
