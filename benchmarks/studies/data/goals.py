"""The goals of the data cache, and what the rows of the study say about them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

OURS = "datacache"
# What is measured: in words, and the unit of the figures.
CPU, START = "CPU per sample", "CPU until the first batch"
MEMORY = "memory beside the job"
SOURCE_BYTES, DECODED, FIRST_BATCH = "bytes from the source", "samples decoded", "first batch"
HITS = "hits"
FIRST_WAIT, LATER_WAIT, TRAINING = "wait per step, epoch 1", "wait per step, later", "training"
PRIVATE, STATE, SAVE, RESTORE, SKIP = "private memory", "state", "save", "restore", "skip 1,000 steps"
UNITS = {
    CPU: "s",
    START: "s",
    MEMORY: "bytes",
    SOURCE_BYTES: "bytes",
    DECODED: "samples",
    FIRST_BATCH: "s",
    HITS: "share",
    FIRST_WAIT: "s",
    LATER_WAIT: "s",
    TRAINING: "s",
    PRIVATE: "bytes",
    STATE: "bytes",
    SAVE: "s",
    RESTORE: "s",
    SKIP: "s",
}
# Of each rank, beside its share of the data, in the goal of four ranks.
RANK_BYTES = 20_000_000


@dataclasses.dataclass(frozen=True)
class Goal:
    """A bound on a figure of our rows, or on its ratio to a figure of other rows.

    Attributes:
        part: of the benchmark.
        quantity: of our row.
        most: the figure must not be above it; a function takes the row.
        least: the figure must not be below it.
        contestant: ours or theirs, over which the figure is taken; "" for none.
        over: the quantity of that row, if it is another one.
        inverse: whether the ratio is theirs over ours: how many times as fast.
        place: of the row; "" for all of the part.
    """

    part: str
    quantity: str
    most: float | Callable[[Mapping[str, Any]], float] | None = None
    least: float | None = None
    contestant: str = ""
    over: str = ""
    inverse: bool = False
    place: str = ""


def _data_and_ranks(row: Mapping[str, Any]) -> float:
    return float(1.1 * row["data_bytes"] + RANK_BYTES * row["ranks"])


GOALS = (
    Goal("hits", CPU, most=1.8, contestant="memcpy", place="27.6 kB"),
    Goal("hits", CPU, most=0.5, contestant="cache", place="3.1 kB"),
    Goal("hits", CPU, most=0.9, contestant="cache", place="27.6 kB"),
    Goal("hits", CPU, most=1.05, contestant="cache", place="150.5 kB"),
    Goal("ranks", MEMORY, most=_data_and_ranks),
    Goal("first", CPU, most=1.05, contestant="decode"),
    Goal("second", SOURCE_BYTES, most=0),
    Goal("second", DECODED, most=0),
    Goal("second", FIRST_BATCH, most=1.0),
    Goal("half", HITS, least=0.495, most=0.505),
    Goal("slow", LATER_WAIT, most=0.1, contestant=OURS, over=FIRST_WAIT),
    Goal("slow", TRAINING, least=2.0, contestant="decode", inverse=True),
    Goal("many", PRIVATE, most=20e6),
    Goal("many", STATE, most=10e3),
    Goal("many", SAVE, most=0.2),
    Goal("many", RESTORE, most=0.2),
    Goal("many", SKIP, most=2.0),
)


def judged(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Put the goals beside the figures.

    Args:
        rows: of one run; each has part, place, contestant, quantity and samples.

    Returns:
        The rows with median and goals: a list of those that are set to the row. A goal has the figure that is
        measured, the least or the most that it may be, over what it was taken, and whether it is met.
    """
    found = {(row["part"], row["place"], row["contestant"], row["quantity"]): row for row in rows}
    return [{**row, "median": statistics.median(row["samples"]), "goals": _of(row, found)} for row in rows]


def _of(row: Mapping[str, Any], found: Mapping[tuple[str, ...], Mapping[str, Any]]) -> list[dict[str, Any]]:
    goals = []
    for goal in GOALS:
        fits = (goal.part, goal.quantity) == (row["part"], row["quantity"]) and goal.place in ("", row["place"])
        if not fits or not row["contestant"].startswith(OURS):
            continue
        contestant = row["contestant"] if goal.contestant == OURS else goal.contestant
        other = found.get((row["part"], row["place"], contestant, goal.over or goal.quantity))
        if goal.contestant and other is None:
            continue  # it was not measured
        measured = statistics.median(row["samples"] if other is None else _ratios(row, other, goal.inverse))
        most = goal.most(row) if callable(goal.most) else goal.most
        met = (most is None or measured <= most) and (goal.least is None or measured >= goal.least)
        over = "" if other is None else (goal.over or goal.contestant)
        goals.append({"measured": measured, "least": goal.least, "most": most, "over": over, "met": met})
    return goals


def _ratios(row: Mapping[str, Any], other: Mapping[str, Any], inverse: bool) -> list[float]:
    """Compare samples of the same turn with each other; where they are not as many, with the median."""
    mine, theirs = row["samples"], other["samples"]
    if len(mine) != len(theirs):
        theirs = [statistics.median(theirs)] * len(mine)
    pairs = [(b, a) if inverse else (a, b) for a, b in zip(mine, theirs, strict=True)]
    return [above / below if below else float("inf") for above, below in pairs]
