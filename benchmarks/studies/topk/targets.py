"""The goals of the exact top-k on a processor, and whether the rows of the study reach them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.studies.topk.inputs import HARD, ORDINARY
from hvd_ext.bench.table import drawn

HEADINGS = ("target", "elements", "density", "threads", "must", "stretch", "measured", "CPU", "input", "verdict")
LARGE = 25_000_000
SMALL = (256_000, 1_100_000)


@dataclasses.dataclass(frozen=True)
class Target:
    """One goal.

    Attributes:
        item: the goal in words.
        contestant: whose rows count.
        must: the figure to reach, by density.
        stretch: a better figure still, by density.
        quantity: of the rows: "x_yardstick" or "x_less_noop", which must not be above the figure, or "x_ours", not
            below it.
        elements: the least and the largest length that count.
        inputs: the inputs that count; the worst of them decides.
        several: whether rows of several threads count, instead of those of one.
    """

    item: str
    contestant: str
    must: Mapping[float, float]
    stretch: Mapping[float, float]
    quantity: str = "x_yardstick"
    elements: tuple[int, int] = (LARGE, 2**31)
    inputs: tuple[str, ...] = ORDINARY
    several: bool = False


def _both(low: float, high: float) -> dict[float, float]:
    return {0.001: low, 0.01: high}


def _factor(item: str, contestant: str, must: float, stretch: float) -> Target:
    return Target(item, contestant, _both(must, must), _both(stretch, stretch), "x_ours")


def _small(item: str, contestant: str) -> Target:
    return Target(item, contestant, _both(1.5, 1.5), _both(1.25, 1.30), "x_less_noop", SMALL)


TARGETS = (
    Target("x one read pass", "exact", _both(1.15, 1.30), _both(1.06, 1.15)),
    _small("x one read pass and a dispatch, 256 K to 1 M", "exact"),
    _small("the same in a tf.function", "graph"),
    Target("x one read pass, 161 segments", "segments", _both(1.30, 1.40), _both(1.15, 1.25)),
    Target("x the bare add, error feedback", "feedback", _both(1.15, 1.45), _both(1.08, 1.20)),
    Target("x one read pass, hard inputs", "exact", _both(2.0, 2.0), _both(1.5, 1.5), inputs=HARD),
    Target("x one read pass of as many threads", "exact", _both(1.25, 1.45), _both(1.10, 1.25), several=True),
    _factor("times as fast as Algorithm 1 as printed", "algorithm1", 40, 55),
    _factor("times as fast as mode mstopk", "mstopk", 18, 25),
    _factor("times as fast as tf.math.top_k", "tf", 12, 15),
    _factor("times as fast as torch.topk", "torch", 40, 50),
    _factor("times as fast as np.argpartition", "numpy", 30, 50),
)


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compare the rows of one run with the goals.

    Returns:
        For each goal, length, density and number of threads that has rows: item, elements, density, threads, must,
        stretch, measured (of the worst input), input (which one), measured_cpu (that ratio of the processor's time, if
        it is to a yardstick and of one thread), met, and the verdict in words.
    """
    found = []
    for target in TARGETS:
        mine = [row for row in rows if _counts(target, row)]
        for place in dict.fromkeys((row["elements"], row["threads"], row["density"]) for row in mine):
            here = [row for row in mine if (row["elements"], row["threads"], row["density"]) == place]
            most = target.quantity != "x_ours"
            worst = (max if most else min)(here, key=lambda row: row[target.quantity])
            elements, threads, density = place
            passes = target.quantity == "x_yardstick"
            measured, must, stretch = worst[target.quantity], target.must[density], target.stretch[density]
            found.append(
                {
                    "item": target.item,
                    "elements": elements,
                    "density": density,
                    "threads": threads,
                    "must": must,
                    "stretch": stretch,
                    "measured": measured,
                    "measured_cpu": worst["x_yardstick_cpu"] if passes and threads == 1 else None,
                    "input": worst["input"],
                    "met": measured <= must if most else measured >= must,
                    "verdict": verdict(measured, must, stretch, most),
                }
            )
    return found


def _counts(target: Target, row: Mapping[str, Any]) -> bool:
    return (
        row["contestant"] == target.contestant
        and row["density"] in target.must
        and row["input"] in target.inputs
        and target.elements[0] <= row["elements"] <= target.elements[1]
        and (row["threads"] > 1) == target.several
        and row.get(target.quantity) is not None
    )


def verdict(measured: float, must: float, stretch: float, most: bool) -> str:
    """Say "met, and the stretch goal", "met", or by what part of the goal `measured` misses it.

    Args:
        measured: the figure.
        must: the goal.
        stretch: the stretch goal.
        most: whether the figure must not be above the goal; else it must not be below.
    """
    excess = measured / must - 1 if most else 1 - measured / must
    if excess > 0:
        return f"missed by {excess:.1%}"
    return "met, and the stretch goal" if (measured <= stretch if most else measured >= stretch) else "met"


def verdicts_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compare the rows of a file with the goals, each run by itself."""
    runs = dict.fromkeys(row["run"] for row in rows)
    return [verdict for run in runs for verdict in verdicts([row for row in rows if row["run"] == run])]


def cells_of(target: Mapping[str, Any]) -> list[str]:
    """Write one of `verdicts` as the cells of a table, see `HEADINGS`."""
    figures = [f"{target[name]:.3g}" for name in ("must", "stretch", "measured")]
    numbers = [f"{target['elements']:,}", f"{target['density']:g}", str(target["threads"])]
    cpu = "" if target["measured_cpu"] is None else f"{target['measured_cpu']:.3g}"
    return [target["item"], *numbers, *figures, cpu, target["input"], target["verdict"]]


def table(found: Sequence[Mapping[str, Any]]) -> Table:
    """Draw verdicts as a table; what was missed is red."""
    lines = [(0, cells_of(target), not target["met"]) for target in found]
    return drawn("goals, and the worst input of each", None, HEADINGS, lines, ("target", "input", "verdict"))
