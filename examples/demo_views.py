"""What the demo shows: a table and a plot of its trainings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table


@dataclass
class Training:
    """One training as it went: its name, its epochs and how it ended; the values of handwritten.Report."""

    name: str
    ranks: int = 0
    epochs: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)

    def take(self, event: dict[str, Any]) -> None:
        """Take one event of the training's report."""
        if event["kind"] == "start":
            self.ranks = event["ranks"]
        elif event["kind"] == "epoch":
            self.epochs.append(event)
        elif event["kind"] == "end":
            self.end = event

    @property
    def step_ms(self) -> float:
        """Milliseconds of a step, median over the epochs but the first, which traces."""
        later = sorted(epoch["seconds"] / epoch["steps"] for epoch in self.epochs[1:] or self.epochs)
        return 1e3 * later[len(later) // 2]

    @property
    def status(self) -> str:
        """A few words for the progress display."""
        if not self.ranks:
            return "starting"
        return (
            f"{self.epochs[-1]['test_accuracy']:.1%} of test digits right" if self.epochs else "tracing the first step"
        )


def table(trainings: Sequence[Training]) -> Table:
    """Draw the trainings side by side.

    Args:
        trainings: finished ones.

    Returns:
        A table with one row each.
    """
    drawn = Table(title="handwritten digits")
    drawn.add_column("allreduce", no_wrap=True)
    for heading in ("ranks", "test accuracy", "training loss", "a step", "equal weights"):
        drawn.add_column(heading, justify="right")
    for one in trainings:
        last, algorithm = one.epochs[-1], one.end["algorithm"]
        drawn.add_row(
            f"{one.name}, {algorithm}" if algorithm else one.name,
            str(one.ranks),
            f"{last['test_accuracy']:.2%}",
            f"{last['loss']:.4f}",
            f"{one.step_ms:.1f} ms",
            "yes" if one.end["equal"] else "NO",
        )
    return drawn


def plot(trainings: Sequence[Training], path: Path) -> None:
    """Draw loss, accuracy and time of the trainings.

    Args:
        trainings: finished ones.
        path: the picture, PNG; an older one is replaced.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, (loss, accuracy, time) = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for one, style in zip(trainings, ("o-", "s--"), strict=False):
        epochs = [epoch["epoch"] for epoch in one.epochs]
        loss.plot(epochs, [epoch["loss"] for epoch in one.epochs], style, label=one.name, markersize=4)
        accuracy.plot(
            epochs, [100 * epoch["test_accuracy"] for epoch in one.epochs], style, label=one.name, markersize=4
        )
        time.bar(one.name, one.step_ms)
    loss.set(title="training loss", xlabel="epoch", yscale="log")
    accuracy.set(title="test digits right, %", xlabel="epoch")
    time.set(title="a step, ms (all ranks on this machine)")
    for axes in (loss, accuracy):
        axes.grid(alpha=0.3)
        axes.legend()
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
