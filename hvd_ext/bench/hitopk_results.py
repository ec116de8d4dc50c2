"""The file, the table and the Markdown of the hitopk benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from hvd_ext.bench import results
from hvd_ext.bench.results import cluster_name, result_of
from hvd_ext.bench.table import ratio, seconds

BENCHMARK = "sparse sums, float32"
CAPTION = (
    "engine: NumPy in and out, no TensorFlow; floor: bytes over the slowest link, for hitopk with the same run's steps "
    "inside the hosts; link: what the busiest host has sent, frames counted, and over the closed form's bytes; entry: "
    "of a value and its index on the way; x Horovod: median over theirs, below 1 is faster; *: not measured, the "
    "planner's price"
)
# The sizes of the paper's breakdown: ResNet-50 and a Transformer.
FIGURE_8 = (25_000_000, 110_000_000)
HEADINGS = ("cluster", "elements", "what", "median", "x floor", "price", "link MB", "x form", "entry B", "x Horovod")


def result(run: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Make the content of a file.

    Args:
        run: from `results.begin_run`, with what became known since.
        rows: measured and simulated ones.

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
    return results.load(path, BENCHMARK, "bench hitopk")


def place_of(row: Mapping[str, Any]) -> str:
    """Name a row's cluster: "4 + 3", or "16 x 8" where many hosts are equal."""
    counts = row["ranks_per_host"]
    return f"{len(counts)} x {counts[0]}" if len(counts) > 4 and len(set(counts)) == 1 else cluster_name(row)


def cells_of(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write a row behind its cluster and size.

    Args:
        row: one of them.
        rows: all of the same place.

    Returns:
        A text for each heading from "what" on.
    """
    median = row["seconds_median"]
    theirs = [other["seconds_median"] for other in rows if other["name"] == "horovod" and not other["simulated"]]
    wire = row["wire_bytes"]
    beside = median / theirs[0] if theirs and row["algorithm"] != "horovod" and not row["simulated"] else None
    price = row["predicted_seconds"]
    return [
        row["name"] + ("*" if row["simulated"] else "") + (" WRONG" if row["correct"] is False else ""),
        seconds(median),
        ratio(median / row["floor_seconds"] if row["floor_seconds"] else None),
        ratio(price / median if price and not row["simulated"] else None),
        "" if wire is None else f"{wire / 1e6:.3g}",
        ratio(wire / row["host_bytes"] if wire and row["host_bytes"] else None),
        ratio(row["entry_bytes"]),
        ratio(beside),
    ]


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Write rows, those of one place together.

    Args:
        rows: of a result.

    Returns:
        A text for each heading.
    """
    return [
        [place_of(row), f"{row['elements']:,}", *cells_of(row, group)]
        for group in results.places(rows).values()
        for row in group
    ]


def breakdown(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Give the rows whose steps are known, those of several hosts."""
    return [dict(row) for row in rows if row["algorithm"] == "hitopk" and row["hosts"] > 1 and row["levels_seconds"]]


def table(found: Mapping[str, Any]) -> Table:
    """Draw the result as a table.

    Args:
        found: from `result` or `load`.

    Returns:
        A row for each cluster, size and contestant; a wrong one is red.
    """
    drawn = Table(title=found["benchmark"], caption=CAPTION)
    for heading in HEADINGS:
        left = heading in ("cluster", "what")
        drawn.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for line in lines_of(found["rows"]):
        drawn.add_row(*line, style="bold red" if line[2].endswith(" WRONG") else None)
    return drawn


def steps_table(found: Mapping[str, Any]) -> Table | None:
    """Draw the steps of hitopk; None where there are none.

    Args:
        found: from `result` or `load`.

    Returns:
        A row for each cluster, size and density, a column for each step.
    """
    rows = breakdown(found["rows"])
    if not rows:
        return None
    names = list(dict.fromkeys(name for row in rows for name in row["levels_seconds"]))
    drawn = Table(title="steps of hitopk, means over the ranks")
    for heading in ("cluster", "elements", "what", *names):
        drawn.add_column(heading, justify="left" if heading in ("cluster", "what") else "right")
    for row in rows:
        drawn.add_row(*_steps(row, names))
    return drawn


def _steps(row: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    times = [row["levels_seconds"].get(name) for name in names]
    star = "*" if row["simulated"] else ""
    shown = ["" if time_s is None else seconds(time_s) for time_s in times]
    return [place_of(row), f"{row['elements']:,}", row["name"] + star, *shown]


def faults(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say which sums were wrong.

    Args:
        rows: of a result.

    Returns:
        A line for each wrong row.
    """
    return [
        f"wrong sum: {row['name']}, {place_of(row)} ranks, {row['elements']:,} elements: {row['wrong'][0]}"
        for row in rows
        if row["correct"] is False
    ]


def markdown(found: Mapping[str, Any]) -> str:
    """Write the tables as Markdown.

    Args:
        found: from `load`.

    Returns:
        Every row, simulated ones by size where nothing else is there; and the steps of hitopk.
    """
    everything = found["rows"]
    rows = breakdown(everything)
    if all(row["simulated"] for row in everything):
        parts = ["The planner's prices; nothing was measured.\n", *_pivots(everything)]
        rows = [row for row in rows if row["elements"] in FIGURE_8]
    else:
        parts = [_markdown(HEADINGS, lines_of(everything))]
    if rows:
        names = list(dict.fromkeys(name for row in rows for name in row["levels_seconds"]))
        parts.append(_markdown(("cluster", "elements", "what", *names), [_steps(row, names) for row in rows]))
    parts += [f"- {line}\n" for line in faults(found["rows"])]
    return "\n".join(parts)


def _pivots(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write one table for each cluster: contestants down, sizes across."""
    tables = []
    for place in dict.fromkeys(place_of(row) for row in rows):
        here = [row for row in rows if place_of(row) == place]
        sizes = sorted({row["elements"] for row in here})
        times = {(row["name"], row["elements"]): seconds(row["seconds_median"]) for row in here}
        lines = [
            [name, *(times.get((name, size), "") for size in sizes)] for name in dict.fromkeys(n for n, _ in times)
        ]
        tables.append(_markdown((f"{place} ranks, elements", *(f"{size:,}" for size in sizes)), lines))
    return tables


def _markdown(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [list(headings), ["---"] * len(headings), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") or "-" for cell in row) + " |" for row in rows) + "\n"
