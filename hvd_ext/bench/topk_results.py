"""The file and the tables of the top-k benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from hvd_ext.bench import results
from hvd_ext.bench.results import result_of
from hvd_ext.bench.table import ratio, seconds
from hvd_ext.bench.topk import NAMES
from hvd_ext.bench.topk_inputs import ORDINARY

BENCHMARK = "top-k by magnitude, float32"
CAPTION = (
    "medians, data cold; x pass: paired with one prefetched read of the same data (+: with the bare addition); "
    "CPU: the same of the processor's time; x ours: over hvd_ext.mstopk; picked: of the k asked for; recall: the share "
    "of k that is among the largest"
)
LEFT = ("input", "what")
HEADINGS = (*LEFT, "median", "fastest", "ns/element", "x pass", "CPU", "x ours", "picked / k", "recall")
TARGET_HEADINGS = ("target", "elements", "density", "threads", "must", "stretch", "measured", "CPU", "input", "verdict")


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
    return f"{row['elements']:,} elements, {share_of(row)}"


def share_of(row: Mapping[str, Any]) -> str:
    """Name what a row's selection was besides its length: "k = 0.001 d, 1 thread"."""
    return f"k = {row['density']:g} d, {row['threads']} thread" + ("" if row["threads"] == 1 else "s")


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


def markdown(found: Mapping[str, Any], facts: str) -> str:
    """Write the result as Markdown.

    Args:
        found: as `load` returns it.
        facts: machine, versions and samples in words.

    Returns:
        The targets, and for each place a table of contestants and inputs, those that are hard apart. Of one input and
        several lengths: a table of contestants and lengths.
    """
    lines = [facts, ""]
    if len({row["input"] for row in found["rows"]}) == 1 < len({row["elements"] for row in found["rows"]}):
        return "\n".join([*lines, *_sizes(found["rows"])])
    if found["targets"]:
        lines += _table(TARGET_HEADINGS, [target_cells(target) for target in found["targets"]])
    for (_, place), rows in places(found["rows"]).items():
        present = list(dict.fromkeys(row["input"] for row in rows))
        here = {(row["contestant"], row["input"]): row for row in rows}
        for ordinary in (True, False):
            inputs = [name for name in present if (name in ORDINARY) == ordinary]
            names = [name for name in NAMES if any((name, one) in here for one in inputs)]
            table = [[NAMES[name], *(_cell(here.get((name, one))) for one in inputs)] for name in names]
            if inputs:
                lines += [place + (":" if ordinary else ", hard inputs:"), "", *_table(("what", *inputs), table)]
    lines += [f"- {line}" for line in [*faults(found["rows"]), *found["runs"][0].get("notes", [])]]
    return "\n".join([*lines, ""])


def _sizes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines: list[str] = []
    for share in dict.fromkeys(share_of(row) for row in rows):
        here = {(row["contestant"], row["elements"]): row for row in rows if share_of(row) == share}
        lengths = sorted({elements for _, elements in here})
        names = [name for name in NAMES if any((name, one) in here for one in lengths)]
        table = [[NAMES[name], *(_cell(here.get((name, one))) for one in lengths)] for name in names]
        lines += [f"{share}, {rows[0]['input']}:", "", *_table(("elements", *(f"{one:,}" for one in lengths)), table)]
    return lines


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
