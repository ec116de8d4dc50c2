"""The tables of a benchmark and where it says that we are slower."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

ORDER = ("noop", "mpi", "horovod graph", "channel", "horovod eager", "eager")
WORDS = {
    "noop": "no-op",
    "mpi": "MPI_Allreduce",
    "horovod graph": "Horovod graph",
    "horovod eager": "Horovod eager",
}

CAPTION = (
    "graph: inside tf.function, as in training; no-op: an identity inside tf.function, the cost of measuring; "
    "x: our median over theirs, below 1 is faster"
)


def words_of(row: dict[str, Any]) -> str:
    """Name a row: what was called, with which algorithm, and which one "auto" has chosen."""
    if row["what"] in WORDS:
        return WORDS[row["what"]]
    chosen = f" -> {row['chosen']}" if row["chosen"] not in ("", row["algorithm"]) else ""
    place = "graph" if row["what"] == "channel" else "eager"
    return f"hvd_ext {place} {row['algorithm']}{chosen}"


def seconds(value: float) -> str:
    """Write a time with three digits and its unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.3g} us"


def _ratio(value: float | None) -> str:
    if value is None:
        return ""
    colour = "green" if value <= 1 else "red"
    return f"[{colour}]{value:.2f}[/{colour}]"


def table(result: dict[str, Any]) -> Table:
    """Draw the result of a benchmark.

    Args:
        result: what `allreduce.measure` returned.

    Returns:
        A table with a row per number of ranks, size and contestant; ratios below 1 mean faster.
    """
    drawn = Table(title=result["benchmark"], caption=CAPTION)
    for heading in ("ranks", "bytes", "what", "median", "fastest", "x MPI", "x Horovod"):
        drawn.add_column(heading, justify="left" if heading == "what" else "right")
    rows = sorted(result["rows"], key=lambda row: (row["ranks"], row["nbytes"], ORDER.index(row["what"])))
    last = None
    for row in rows:
        group = (row["ranks"], row["nbytes"])
        if last not in (None, group):
            drawn.add_section()
        shown = ("", "") if last == group else (str(row["ranks"]), f"{row['nbytes']:,}")
        times = (seconds(row["median_s"]), seconds(row["min_s"]))
        drawn.add_row(*shown, words_of(row), *times, _ratio(row["to_mpi"]), _ratio(row["to_horovod"]))
        last = group
    return drawn


def losses(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Say where we are slower.

    Args:
        rows: of a result.

    Returns:
        A line for each opponent of the way that training uses us: how often it wins, and where by most.
    """
    lines = []
    for key, name in (("to_mpi", "MPI_Allreduce"), ("to_horovod", "Horovod")):
        ours = [row for row in rows if row["what"] == "channel" and row[key] is not None]
        slower = [row for row in ours if row[key] > 1]
        if slower:
            worst = max(slower, key=lambda row: row[key])
            where = f"{worst['ranks']} ranks, {worst['nbytes']:,} bytes, {worst['algorithm']}"
            lines.append(
                f"slower than {name} in {len(slower)} of {len(ours)} rows, at worst x{worst[key]:.2f} ({where})"
            )
        elif ours:
            lines.append(f"slower than {name} in none of {len(ours)} rows")
    return lines
