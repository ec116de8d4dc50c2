"""What came of the study of top-k: its table on the terminal, its page, and its plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.studies.markdown import facts, table
from benchmarks.studies.topk.inputs import ORDINARY
from benchmarks.studies.topk.jobs import NAMES
from benchmarks.studies.topk.targets import HEADINGS as TARGETS, cells_of, verdicts_of
from hvd_ext.bench.plots import LINES, selected
from hvd_ext.bench.table import WRONG, drawn, faults_of, ratio, seconds
from hvd_ext.commands.figures import finish, panels
from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BENCHMARK = "top-k by magnitude, float32"
HEADINGS = (*("input", "what", "median", "fastest", "ns/element", "x pass", "CPU", "x ours", "picked / k", "recall"),)


CAPTION = (
    "medians, data cold; x pass: paired with one prefetched read of the same data (+: with the bare addition); "
    "CPU: the same of the processor's time; x ours: over hvd_ext.mstopk; picked: of the k asked for; recall: the share "
    "of k that is among the largest"
)


KINDS = ("bars", "sizes")


# The same for selections, in the order in which most readers want to compare them. The no-op is not drawn: it would
# make the axis two decades longer.
COLOURS = {
    "exact": "#D55E00",
    "algorithm1": "#0072B2",
    "tf": "#009E73",
    "torch": "#332288",
    "numpy": "#999999",
    "dgc-tf": "#44AA99",
    "graph": "#E69F00",
    "segments": "#CC79A7",
    "mstopk": "#F0E442",
    "dgc": "#999933",
    "threshold": "#882255",
    "random": "#AA4499",
    "algorithm1-tf": "#56B4E9",
}


def share_of(row: Mapping[str, Any]) -> str:
    """Name a selection without its length: "k = 0.001 d, 1 thread"."""
    return f"k = {row['density']:g} d, {row['threads']} thread" + ("" if row["threads"] == 1 else "s")


def place_of(row: Mapping[str, Any]) -> str:
    """Name what a selection was of: "25,000,000 elements, k = 0.001 d, 1 thread"."""
    return f"{row['elements']:,} elements, {share_of(row)}"


def places_of(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Group the rows of the study by run and place, in the order in which they came."""
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["run"], place_of(row)), []).append(dict(row))
    return found


def _cells(row: Mapping[str, Any]) -> list[str]:
    beside = "" if row["beside"] == "pass" else "+ "
    returned, recall = row["returned"], row["recall"]
    return [
        NAMES[row["contestant"]] + (WRONG if row["correct"] is False else ""),
        seconds(row["seconds_median"]),
        seconds(row["seconds_min"]),
        f"{row['ns_per_element']:.3g}",
        beside + ratio(row["x_yardstick"]),
        ratio(row["x_yardstick_cpu"]) if row["threads"] == 1 else "",
        ratio(row["x_ours"]),
        "" if returned is None or not row["k"] else f"{returned / row['k']:.4g}",
        "" if recall is None else f"{recall:.4g}",
    ]


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Draw a result of the study: a table for each place, with a row for each input and contestant."""
    tables = []
    for (_, place), rows in places_of(result["rows"]).items():
        lines = []
        last = ""
        for row in rows:
            name = "" if row["input"] == last else row["input"]
            last = row["input"]
            lines.append((last, [name, *_cells(row)], row["correct"] is False))
        tables.append(drawn(f"{result['benchmark']}: {place}", CAPTION, HEADINGS, lines, ("input", "what")))
    return tables


def faults(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write a line for each wrong row of the study."""
    return faults_of(rows, "answer", lambda row: f"{NAMES[row['contestant']]}, {row['input']}, {place_of(row)}")


def markdown(result: Mapping[str, Any]) -> str:
    """Write a result of the study as Markdown.

    The goals come first; then each place has a table of contestants and inputs, with the hard inputs apart. If there is
    one input and several lengths, there is one table of contestants and lengths instead.
    """
    rows = result["rows"]
    if len({row["input"] for row in rows}) == 1 < len({row["elements"] for row in rows}):
        return "\n".join([facts(result), "", *_lengths(rows)])
    parts = [facts(result), ""]
    if verdicts := verdicts_of(rows):
        parts.append(table(TARGETS, map(cells_of, verdicts)))
    for (_, place), group in places_of(rows).items():
        present = list(dict.fromkeys(row["input"] for row in group))
        for title, inputs in (
            (f"{place}:", [name for name in present if name in ORDINARY]),
            (f"{place}, hard inputs:", [name for name in present if name not in ORDINARY]),
        ):
            if inputs:
                parts += [title, "", _contestants(("what", *inputs), group, "input", inputs)]
    parts += [f"- {line}" for line in [*faults(rows), *result["runs"][0].get("notes", [])]]
    return "\n".join([*parts, ""])


def _lengths(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    parts = []
    for share in dict.fromkeys(share_of(row) for row in rows):
        here = [row for row in rows if share_of(row) == share]
        lengths = sorted({row["elements"] for row in here})
        headings = ("elements", *(f"{length:,}" for length in lengths))
        parts += [f"{share}, {rows[0]['input']}:", "", _contestants(headings, here, "elements", lengths)]
    return parts


def _contestants(headings: Sequence[str], rows: Sequence[Mapping[str, Any]], field: str, values: Sequence[Any]) -> str:
    """Write a table with a row for each contestant and a column for each value of a field."""
    here = {(row["contestant"], row[field]): row for row in rows}
    names = [name for name in NAMES if any((name, value) in here for value in values)]
    return table(headings, [[NAMES[name], *(_cell(here.get((name, one))) for one in values)] for name in names])


def _cell(row: Mapping[str, Any] | None) -> str:
    """Write the ratio to the yardstick, the median, and how many were picked if that was not k."""
    if row is None:
        return ""
    beside = "x" if row["beside"] == "pass" else "add x"
    more = "" if row["returned"] in (None, row["k"]) else f", {row['returned'] / row['k']:.3g} k"
    return f"{beside}{row['x_yardstick']:.3g} ({seconds(row['seconds_median'])}{more})"


def draw(rows: Sequence[Mapping[str, Any]], path: Path, kind: str = "bars", only: Sequence[str] = ()) -> None:
    """Draw selections from distributions and gradients whose yardstick is a read pass.

    Args:
        rows: of one result of the study or of several; of rows measured again, the last counts.
        path: of the file.
        kind: "bars": the time over one read pass by input and contestant, a panel for each length, density and number
            of threads; "sizes": the time over the length (CommLib, Fig. 6), a panel for each density, number of threads
            and input. The pass is the dashed line.
        only: at most five contestants; empty: the first five of `COLOURS`. "torch" is left out where no row has it.

    Raises:
        InvalidError: an unknown kind or contestant, too many of them, nothing to draw, or no matplotlib.
    """
    if kind not in KINDS:
        raise InvalidError(f"kind ({kind!r}): must be one of {', '.join(KINDS)}")
    kept = {
        (place_of(row), row["input"], row["contestant"]): row
        for row in rows
        if row["beside"] == "pass" and row["input"] in ORDINARY and row["contestant"] in COLOURS
    }
    if not kept:
        raise InvalidError("plot (no rows): there is nothing to draw; name results of the study with gauss or the like")
    present = [name for name in COLOURS if any(row["contestant"] == name for row in kept.values())]
    # a machine without PyTorch has no rows of it
    names = selected(present, [name for name in only if name in present or name != "torch"], LINES - 1)
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in (row for row in kept.values() if row["contestant"] in names):
        title = place_of(row) if kind == "bars" else f"{share_of(row)}, {row['input']}"
        groups.setdefault(title, []).append(row)
    figure, axes = panels(len(groups), 2, 6.5, 3.4, 3.0)
    for (title, found), axis in zip(groups.items(), axes, strict=True):
        (_bars if kind == "bars" else _sizes)(axis, found)
        axis.set_title(title)
    finish(figure, [] if only else [NAMES[name] for name in present if name not in names], path)


def _bars(axis: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    inputs = [name for name in ORDINARY if any(row["input"] == name for row in rows)]
    contestants = [name for name in COLOURS if any(row["contestant"] == name for row in rows)]
    width = 0.85 / len(contestants)
    for number, name in enumerate(contestants):
        mine = [row for row in rows if row["contestant"] == name]
        x = [inputs.index(row["input"]) + (number + 0.5) * width - 0.425 for row in mine]
        heights = [row["x_yardstick"] for row in mine]
        axis.bar(x, heights, width, color=COLOURS[name], label=NAMES[name])
    axis.axhline(1.0, color="black", linestyle="--", linewidth=1.2, label="one prefetched read pass")
    axis.set(yscale="log", ylabel="time over one pass")
    axis.set_ylim(bottom=0.7 * min(1.0, *(row["x_yardstick"] for row in rows)))
    axis.set_xticks(range(len(inputs)), inputs)
    axis.grid(True, axis="y", linewidth=0.4, alpha=0.5)
    axis.set_axisbelow(True)


def _sizes(axis: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    for name, colour in COLOURS.items():
        points = sorted((row["elements"], row["seconds_median"]) for row in rows if row["contestant"] == name)
        if points:
            axis.plot(*zip(*points, strict=True), "o-", color=colour, markersize=4, label=NAMES[name])
    passes = {row["elements"]: row["yardstick_seconds_median"] for row in rows}
    axis.plot(*zip(*sorted(passes.items()), strict=True), "k--", linewidth=1.2, label="one prefetched read pass")
    axis.set(xscale="log", yscale="log", xlabel="elements", ylabel="seconds, median")
    axis.grid(True, which="major", linewidth=0.4, alpha=0.5)
