"""The tables of the benchmarks, and the lines under them: where we are slower, and what was wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from hvd_ext.bench.results import YARDSTICKS, cluster_name, places, ratios
from hvd_ext.bench.training_worker import parts_of

NAMES = {"noop": "no-op", "mpi": "MPI_Allreduce", "horovod": "Horovod", "tcp": "tcp", "memory": "memory"}
TRAINING_NAMES = {
    "compute": "no communication",
    "horovod": "Horovod",
    "horovod-links2": "Horovod, 2 TCP links",
    "horovod-autotune": "Horovod, autotune",
    "multiworker": "MultiWorkerMirroredStrategy",
}
ALLREDUCE_HEADINGS = (
    *("cluster", "bytes", "what", "median", "fastest", "processor", "x bound", "x yardstick", "price", "x MPI"),
    *("x Horovod", "saving"),
)
ALLREDUCE_CAPTION = (
    "graph: inside tf.function, as in training; engine: NumPy in and out, no TensorFlow; no-op: an identity inside "
    "tf.function, the cost of measuring; tcp, memory: the yardsticks, the least that must be done between hosts and in "
    "one host; processor: time of all ranks, per GB of the buffer or per call; x: median over theirs, below 1 is "
    "faster; price: the planner's over the median; saving: of our ring's time"
)
TRAINING_HEADINGS = (
    *("model", "cluster", "what", "samples/s", "step", "fastest", "communication", "bound", "x Horovod", "x links2"),
)
TRAINING_CAPTION = (
    "medians, of the slowest rank in each step; no communication: the same step with the plain optimizer; "
    "communication: what it adds; bound: of the bytes on the hosts' links; x: samples per second over Horovod's, "
    "above 1 is faster"
)
# Columns of words; all others hold figures and are aligned to the right.
LEFT = ("model", "cluster", "what")
# Buffers below this have their processor time per call in the table: per byte it would be that of the call.
LEAST_PER_BYTE = 65_536
# What marks a row whose result was wrong.
WRONG = " WRONG"


def seconds(value: float) -> str:
    """Write a time with three digits and its unit."""
    if value >= 1000:
        return f"{float(f'{value:.3g}'):,.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.3g} us"


def ratio(value: float | None) -> str:
    """Write a ratio with two digits after the point; nothing for None."""
    return "" if value is None else f"{value:.2f}"


def _coloured(value: float | None) -> str:
    colour = "green" if value is not None and value <= 1 else "red"
    return "" if value is None else f"[{colour}]{value:.2f}[/{colour}]"


def drawn(
    title: str,
    caption: str | None,
    headings: Sequence[str],
    lines: Iterable[tuple[Any, Sequence[str], bool]],
    left: Sequence[str] = LEFT,
    wrap: bool = False,
) -> Table:
    """Draw a table.

    Args:
        lines: for each row its section, its cells and whether it is red; a line separates two sections.
        left: the headings of the columns that are aligned to the left.
        wrap: whether long headings and cells may take several lines.
    """
    table = Table(title=title, caption=caption)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=not wrap)
    last: Any = None
    for section, cells, red in lines:
        if section != last:
            table.add_section()
        last = section
        table.add_row(*cells, style="bold red" if red else None)
    return table


def faults_of(rows: Iterable[Mapping[str, Any]], what: str, place: Callable[[Mapping[str, Any]], str]) -> list[str]:
    """Write a line for each wrong row, with the first thing that was wrong: "wrong WHAT: PLACE: WORDS"."""
    wrong = [row for row in rows if row["correct"] is False]
    first = [row["wrong"] if isinstance(row["wrong"], str) else row["wrong"][0] for row in wrong]
    return [f"wrong {what}: {place(row)}: {words}" for row, words in zip(wrong, first, strict=True)]


def processor(row: Mapping[str, Any]) -> str:
    """Write the processor time of a row of bench allreduce; nothing if an older version has measured it."""
    if row.get("processor_seconds_per_gb") is None:
        return ""
    if row["bytes"] < LEAST_PER_BYTE:
        return f"{seconds(row['processor_seconds_per_call'])}/call"
    return f"{row['processor_seconds_per_gb']:.3g} s/GB"


def words_of(row: Mapping[str, Any]) -> str:
    """Name a row of bench allreduce: what was called, how, and which algorithm "auto" has chosen."""
    if row["algorithm"] in ("noop", "mpi", *YARDSTICKS):
        return NAMES[row["algorithm"]]
    chosen = f" -> {row['chosen']}" if row["chosen"] not in ("", row["algorithm"]) else ""
    return f"{NAMES.get(row['algorithm'], row['algorithm'])} {row['how']}{chosen}"


def allreduce_table(result: Mapping[str, Any]) -> Table:
    """Draw a result of bench allreduce: a row for each cluster, size and contestant."""
    lines = []
    last: Any = None
    for place, rows in places(result["rows"]).items():
        for row in rows:
            beside = ratios(row, rows)
            cells = [
                "" if last is not None and last[:2] == place[:2] else cluster_name(row),
                "" if last == place else f"{row['bytes']:,}",
                words_of(row) + (WRONG if row["correct"] is False else ""),
                seconds(row["seconds_median"]),
                seconds(row["seconds_min"]),
                processor(row),
                ratio(beside["bound"]),
                ratio(beside["yardstick"]),
                ratio(beside["predicted"]),
                _coloured(beside["mpi"]),
                _coloured(beside["horovod"]),
                "" if beside["saving"] is None else f"{beside['saving']:.1%}",
            ]
            lines.append((place, cells, row["correct"] is False))
            last = place
    return drawn(result["benchmark"], ALLREDUCE_CAPTION, ALLREDUCE_HEADINGS, lines)


def _allreduce_place(row: Mapping[str, Any]) -> str:
    return f"{words_of(row)}, {cluster_name(row)} ranks, {row['bytes']:,} bytes"


def faults(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write a line for each wrong row of bench allreduce, with the first wrong element."""
    return faults_of(rows, "result", _allreduce_place)


def losses(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say where we are slower.

    Returns:
        A line for each opponent: in how many rows it is faster, and where by most. MPI is compared with calls of the
        engine if there are any, Horovod with the same kind of call.
    """
    engine = any(row["how"] == "engine" and row["algorithm"] not in NAMES for row in rows)
    lines = []
    for key, name in (("mpi", NAMES["mpi"]), ("horovod", NAMES["horovod"])):
        compared = [
            (against, row)
            for group in places(rows).values()
            for row in group
            if row["algorithm"] not in NAMES and (key != "mpi" or not engine or row["how"] == "engine")
            if (against := ratios(row, group)[key]) is not None
        ]
        slower = [(against, row) for against, row in compared if against > 1]
        if slower:
            worst, row = max(slower, key=lambda pair: pair[0])
            lines.append(
                f"slower than {name} in {len(slower)} of {len(compared)} rows, at worst x{worst:.2f} "
                f"({_allreduce_place(row)})"
            )
        elif compared:
            lines.append(f"slower than {name} in none of {len(compared)} rows")
    return lines


def training_words(row: Mapping[str, Any]) -> str:
    """Name a row of bench training: the algorithm, which one "auto" has chosen, and how Horovod was called."""
    name = TRAINING_NAMES.get(row["algorithm"], row["algorithm"])
    if row["chosen"] in ("", parts_of(row["algorithm"])[0]):
        return name
    return f"{name} ({row['chosen']})" if row["algorithm"] in TRAINING_NAMES else f"{name} -> {row['chosen']}"


def training_table(result: Mapping[str, Any]) -> Table:
    """Draw a result of bench training: a row for each model, cluster and contestant."""
    lines = []
    last: Any = None
    for row in result["rows"]:
        place = (row["run"], row["model"], row["ranks_per_host"])
        bound, exposed = row["bound_seconds"], row["exposed_communication_seconds"]
        cells = [
            "" if place == last else f"{row['model']}, {row['bytes'] / 1e6:.1f} MB",
            "" if place == last else cluster_name(row),
            training_words(row) + (WRONG if row["correct"] is False else ""),
            f"{row['samples_per_second']:.4g}",
            seconds(row["step_seconds_median"]),
            seconds(row["step_seconds_min"]),
            "" if exposed is None else seconds(max(exposed, 0.0)),
            "" if bound is None else seconds(bound),
            ratio(row["against_horovod"]),
            ratio(row["against_horovod_links2"]),
        ]
        lines.append((place, cells, row["correct"] is False))
        last = place
    return drawn(result["benchmark"], TRAINING_CAPTION, TRAINING_HEADINGS, lines)


def training_faults(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write a line for each wrong row of bench training."""
    return faults_of(rows, "training", lambda row: f"{training_words(row)}, {row['model']}, {cluster_name(row)} ranks")


def trials(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write a line for each row with a choice of calls: which one was measured, and how fast each was in the trial."""
    lines = []
    for row in rows:
        if tried := row.get("trial_seconds", {}):
            times = ", ".join(f"{way} calls {seconds(time_s)} a step" for way, time_s in tried.items())
            lines.append(
                f"{TRAINING_NAMES[row['algorithm']]}, {cluster_name(row)} ranks: {row['chosen']} calls ({times})"
            )
    return lines
