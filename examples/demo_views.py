"""The results of the demo as rows of numbers, a table and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TARGET = 0.97
# Okabe and Ito's palette; the baseline is grey.
COLOURS = {"Horovod": "#777777", "hvd_ext": "#0072B2", "hvd_ext, TopK": "#D55E00"}


@dataclass
class Training:
    """The progress of one way to train, over one or several turns.

    Attributes:
        name: the name in the table and the picture.
        total: the number of steps of a turn; 0 while the ranks start.
        parameters: the number of the model's parameters.
        steps: for each turn, the seconds of each step.
        accuracies: for each turn, pairs of the number of steps done and the test accuracy after them.
        ends: for each turn, the last event of its report.
    """

    name: str
    total: int = 0
    parameters: int = 0
    steps: list[list[float]] = field(default_factory=list)
    accuracies: list[list[tuple[int, float]]] = field(default_factory=list)
    ends: list[dict[str, Any]] = field(default_factory=list)

    def take(self, event: dict[str, Any]) -> None:
        """Add one event of the report that examples/handwritten.py writes."""
        if event["kind"] == "start":
            self.total, self.parameters = event["total"], event["parameters"]
            self.steps.append([])
            self.accuracies.append([])
        elif event["kind"] == "test":
            self.steps[-1] += event["seconds"]
            self.accuracies[-1].append((len(self.steps[-1]), event["accuracy"]))
        elif event["kind"] == "end":
            self.ends.append(event)

    @property
    def done(self) -> int:
        """The number of steps done in all turns."""
        return sum(map(len, self.steps))

    @property
    def status(self) -> str:
        """A few words for the progress display."""
        if len(self.steps) == len(self.ends):
            return "the ranks start"
        tests = self.accuracies[-1]
        return f"{tests[-1][1]:.1%} of the test digits right" if tests else "first steps"

    def row(self) -> dict[str, Any]:
        """Return the numbers of the finished training.

        Returns:
            `first_ms`: the time of the first step, in which TensorFlow traces and hvd_ext makes its plans; the clock of
            the training starts after it. `step_ms`: the median and the quartiles over the other steps of all turns.
            `curves`: for each turn, seconds of training and accuracy. `seconds_to_target`: None if a turn did not reach
            the target. Over several turns the median is given.
        """
        later = [1e3 * step for turn in self.steps for step in turn[1:]]
        low, median, high = statistics.quantiles(later, n=4, method="inclusive")
        curves = [
            [(sum(steps[1:count]), accuracy) for count, accuracy in tests]
            for steps, tests in zip(self.steps, self.accuracies, strict=True)
        ]
        reached = [[seconds for seconds, accuracy in curve if accuracy >= TARGET] for curve in curves]
        return {
            "name": self.name,
            "algorithm": self.ends[0]["algorithm"],
            "first_ms": round(1e3 * statistics.median(turn[0] for turn in self.steps)),
            "step_ms": {"low": round(low, 1), "median": round(median, 1), "high": round(high, 1)},
            "seconds_to_target": round(statistics.median(turn[0] for turn in reached), 1) if all(reached) else None,
            "accuracy": round(statistics.median(curve[-1][1] for curve in curves), 4),
            "equal": all(end["equal"] for end in self.ends),
            "curves": [[[round(seconds, 2), round(accuracy, 4)] for seconds, accuracy in curve] for curve in curves],
            "steps_ms": [[round(1e3 * step, 1) for step in turn] for turn in self.steps],
        }


def time_to_target(row: Mapping[str, Any]) -> str:
    """Return the time that the training took to reach the target, as text."""
    seconds = row["seconds_to_target"]
    return "never" if seconds is None else f"{seconds:.1f} s"


def table(result: Mapping[str, Any]) -> Table:
    """Make the table of the trainings.

    Args:
        result: the content of the demo's file.

    Returns:
        A table with one row for each training.
    """
    drawn = Table(title=f"{result['parameters'] / 1e6:.1f} million parameters on {result['place']}")
    drawn.add_column("training", no_wrap=True)
    for heading in (
        "first step",
        "a step (middle half)",
        f"{result['target']:.0%} after",
        "at the end",
    ):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for row in result["rows"]:
        step = row["step_ms"]
        drawn.add_row(
            row["name"],
            f"{row['first_ms'] / 1e3:.1f} s",
            f"{step['median']:.0f} ms ({step['low']:.0f}-{step['high']:.0f})",
            time_to_target(row),
            f"{row['accuracy']:.1%}",
        )
    return drawn


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draw the accuracy over time, and the times of the steps.

    Args:
        result: the content of the demo's file.
        path: the picture, PNG; an older one is replaced.
    """
    from matplotlib.figure import Figure

    rows = result["rows"]
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    figure.suptitle(f"{result['parameters'] / 1e6:.1f} million parameters on {result['place']}", fontsize=11)
    accuracy, time = figure.subplots(1, 2, width_ratios=(3, 2))
    _accuracies(accuracy, rows, result["target"])
    _times(time, rows)
    figure.savefig(path, dpi=110, format="png")


def _accuracies(axis: Axes, rows: Sequence[Mapping[str, Any]], target: float) -> None:
    for row in rows:
        for turn, curve in enumerate(row["curves"]):
            seconds, accuracies = zip(*curve, strict=True)
            label = None if turn else f"{row['name']}: {target:.0%} after {time_to_target(row)}"
            percent = [100 * value for value in accuracies]
            axis.plot(seconds, percent, "o-", color=COLOURS[row["name"]], markersize=3.5, label=label)
    axis.axhline(100 * target, color="black", linewidth=0.8, linestyle=":")
    axis.set(
        title="accuracy over the time of training",
        xlabel="seconds, without the first step",
        ylabel="test digits right, %",
    )
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")


def _times(axis: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    for place, row in enumerate(rows):
        step = row["step_ms"]
        spread = [[step["median"] - step["low"]], [step["high"] - step["median"]]]
        axis.barh(place, step["median"], 0.6, color=COLOURS[row["name"]], xerr=spread, capsize=4)
        axis.annotate(
            f"{step['median']:.0f} ms", (step["high"], place), (6, 0), textcoords="offset points", va="center"
        )
    axis.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.25 * max(row["step_ms"]["high"] for row in rows))
    axis.set(title="a step: median and middle half", xlabel="milliseconds")
    axis.grid(axis="x", alpha=0.3)
