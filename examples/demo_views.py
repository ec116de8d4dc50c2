"""What the demo shows: its trainings as rows of numbers, a table and a picture."""

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
# Okabe and Ito's palette; the opponent is grey
COLOURS = {"Horovod": "#777777", "hvd_ext": "#0072B2", "hvd_ext, TopK": "#D55E00"}


@dataclass
class Training:
    """One way to train, as it went in one or several turns.

    Attributes:
        name: for table and picture.
        total: steps of a turn; 0 while the ranks start.
        parameters: of the model.
        steps: of each turn, seconds of each step.
        accuracies: of each turn, how many steps were done and the share of the test digits that was right then.
        ends: of each turn, how it ended; the values of examples/digits.py.
    """

    name: str
    total: int = 0
    parameters: int = 0
    steps: list[list[float]] = field(default_factory=list)
    accuracies: list[list[tuple[int, float]]] = field(default_factory=list)
    ends: list[dict[str, Any]] = field(default_factory=list)

    def take(self, event: dict[str, Any]) -> None:
        """Take one event of the report of examples/handwritten.py."""
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
        """Steps of all turns so far."""
        return sum(map(len, self.steps))

    @property
    def status(self) -> str:
        """A few words for the progress display."""
        if len(self.steps) == len(self.ends):
            return "the ranks start"
        tests = self.accuracies[-1]
        return f"{tests[-1][1]:.1%} of the test digits right" if tests else "first steps"

    def row(self) -> dict[str, Any]:
        """Give the numbers of the finished training.

        Returns:
            `first_ms`: the first step, in which TensorFlow traces and hvd_ext makes its plans; the clock starts behind
            it. `step_ms`: median and quartiles over the other steps of all turns. `curves`: of each turn, seconds of
            training and accuracy. `seconds_to_target`: None where a turn did not come so far. Of several turns the
            median is given.
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
    """Write how long the training took to the target."""
    seconds = row["seconds_to_target"]
    return "never" if seconds is None else f"{seconds:.1f} s"


def table(result: Mapping[str, Any]) -> Table:
    """Draw the trainings side by side.

    Args:
        result: the content of the demo's file.

    Returns:
        A table with one row each.
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
    """Draw accuracy over time, and the time of a step.

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
