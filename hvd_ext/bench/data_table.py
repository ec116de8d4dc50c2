"""The table of the data benchmark, and the lines under it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from hvd_ext.bench.data import NAMES, PARTS
from hvd_ext.bench.data_goals import CPU, OURS
from hvd_ext.bench.table import WRONG, drawn, ratio, seconds

HEADINGS = ("part", "place", "what", "figure", "median", "least", "x ours", "goal")
CAPTION = (
    "medians of the turns; CPU: of all threads of the process, hits beside a copy of the same bytes (memcpy); x ours: "
    "over the figure of DataCache; goal: at most, or at least, and what the median of the ratios of the turns is"
)
LEFT = ("part", "place", "what", "figure", "goal")
MISSED = "goal missed: {part}, {place}, {what}, {figure}: {goal}"


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


def data_table(result: Mapping[str, Any]) -> Table:
    """Draw a result of bench data: a row for each part, place, figure and contestant."""
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


def data_faults(rows: Sequence[Mapping[str, Any]]) -> list[str]:
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
