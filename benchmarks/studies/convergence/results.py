"""What the runs of a convergence study say together: means, intervals, time to an accuracy; table, Markdown, plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.studies.convergence.plan import Run, Study, finished
from benchmarks.studies.markdown import table as markdown_table
from hvd_ext.bench.plots import selected
from hvd_ext.bench.table import drawn, seconds
from hvd_ext.commands.figures import finish, panels
from hvd_ext.errors import InvalidError

BENCHMARK = "convergence"
DENSE = "dense"
# Student's t, two-sided 95 %, by degrees of freedom; for more than 10 the last is a little too wide.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
# What a sparse training may lose: so much below dense's last accuracy is near it.
NEAR = 0.005
# Okabe and Ito's palette; dense is black.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00")
HEADINGS = (
    "model",
    "setting",
    "seeds",
    "accuracy",
    "less dense",
    "step",
    "whole training",
    "within 0.5",
    "x within",
    "reaches dense",
    "x reaches",
)
CAPTION = (
    "accuracy: of all test examples after the last epoch, mean over the seeds and its 95 % interval (Student's t); "
    "less dense: mean difference to the dense run of the same seed, points; step: median at the rate of the study, "
    "after the warm-up; within 0.5: time until the mean curve is 0.5 points below dense's last; reaches dense: until "
    "it is at dense's last; x within, x reaches: dense's time over it"
)


def interval(values: Sequence[float]) -> float | None:
    """Give half of the 95 % confidence interval of the mean of independent values; None for fewer than two values.

    It is t s / sqrt(n), with n - 1 degrees of freedom.
    """
    if len(values) < 2:
        return None
    return T95[min(len(values) - 1, len(T95)) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def collected(folder: Path, study: Study) -> dict[str, Any]:
    """Make the content of one file of the finished runs of a study, whose files lie in a folder.

    Returns:
        The study, and a row for each model and setting with a finished run: accuracies by seed, curves, times.

    Raises:
        InvalidError: runs of one model were made with different data.
    """
    rows, machines = [], []
    digests: dict[str, str] = {}
    for model, recipe in study.models.items():
        for setting, how in study.settings.items():
            runs = {seed: finished(folder, study, Run(model, setting, seed)) for seed in study.seeds}
            done = {seed: found for seed, found in runs.items() if found is not None}
            timed = finished(folder, study, Run(model, setting, None))
            for found in (*done.values(), *([timed] if timed else [])):
                if digests.setdefault(model, found["digest"]) != found["digest"]:
                    raise InvalidError(f"runs of {model} ({folder}): were made with different data; remove some")
                machines.append({"date": found["date"], "machine": found["machine"], "versions": found["versions"]})
            if not done:
                continue
            first = next(iter(done.values()))
            row = {
                "model": model,
                "setting": setting,
                "how": how.model_dump(),
                "parameters": first["parameters"],
                "tested": first["tested"],
                "accuracy": {str(seed): found["accuracy"] for seed, found in done.items()},
                "curves": {str(seed): _whole(found) for seed, found in done.items()},
                "equal": all(found["equal"] for found in done.values()),
                "step_seconds": timed["step_seconds"] if timed else None,
                "warm_step_seconds": timed["warm_step_seconds"] if timed else [],
                "whole_step_seconds": timed.get("whole_step_seconds", []) if timed else [],
                "recipe": recipe.model_dump(),
            }
            rows.append(row)
    about = min(machines, key=lambda one: one["date"]) if machines else {}
    return {"benchmark": BENCHMARK, "study": study.model_dump(mode="json"), "digests": digests, **about, "rows": rows}


def _whole(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Give a curve whose last point is the accuracy on all test examples; the points before are of a part of them."""
    *before, last = found["curve"]
    return [*before, {**last, "accuracy": found["accuracy"]}]


def mean_curve(row: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Give the steps and the accuracy after each epoch, means over the seeds of a row."""
    curves = list(row["curves"].values())
    return [
        (points[0]["steps"], statistics.fmean(point["accuracy"] for point in points))
        for points in zip(*curves, strict=True)
    ]


def seconds_after(row: Mapping[str, Any], steps: int) -> float | None:
    """Say how long the first steps of a row take at the rate of the study: the median step times their number.

    The steps of the warm-up come first; its densities have equal parts of it. From `until` on steps are dense.

    Returns:
        Seconds; None if no times were measured.
    """
    if not row["step_seconds"]:
        return None
    last = mean_curve(row)[-1][0]
    warm = [statistics.median(taken) for taken in row["warm_step_seconds"]]
    warmed = min(steps, round(row["how"]["warmup"] * last)) if warm else 0
    warm_seconds = warmed * statistics.fmean(warm) if warm else 0.0
    whole = row.get("whole_step_seconds")
    late = max(0, steps - round(row["how"]["until"] * last)) if whole else 0
    late_seconds = late * statistics.median(whole) if whole else 0.0
    return warm_seconds + (steps - warmed - late) * statistics.median(row["step_seconds"]) + late_seconds


def summary(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compare each row of `collected` with the dense one of its model.

    Returns:
        For each row: accuracy and its interval, difference and its interval (all 0 to 1), step and training seconds,
        near_seconds (until the accuracy is `NEAR` dense's; None for never) and near_sooner (dense's over it),
        reached_seconds and reached_sooner (the same until it is dense's).
    """
    dense_of = {row["model"]: row for row in found["rows"] if row["setting"] == DENSE}
    lines = []
    for row in found["rows"]:
        dense = dense_of.get(row["model"])
        values = list(row["accuracy"].values())
        shared = [seed for seed in row["accuracy"] if dense and seed in dense["accuracy"] and row is not dense]
        lost = [row["accuracy"][seed] - dense["accuracy"][seed] for seed in shared] if dense else []
        times = {}
        for name, distance in (("near", NEAR), ("reached", 0.0)):
            own, dense_s = _until(row, dense, distance), _until(dense, dense, distance)
            times[f"{name}_seconds"] = own
            times[f"{name}_sooner"] = dense_s / own if dense_s and own else None
        lines.append(
            {
                "model": row["model"],
                "setting": row["setting"],
                "seeds": len(values),
                "accuracy": statistics.fmean(values),
                "interval": interval(values),
                "difference": statistics.fmean(lost) if lost else None,
                "difference_interval": interval(lost),
                "step_seconds": statistics.median(row["step_seconds"]) if row["step_seconds"] else None,
                "training_seconds": seconds_after(row, mean_curve(row)[-1][0]),
                **times,
                "equal": row["equal"],
            }
        )
    return lines


def _until(row: Mapping[str, Any] | None, dense: Mapping[str, Any] | None, distance: float) -> float | None:
    if row is None or dense is None:
        return None
    target = mean_curve(dense)[-1][1] - distance
    steps = next((steps for steps, accuracy in mean_curve(row) if accuracy >= target), None)
    return None if steps is None else seconds_after(row, steps)


def _points(value: float | None, half: float | None, sign: str = "") -> str:
    if value is None:
        return ""
    return f"{100 * value:{sign}.2f}" + ("" if half is None else f" +- {100 * half:.2f}")


def _sooner(line: Mapping[str, Any], name: str) -> tuple[str, str]:
    time_s, sooner = line[f"{name}_seconds"], line[f"{name}_sooner"]
    return "" if time_s is None else seconds(time_s), "" if sooner is None else f"{sooner:.2f}"


def lines_of(found: Mapping[str, Any]) -> list[list[str]]:
    """Write the summary as rows with a text for each heading."""
    return [
        [
            line["model"],
            line["setting"] + ("" if line["equal"] else " UNEQUAL"),
            str(line["seeds"]),
            _points(line["accuracy"], line["interval"]),
            _points(line["difference"], line["difference_interval"], "+"),
            *("" if line[field] is None else seconds(line[field]) for field in ("step_seconds", "training_seconds")),
            *_sooner(line, "near"),
            *_sooner(line, "reached"),
        ]
        for line in summary(found)
    ]


def table(found: Mapping[str, Any]) -> Table:
    """Draw the summary: a row for each model and setting, red if its ranks ended with different weights."""
    title = f"convergence, hosts of {found['study']['hosts']} ranks"
    lines = [(line[0], line, line[1].endswith(" UNEQUAL")) for line in lines_of(found)]
    return drawn(title, CAPTION, HEADINGS, lines, HEADINGS[:2])


def markdown(found: Mapping[str, Any]) -> str:
    """Write what was trained, and the summary, as Markdown."""
    rows = {row["model"]: row for row in found["rows"]}
    about = [
        f"- {model}: {row['parameters']:,} parameters, {row['recipe']['epochs']} epochs, "
        f"{len(found['study']['hosts'])} hosts of {' + '.join(map(str, found['study']['hosts']))} ranks, batch "
        f"{row['recipe']['batch']} on each, learning rate {row['recipe']['learning_rate']:g}, tested with "
        f"{row['tested']:,} labels"
        for model, row in rows.items()
    ]
    return "\n".join([*about, "", markdown_table(HEADINGS, lines_of(found), " --- |")])


def draw(found: Mapping[str, Any], path: Path, only: Sequence[str] = ()) -> None:
    """Draw accuracy over epochs and over time, a column for each model.

    Args:
        found: of `collected`.
        path: of the PNG file.
        only: at most six settings; empty: the first six of the study.

    Raises:
        InvalidError: an unknown setting, too many of them, nothing to draw, or no matplotlib.
    """
    models = list(dict.fromkeys(row["model"] for row in found["rows"]))
    if not models:
        raise InvalidError("plot (no runs): there is nothing to draw")
    present = [name for name in found["study"]["settings"] if any(row["setting"] == name for row in found["rows"])]
    drawn = selected(present, only)
    colour_of = {DENSE: "#000000", **dict(zip((name for name in drawn if name != DENSE), COLOURS, strict=False))}
    figure, flat = panels(2 * len(models), len(models), 5.0, 3.8, 1.5)
    axes = [flat[: len(models)], flat[len(models) :]]
    for column, model in enumerate(models):
        rows = [row for row in found["rows"] if row["model"] == model and row["setting"] in drawn]
        for row in sorted(rows, key=lambda row: drawn.index(row["setting"])):
            curve = mean_curve(row)
            values = [100 * accuracy for _, accuracy in curve]
            style = {"color": colour_of[row["setting"]], "linewidth": 2.0 if row["setting"] == DENSE else 1.2}
            epochs = range(1, len(curve) + 1)
            axes[0][column].plot(epochs, values, label=row["setting"], **style)
            spread = [
                100 * statistics.stdev(point["accuracy"] for point in points) if len(points) > 1 else 0.0
                for points in zip(*row["curves"].values(), strict=True)
            ]
            low, high = ([value + sign * s for value, s in zip(values, spread, strict=True)] for sign in (-1, 1))
            axes[0][column].fill_between(epochs, low, high, color=style["color"], alpha=0.12, linewidth=0)
            times = [seconds_after(row, steps) for steps, _ in curve]
            known = [(time_s, value) for time_s, value in zip(times, values, strict=True) if time_s is not None]
            axes[1][column].plot([x for x, _ in known], [y for _, y in known], label=row["setting"], **style)
        axes[0][column].set(title=model, xlabel="epochs", ylabel="accuracy, %")
        axes[0][column].xaxis.get_major_locator().set_params(integer=True)
        axes[1][column].set(xlabel=f"seconds at {found['study']['rate']}", ylabel="accuracy, %")
        if axes[1][column].lines and any(len(line.get_xdata()) for line in axes[1][column].lines):
            axes[1][column].set_xscale("log")
        else:
            axes[1][column].set_visible(False)
        for axis in (axes[0][column], axes[1][column]):
            axis.grid(True, linewidth=0.4, alpha=0.5)
    finish(figure, [] if only else [name for name in present if name not in drawn], path)
