"""What the trainings of the study say together: accuracies over composed times; table, Markdown, plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.studies.convergence.results import COLOURS, NEAR, interval
from benchmarks.studies.markdown import table as markdown_table
from benchmarks.studies.recipe import jobs
from benchmarks.studies.recipe.ways import AUTO, CLUSTER, DENSE, WAYS, Run, Way, known
from hvd_ext.bench.table import drawn, ratio, seconds
from hvd_ext.commands.figures import finish, panels
from hvd_ext.errors import InvalidError

BENCHMARK = "recipe"
VERSIONS = ("hvd_ext", "tensorflow-cpu", "keras", "horovod")  # of trainings that are compared
HOROVOD = tuple(way.name for way in WAYS if way.horovod)
HEADINGS = (
    *("way", "sparse phases", "seeds", "top-5 at the end", "steps of the phases", "whole training", "epochs to target"),
    *("time to target", "x dense", "x Horovod", "whole on the cluster", "x composed"),
)
PRICES = ("way", "time of", "gradients", "predicted", "measured", "predicted / measured")
CAPTION = (
    "top-5 at the end: mean over the seeds and its 95 % interval (Student's t), of a mean curve the last point; steps: "
    "means of an epoch on the cluster; whole training: composed of them, without validation and start; target: "
    "dense's mean at its end less 0.5 points; x dense, x Horovod: how many times sooner than dense and the faster "
    "Horovod; whole on the cluster: one training, trained there from its first epoch to its last; horovod-fused and "
    "auto-uncached learn as horovod and auto do"
)


def collected(folder: Path) -> dict[str, Any]:
    """Make the content of one file of the trainings that are done, whose folders lie in a folder.

    Raises:
        InvalidError: they do not belong together: machines, versions or sparse phases differ.
    """
    found = [row for way in WAYS if (row := _row(folder, way)) is not None]
    told = _about(folder)
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return {"benchmark": BENCHMARK, "date": date, **told, "rows": found}


def _about(folder: Path) -> dict[str, Any]:
    """Give machine and versions of all trainings."""
    first: dict[str, Any] = {}
    for path in sorted(folder.glob(f"*/{jobs.ABOUT}")):
        about = json.loads(path.read_text(encoding="utf-8"))
        first = first or about
        for what, of in (("processor", "machine"), ("cores", "machine"), *((name, "versions") for name in VERSIONS)):
            if about[of].get(what) != first[of].get(what):
                raise InvalidError(
                    f"{path.parent.name}: was trained with {what} {about[of].get(what)}, and others with "
                    f"{first[of].get(what)}; take its folder away to train it again"
                )
    return first


def _row(folder: Path, way: Way) -> dict[str, Any] | None:
    learner = next(one for one in WAYS if one.name == (way.learns_as or way.name))
    learned = {seed: jobs.rows(folder, Run(learner, "seed", seed)) for seed in learner.seeds}
    curves = {str(seed): [row["top5"] for row in found] for seed, found in learned.items() if found}
    timed = jobs.rows(folder, Run(way, "time"))
    if not curves and not timed:
        return None
    whole = jobs.rows(folder, Run(way, "whole")) if way.whole else []
    some = next((found for found in learned.values() if found), [])
    phases = [_phase(number, timed) for number in sorted({row["phase"] for row in timed})]
    row: dict[str, Any] = {"way": way.name, "top5": curves, "phases": phases}
    kinds = _kinds(timed)
    for other in (*learned.values(), whole):
        if timed and other and _kinds(other) != kinds:
            raise InvalidError(
                f"{way.name}: gradients of the timed training ({', '.join(kinds)}) are not those of another "
                f"({', '.join(_kinds(other))}); take the folders of one of them away to train it again"
            )
    if some and timed:
        row["epoch_seconds"] = _composed(some, phases)
    if whole:
        row["whole_epoch_seconds"] = [one["seconds"] for one in whole]
    if phases and not way.horovod:
        for phase, predicted_s in zip(phases, _predicted(way, folder / jobs.LINKS), strict=True):
            phase["predicted_seconds"] = predicted_s
        steps = [(one["images"] / one["batch"], phases[one["phase"]]["predicted_seconds"]) for one in some]
        row["predicted_seconds"] = sum(count * step_s for count, step_s in steps)
    return row


def _kinds(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [next(row["compression"] for row in rows if row["phase"] == number) for number in {r["phase"] for r in rows}]


def _phase(number: int, timed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Give a step, and what the first, a later and the last epoch of a phase take beside their steps."""
    here = [row for row in timed if row["phase"] == number]
    step_s = here[1]["batch"] / here[1]["images_per_s"]
    beside = [row["seconds"] - row["images"] / row["batch"] * step_s for row in here]
    about = {name: here[0][name] for name in ("pixels", "batch", "compression")}
    places = {"first_seconds": 0, "later_seconds": 1, "last_seconds": -1}
    return {**about, "step_seconds": step_s, **{name: beside[place] for name, place in places.items()}}


def _composed(learned: Sequence[Mapping[str, Any]], phases: Sequence[Mapping[str, Any]]) -> list[float]:
    """Give the seconds of each epoch of a training that was not timed."""
    found: list[float] = []
    numbers = [None, *(row["phase"] for row in learned), None]
    for before, row, after in zip(numbers, learned, numbers[2:], strict=False):
        phase, steps = phases[row["phase"]], row["images"] / row["batch"]
        place = "first" if before != row["phase"] else "last" if after != row["phase"] else "later"
        found.append(phase[f"{place}_seconds"] + steps * phase["step_seconds"])
    return found


def _predicted(way: Way, links: Path) -> list[float]:
    """Give the predicted time of a step in each phase, 0 where the links were not measured or there are no rates."""
    from resnet50 import price

    settings = Run(way, "time").settings(Path())
    try:
        tree = price.cluster(links)
        return [one.step_s for one in price.predict(settings, tree, settings.data.synthetic)]
    except known.SettingsError:
        return [0.0] * len(settings.phases)


def mean_curve(row: Mapping[str, Any]) -> list[float]:
    """Give the top-5 share after each epoch, the mean over the seeds."""
    return [statistics.fmean(values) for values in zip(*row["top5"].values(), strict=True)]


def seconds_until(row: Mapping[str, Any], target: float) -> tuple[int, float] | None:
    """Give the epochs and the composed seconds after which the mean curve is at a target; None if it never is."""
    total = 0.0
    for epoch, (share, taken) in enumerate(zip(mean_curve(row), row.get("epoch_seconds", ()), strict=False), 1):
        total += taken
        if share >= target:
            return epoch, total
    return None


def lines_of(found: Mapping[str, Any]) -> list[list[str]]:
    """Write the rows with a text for each heading."""
    named = {row["way"]: row for row in found["rows"]}
    dense = named.get(DENSE)
    target = mean_curve(dense)[-1] - NEAR if dense and dense["top5"] else None
    reached = {
        name: seconds_until(row, target) if target is not None and row["top5"] else None for name, row in named.items()
    }
    horovod = min((found for name in HOROVOD if (found := reached.get(name))), key=lambda one: one[1], default=None)
    lines = []
    for name, row in named.items():
        last = [values[-1] for values in row["top5"].values()]
        half = interval(last)
        end = "" if not last else f"{100 * statistics.fmean(last):.1f}" + (f" +- {100 * half:.1f}" if half else "")
        composed, until = row.get("epoch_seconds", ()), reached[name]
        times = [ratio(other[1] / until[1]) if until and other else "" for other in (reached.get(DENSE), horovod)]
        whole = row.get("whole_epoch_seconds", ())
        lines.append(
            [
                name,
                ", ".join(str(one["pixels"]) for one in row["phases"] if one["compression"] == "topk") or "none",
                str(len(last)),
                end,
                ", ".join(f"{1e3 * one['step_seconds']:.0f}" for one in row["phases"]) + " ms" if row["phases"] else "",
                seconds(sum(composed)) if composed else "",
                (str(until[0]) if until else "never") if last and target is not None else "",
                seconds(until[1]) if until else "",
                *times,
                seconds(sum(whole)) if whole else "",
                ratio(sum(whole) / sum(composed)) if whole and composed else "",
            ]
        )
    return lines


def price_lines(found: Mapping[str, Any]) -> list[list[str]]:
    """Write the predicted and the measured step of each phase, and both times of the training on the cluster."""
    lines = []
    for row in found["rows"]:
        if row["way"] not in (DENSE, AUTO):
            continue
        pairs = [
            (
                f"a step at {phase['pixels']} pixels, batch {phase['batch']}",
                phase["compression"],
                phase["predicted_seconds"],
                phase["step_seconds"],
            )
            for phase in row["phases"]
        ]
        whole = row.get("whole_epoch_seconds", ())
        pairs.append((f"the training, {len(whole)} epochs", "", row.get("predicted_seconds", 0.0), sum(whole)))
        lines += [
            [row["way"], what, kind, seconds(predicted_s), seconds(measured_s), ratio(predicted_s / measured_s)]
            for what, kind, predicted_s, measured_s in pairs
            if predicted_s and measured_s
        ]
    return lines


def table(found: Mapping[str, Any]) -> Table:
    """Draw the summary."""
    title = f"the small recipe, hosts of {CLUSTER.hosts} ranks at {CLUSTER.rate}"
    return drawn(title, CAPTION, HEADINGS, [(line[0], line, False) for line in lines_of(found)], HEADINGS[:2])


def markdown(found: Mapping[str, Any]) -> str:
    """Write the summary and the prices as Markdown."""
    return f"{markdown_table(HEADINGS, lines_of(found))}\n\n{markdown_table(PRICES, price_lines(found))}"


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draw the mean top-5 share over the composed time."""
    rows = [row for row in found["rows"] if row["top5"] and "epoch_seconds" in row]
    figure, (axis, *_) = panels(1, 1, 7.0, 4.5, 1.0)
    for colour, row in zip(("#000000", *COLOURS), rows, strict=False):
        times = [sum(row["epoch_seconds"][: count + 1]) for count in range(len(row["epoch_seconds"]))]
        axis.plot(times, [100 * share for share in mean_curve(row)], label=row["way"], color=colour)
    axis.set(xlabel=f"seconds on 2 + 2 ranks at {CLUSTER.rate}", ylabel="top-5 accuracy, %")
    axis.grid(True, linewidth=0.4, alpha=0.5)
    finish(figure, [], path)
