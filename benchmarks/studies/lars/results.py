"""What came of the study of LARS: ratios, goals, its table on the terminal, and its page."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.studies.lars.worker import LAMB, NORMS, PTO, UPDATE
from benchmarks.studies.markdown import table as markdown_table, where
from hvd_ext.bench.results import cluster_name
from hvd_ext.bench.table import drawn

BENCHMARK = "LARS, norms and updates"
NAMES = {
    (NORMS, "read"): "one pass over the same bytes",
    (NORMS, "ours"): "norms: all in one op",
    (NORMS, "l2_loss"): "norms: tf.nn.l2_loss, one op per tensor",
    (NORMS, "norm"): "norms: tf.norm of each tensor",
    (UPDATE, "ours"): "hvd.optimizers.LARS",
    (UPDATE, "ops"): "the same LARS in Keras' operations",
    (UPDATE, "sgd"): "keras.optimizers.SGD, momentum",
    (LAMB, "ours"): "hvd.optimizers.LAMB",
    (LAMB, "ops"): "the same LAMB in Keras' operations",
    (LAMB, "keras"): "keras.optimizers.Lamb",
    (PTO, "alone"): "norms: each rank all",
    (PTO, "together"): "norms: divided among the ranks",
    (PTO, "auto"): "norms: auto",
}


# part, contestant, what is compared, with whom, and the most that it may be; the paper's times on 128 GPUs are 11 and
# 7 ms for ResNet-50, 30 and 14 ms for a Transformer (CommLib, section 5.4).
GOALS = (
    (NORMS, "ours", "seconds", "read", 1.3),
    (NORMS, "ours", "cpu", "l2_loss", 1 / 3),
    (UPDATE, "ours", "cpu", "ops", 0.5),
    (UPDATE, "ours", "cpu", "sgd", 1.2),
    (LAMB, "ours", "cpu", "ops", 0.5),
    (LAMB, "ours", "cpu", "keras", 0.5),
    (PTO, "together", "cpu", "alone", 0.35),
    (PTO, "auto", "seconds", "best", 1.05),
)


# A goal of divided norms holds from so many ranks on: two could save no more than half.
LEAST_RANKS = {(PTO, "together"): 4, (PTO, "auto"): 2}


HEADINGS = ("place", "what", "time, ms", "CPU of all ranks, ms", "chosen")


PAPER = "CommLib, section 5.4, 128 GPUs: ResNet-50 11 ms alone, 7 ms divided; Transformer 30 ms and 14 ms"


def ratio(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], what: str, other: str) -> float:
    """Compare a row with another one of its group, in the turns of both.

    Args:
        row: of a contestant.
        rows: with those that it is compared with.
        what: "seconds" or "cpu".
        other: a contestant; "best": the better of alone and together.

    Returns:
        The median of the ratios of the samples of a turn; with "best" the ratio of medians.
    """
    group = {one["contestant"]: one for one in rows if _place(one) == _place(row)}
    if other == "best":
        return float(row[what] / min(group["alone"][what], group["together"][what]))
    pairs = zip(row[f"{what}_samples"], group[other][f"{what}_samples"], strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs if theirs > 0)


def goals(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say of each goal, for each place, what was measured."""
    lines = []
    for part, contestant, what, other, most in GOALS:
        for row in rows:
            fewest = LEAST_RANKS.get((part, contestant), 1)
            if (row["part"], row["contestant"]) != (part, contestant) or row["ranks"] < fewest:
                continue
            seen = ratio(row, rows, what, other)
            verdict = "reached" if seen <= most else "missed"
            than = "the better way" if other == "best" else NAMES[part, other]
            lines.append(
                f"{place_of(row)}: {NAMES[part, contestant]}, {'time' if what == 'seconds' else 'CPU'} {seen:.2f} of "
                f"{than} (goal {most:.2f}: {verdict})"
            )
    return lines


def place_of(row: Mapping[str, Any]) -> str:
    """Name a row's place, such as "resnet50 on 2 + 2 ranks"."""
    return f"{row['model']} on {cluster_name(row)} rank{'s' * (row['ranks'] > 1)}"


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Draw the rows: medians of the slowest rank's time for one call, and of the CPU of all ranks together."""
    lines = [(_place(row), cells(row), False) for row in rows]
    return drawn("LARS: medians for one call", None, HEADINGS, lines, HEADINGS[:2])


def cells(row: Mapping[str, Any]) -> list[str]:
    """Give the texts of a row, one for each of `HEADINGS`."""
    name = NAMES[row["part"], row["contestant"]]
    return [place_of(row), name, f"{1e3 * row['seconds']:.2f}", f"{1e3 * row['cpu']:.2f}", row["chosen"] or ""]


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row.get("run"), row["model"], tuple(row["ranks_per_host"]), row["part"]


def markdown(result: Mapping[str, Any]) -> str:
    """Write a result of the study as Markdown: machine, versions, a table with every row, the goals."""
    said = "".join(f"- {line}\n" for line in goals(result["rows"]))
    told = f"{where(result['runs'][0])} Medians of {len(result['rows'][0]['seconds_samples'])} samples, in turns."
    return f"{told}\n\n{markdown_table(HEADINGS, map(cells, result['rows']))}\n{said}"
