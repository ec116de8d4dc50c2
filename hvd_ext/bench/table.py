"""The table of a benchmark, and the lines that say where we are slower and what was wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from hvd_ext.bench.results import cluster_name, places, ratios

NAMES = {"noop": "no-op", "mpi": "MPI_Allreduce", "horovod": "Horovod"}
CAPTION = (
    "graph: inside tf.function, as in training; engine: NumPy in and out, no TensorFlow; no-op: an identity inside "
    "tf.function, the cost of measuring; x: median over theirs, below 1 is faster; price: the planner's over the "
    "median; saving: of our ring's time"
)
HEADINGS = ("cluster", "bytes", "what", "median", "fastest", "x bound", "price", "x MPI", "x Horovod", "saving")


def words_of(row: Mapping[str, Any]) -> str:
    """Name a row: what was called, how, and which algorithm "auto" has chosen."""
    if row["algorithm"] in ("noop", "mpi"):
        return NAMES[row["algorithm"]]
    chosen = f" -> {row['chosen']}" if row["chosen"] not in ("", row["algorithm"]) else ""
    return f"{NAMES.get(row['algorithm'], row['algorithm'])} {row['how']}{chosen}"


def seconds(value: float) -> str:
    """Write a time with three digits and its unit."""
    if value >= 1000:
        return f"{float(f'{value:.3g}'):,.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.3g} us"


def ratio(value: float | None) -> str:
    """Write a ratio with two digits behind the point; nothing for None."""
    return "" if value is None else f"{value:.2f}"


def _coloured(value: float | None) -> str:
    colour = "green" if value is not None and value <= 1 else "red"
    return "" if value is None else f"[{colour}]{value:.2f}[/{colour}]"


def table(result: Mapping[str, Any]) -> Table:
    """Draw the result of a benchmark.

    Args:
        result: as `results.load` returns it.

    Returns:
        A table with a row per cluster, size and contestant; a wrong result is red.
    """
    drawn = Table(title=result["benchmark"], caption=CAPTION)
    for heading in HEADINGS:
        drawn.add_column(heading, justify="left" if heading in ("cluster", "what") else "right", no_wrap=True)
    last: Any = None
    for place, rows in places(result["rows"]).items():
        drawn.add_section()
        for row in rows:
            cluster = "" if last is not None and last[:2] == place[:2] else cluster_name(row)
            size = "" if last == place else f"{row['bytes']:,}"
            last = place
            beside = ratios(row, rows)
            drawn.add_row(
                cluster,
                size,
                words_of(row) + (" WRONG" if row["correct"] is False else ""),
                seconds(row["seconds_median"]),
                seconds(row["seconds_min"]),
                ratio(beside["bound"]),
                ratio(beside["predicted"]),
                _coloured(beside["mpi"]),
                _coloured(beside["horovod"]),
                "" if beside["saving"] is None else f"{beside['saving']:.1%}",
                style="bold red" if row["correct"] is False else None,
            )
    return drawn


def faults(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say which results were wrong.

    Args:
        rows: of a result.

    Returns:
        A line for each wrong row, with the first wrong element.
    """
    return [
        f"wrong result: {words_of(row)}, {cluster_name(row)} ranks, {row['bytes']:,} bytes: {row['wrong'][0]}"
        for row in rows
        if row["correct"] is False
    ]


def losses(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say where we are slower.

    Args:
        rows: of a result.

    Returns:
        A line for each opponent: in how many rows it wins, and where by most. MPI is compared with calls of the engine
        where there are any, Horovod with the same kind of call.
    """
    engine = any(row["how"] == "engine" and row["algorithm"] not in NAMES for row in rows)
    lines = []
    for key, name in (("mpi", NAMES["mpi"]), ("horovod", NAMES["horovod"])):
        compared = [
            (found, row)
            for group in places(rows).values()
            for row in group
            if row["algorithm"] not in NAMES and (key != "mpi" or not engine or row["how"] == "engine")
            if (found := ratios(row, group)[key]) is not None
        ]
        slower = [(found, row) for found, row in compared if found > 1]
        if slower:
            worst, row = max(slower, key=lambda one: one[0])
            where = f"{words_of(row)}, {cluster_name(row)} ranks, {row['bytes']:,} bytes"
            lines.append(
                f"slower than {name} in {len(slower)} of {len(compared)} rows, at worst x{worst:.2f} ({where})"
            )
        elif compared:
            lines.append(f"slower than {name} in none of {len(compared)} rows")
    return lines
