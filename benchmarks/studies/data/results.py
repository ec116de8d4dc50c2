"""What came of the study of data: its table on the terminal, its page, and its plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.studies.data.goals import CPU, OURS
from benchmarks.studies.data.jobs import NAMES, PARTS
from benchmarks.studies.markdown import facts, table as markdown_table
from hvd_ext.bench.plots import LINES, selected
from hvd_ext.bench.table import WRONG, drawn, ratio, seconds
from hvd_ext.commands.figures import finish, panels
from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BENCHMARK = "data, handed over and kept"
HEADINGS = ("part", "place", "what", "figure", "median", "least", "x ours", "goal")
CAPTION = (
    "medians of the turns; CPU: of all threads of the process, hits beside a copy of the same bytes (memcpy); x ours: "
    "over the figure of DataCache; goal: at most, or at least, and what the median of the ratios of the turns is"
)
LEFT = ("part", "place", "what", "figure", "goal")
MISSED = "goal missed: {part}, {place}, {what}, {figure}: {goal}"
# From the palette of Okabe and Ito, in the order in which most readers want to compare them.
COLOURS = {
    OURS: "#D55E00",
    "cache": "#0072B2",
    "cache-file": "#56B4E9",
    "snapshot": "#CC79A7",
    "memmap": "#E69F00",
    "grain": "#009E73",
    "streaming": "#555555",
    "decode": "#999999",
}
BARS = LINES - 1  # the yardstick is in the legend too


def figure(value: float, unit: str) -> str:
    """Write a figure with its unit."""
    if unit == "s":
        return f"-{seconds(-value)}" if value < 0 else seconds(value)
    if unit == "bytes":
        for name, size in (("MB", 1e6), ("kB", 1e3)):
            if abs(value) >= size:
                return f"{value / size:,.4g} {name}"
        return f"{value:,.0f} B"
    return f"{value:.4f}" if unit == "share" else f"{value:,.0f}"


def goal_words(goal: Mapping[str, Any], unit: str) -> str:
    """Write a goal: over what, the figure, what it may be, and by how much it is missed if it is."""
    over = goal["over"]

    def written(value: float) -> str:
        return f"{value:.3g}" if over else figure(value, unit)

    bounds = [
        f"{words} {written(goal[name])}"
        for name, words in (("least", "at least"), ("most", "at most"))
        if goal[name] is not None
    ]
    measured = f"x {NAMES.get(over, over)} {goal['measured']:.3g}" if over else written(goal["measured"])
    return f"{measured}, {', '.join(bounds)}: {'met' if goal['met'] else 'MISSED'}"


def place_of(row: Mapping[str, Any]) -> tuple[str, str]:
    """Name the part and the place of a row."""
    return PARTS[row["part"]], row["place"]


def cells_of(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write a row without its place; `rows` are all of its run."""
    ours = next(
        (
            other["median"]
            for other in rows
            if other["contestant"].startswith(OURS)
            and (other["part"], other["place"], other["quantity"]) == (row["part"], row["place"], row["quantity"])
        ),
        None,
    )
    beside = row["median"] / ours if ours and ours > 0 and not row["contestant"].startswith(OURS) else None
    return [
        NAMES[row["contestant"]] + ("" if row["correct"] else WRONG),
        row["quantity"],
        figure(row["median"], row["unit"]),
        figure(min(row["samples"]), row["unit"]),
        ratio(beside),
        "; ".join(goal_words(goal, row["unit"]) for goal in row["goals"]),
    ]


def runs_of(rows: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], list[Mapping[str, Any]]]]:
    """Give each row with all rows of its run."""
    return [(row, [other for other in rows if other.get("run") == row.get("run")]) for row in rows]


def table(result: Mapping[str, Any]) -> Table:
    """Draw a result of the study: a row for each part, place, figure and contestant."""
    lines = []
    last: Any = None
    for row, rows in runs_of(result["rows"]):
        part, place = place_of(row)
        section = (row["run"], part, place)
        names = ["" if last is not None and section[:2] == last[:2] else part, "" if section == last else place]
        red = not row["correct"] or not all(goal["met"] for goal in row["goals"])
        lines.append((section, [*names, *cells_of(row, rows)], red))
        last = section
    return drawn(result["benchmark"], CAPTION, HEADINGS, lines, LEFT)


def faults(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write a line for each row whose samples were wrong."""
    return [
        f"wrong samples: {NAMES[row['contestant']]}, {', '.join(place_of(row))}: {row['wrong']}"
        for row in rows
        if not row["correct"]
    ]


def missed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write a line for each goal that is missed."""
    return [
        MISSED.format(
            part=PARTS[row["part"]],
            place=row["place"],
            what=NAMES[row["contestant"]],
            figure=row["quantity"],
            goal=goal_words(goal, row["unit"]),
        )
        for row in rows
        for goal in row["goals"]
        if not goal["met"]
    ]


def hits_ratios(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], float]:
    """Give the processor time of hits over that of memcpy, by place and contestant, where both were measured."""
    hits = {
        (row["place"], row["contestant"]): row["median"]
        for row in rows
        if row["part"] == "hits" and row["quantity"] == CPU
    }
    return {
        (place, name): value / hits[place, "memcpy"]
        for (place, name), value in hits.items()
        if (place, "memcpy") in hits
    }


def markdown(result: Mapping[str, Any]) -> str:
    """Write a result of the study as Markdown: machine, versions, a table with every row, what was wrong, notes."""
    lines = [[*place_of(row), *cells_of(row, rows)] for row, rows in runs_of(result["rows"])]
    said = [*faults(result["rows"]), *(note for run in result["runs"] for note in run.get("notes", []))]
    written = "".join(f"- {line}\n" for line in said)
    return f"{facts(result)}\n\n{markdown_table(HEADINGS, lines)}" + (f"\n{written}" if written else "")


def draw(rows: Sequence[Mapping[str, Any]], path: Path, only: Sequence[str] = ()) -> None:
    """Draw the processor time of hits beside a copy of the same bytes, by the size of a sample.

    Args:
        rows: of one result of the study or of several; of rows measured again, the last counts.
        path: of the file.
        only: at most five contestants; empty: the first five of `COLOURS`.

    Raises:
        InvalidError: nothing to draw, an unknown contestant, too many of them, or no matplotlib.
    """
    bars = {key: value for key, value in hits_ratios(rows).items() if key[1] in COLOURS}
    if not bars:
        raise InvalidError("plot (no rows): there is nothing to draw; name results of the study with hits and memcpy")
    present = [name for name in COLOURS if any(key[1] == name for key in bars)]
    names = selected(present, only, BARS)
    places = list(dict.fromkeys(place for place, _ in bars))
    figure, axes = panels(1, 1, max(6.0, 1.0 + 2.0 * len(places)), 3.8, 1.8)
    _bars(axes[0], bars, places, names)
    finish(figure, [] if only else [NAMES[name] for name in present if name not in names], path)


def _bars(axis: Axes, bars: Mapping[tuple[str, str], float], places: Sequence[str], names: Sequence[str]) -> None:
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        mine = [(at, bars[place, name]) for at, place in enumerate(places) if (place, name) in bars]
        x = [at + (number + 0.5) * width - 0.4 for at, _ in mine]
        axis.bar(x, [value for _, value in mine], width, color=COLOURS[name], label=NAMES[name])
    axis.axhline(1.0, color="black", linestyle="--", linewidth=1.2, label=NAMES["memcpy"])
    axis.set(yscale="log", ylabel="CPU time over memcpy", xlabel="bytes of a sample")
    axis.set_xticks(range(len(places)), places)
