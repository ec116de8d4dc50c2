"""What the runs of a convergence study say together: means, intervals, time to an accuracy; table and Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from hvd_ext.bench import results
from hvd_ext.bench.convergence_study import Run, Study, finished
from hvd_ext.bench.table import seconds
from hvd_ext.errors import InvalidError

BENCHMARK = "convergence"
DENSE = "dense"
# Student's t, two-sided 95 %, by degrees of freedom; for more than 10 the last is a little too wide.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
# So much below dense's last accuracy is near: what a sparse training may lose.
NEAR = 0.005
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
    """Give half of the 95 % confidence interval of a mean.

    Args:
        values: of independent runs.

    Returns:
        t s / sqrt(n) with n - 1 degrees of freedom; None for fewer than two values.
    """
    if len(values) < 2:
        return None
    return T95[min(len(values) - 1, len(T95)) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def collected(folder: Path, study: Study) -> dict[str, Any]:
    """Put the finished runs of a study into one file's content.

    Args:
        folder: of the runs' files.
        study: the study.

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
                "recipe": recipe.model_dump(),
            }
            rows.append(row)
    about = min(machines, key=lambda one: one["date"]) if machines else {}
    return {"benchmark": BENCHMARK, "study": study.model_dump(mode="json"), "digests": digests, **about, "rows": rows}


def _whole(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The curve, which ends in what all test examples say; the points before are of a part of them."""
    *before, last = found["curve"]
    return [*before, {**last, "accuracy": found["accuracy"]}]


def load(path: Path) -> dict[str, Any]:
    """Read a file of `collected`.

    Args:
        path: of the file.

    Returns:
        Its content.

    Raises:
        InvalidError: it cannot be read, or is something else.
    """
    return results.load(path, BENCHMARK, "bench convergence")


def mean_curve(row: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Average the curves of a row over its seeds.

    Args:
        row: of a file.

    Returns:
        Steps and accuracy after each epoch.
    """
    curves = list(row["curves"].values())
    return [
        (points[0]["steps"], statistics.fmean(point["accuracy"] for point in points))
        for points in zip(*curves, strict=True)
    ]


def seconds_after(row: Mapping[str, Any], steps: int) -> float | None:
    """Say how long the first steps take at the rate of the study: the median step times their number.

    Args:
        row: of a file.
        steps: how many; those of the warm-up, which has equal parts for its densities, are taken first.

    Returns:
        Seconds; None where no times were measured.
    """
    if not row["step_seconds"]:
        return None
    last = mean_curve(row)[-1][0]
    warm = [statistics.median(taken) for taken in row["warm_step_seconds"]]
    warmed = min(steps, round(row["how"]["warmup"] * last)) if warm else 0
    warm_seconds = warmed * statistics.fmean(warm) if warm else 0.0
    return warm_seconds + (steps - warmed) * statistics.median(row["step_seconds"])


def summary(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compare each row with the dense one of its model.

    Args:
        found: of `collected`.

    Returns:
        For each row: accuracy, its interval, difference and its interval (all 0 to 1), step and training seconds,
        near_seconds (until `NEAR` dense's accuracy, None: never) and near_sooner (dense's over it), reached_seconds and
        reached_sooner (the same without any distance).
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
    """Write the summary as texts.

    Args:
        found: of `collected`.

    Returns:
        A text for each heading.
    """
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
    """Draw the summary; settings whose ranks ended with different weights are red.

    Args:
        found: of `collected`.

    Returns:
        A row for each model and setting.
    """
    drawn = Table(title=f"convergence, hosts of {found['study']['hosts']} ranks", caption=CAPTION)
    for place, heading in enumerate(HEADINGS):
        drawn.add_column(heading, justify="left" if place < 2 else "right", no_wrap=True)
    last = ""
    for line in lines_of(found):
        if line[0] != last:
            drawn.add_section()
        last = line[0]
        drawn.add_row(*line, style="bold red" if line[1].endswith(" UNEQUAL") else None)
    return drawn


def markdown(found: Mapping[str, Any]) -> str:
    """Write the summary as Markdown.

    Args:
        found: from `load`.

    Returns:
        What was trained and the table.
    """
    rows = {row["model"]: row for row in found["rows"]}
    about = [
        f"- {model}: {row['parameters']:,} parameters, {row['recipe']['epochs']} epochs, "
        f"{len(found['study']['hosts'])} hosts of {' + '.join(map(str, found['study']['hosts']))} ranks, batch "
        f"{row['recipe']['batch']} on each, learning rate {row['recipe']['learning_rate']:g}, tested with "
        f"{row['tested']:,} labels"
        for model, row in rows.items()
    ]
    cells = [list(HEADINGS), ["---"] * len(HEADINGS), *lines_of(found)]
    return "\n".join([*about, "", *("| " + " | ".join(cell or "-" for cell in row) + " |" for row in cells), ""])
