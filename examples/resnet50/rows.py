"""The rows of a training's epochs: how they are kept, and what follows from them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .settings import Settings, SettingsError

Row = Mapping[str, Any]


def read(path: Path) -> list[Row]:
    """Read the rows of a report; none if there is no report.

    Raises:
        SettingsError: the file is no report.
    """
    if not path.exists():
        return []
    try:
        return list(json.loads(path.read_text(encoding="utf-8"))["rows"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"{path}: is no report of this recipe; take it away, or take another folder") from error


def trained(path: Path) -> Mapping[str, Any]:
    """Read where the epochs of a report that can be read were trained; empty if there are none, or it does not say."""
    found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return dict(found.get("trained", {}))


def table(rows: Sequence[Row]) -> str:
    """Give rows as CSV; a row has nothing where others have a figure that it lacks."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def figures(logs: Mapping[str, Any]) -> Row:
    """Give Keras' logs of an epoch, with those of the training pictures' cache under names that all phases share."""
    found: dict[str, float] = {}
    for name, value in logs.items():
        head, cache, figure = name.partition("_cache_")
        if not cache:
            found[name] = float(value)
        elif not head.startswith("validation"):
            found[f"cache_{figure}"] = float(value)
    return found


def at(points: Iterable[tuple[float, float]], epoch: float) -> float:
    """Give the value at an epoch of (epoch, value) points, joined by straight lines."""
    epochs, values = zip(*points, strict=True)
    return float(np.interp(epoch, epochs, values))


def start_s(rows: Sequence[Row]) -> float:
    """Give the seconds that count and belong to no epoch: starts of jobs and phases, and what killed jobs have lost."""
    return 3600 * rows[-1]["hours"] - sum(row["seconds"] for row in rows) if rows else 0.0


def reached(rows: Sequence[Row], target: float | None) -> float | None:
    """Give the hours after which the top-5 share was at least the target; None if it never was."""
    return next((row["hours"] for row in rows if target is not None and row.get("top5", -1.0) >= target), None)


def phases(rows: Sequence[Row]) -> list[Row]:
    """Add up the rows of each phase.

    Returns:
        Rows with the settings of the phase, `epochs`, `seconds`, `images_per_s` without the first steps, and, where
        there was a cache, `cache_wait_s` and `cache_hits`, the share of the pictures that it had.
    """
    found: list[Row] = []
    for number in sorted({row["phase"] for row in rows}):
        here = [row for row in rows if row["phase"] == number]
        one = {name: here[0][name] for name in ("phase", "pixels", "batch", "compression")}
        one |= {"epochs": len(here), "seconds": sum(row["seconds"] for row in here)}
        one["images_per_s"] = sum(row["images"] for row in here) / sum(
            row["images"] / row["images_per_s"] for row in here
        )
        cached = [row for row in here if "cache_wait_s" in row]
        if cached:
            one["cache_wait_s"] = sum(row["cache_wait_s"] for row in cached)
            one["cache_hits"] = sum(row["cache_hits"] for row in cached) / len(cached)
        found.append(one)
    return found


def left(
    settings: Settings, in_epoch: Sequence[int], epoch: int, done: int, images_per_s: float, measured: int
) -> float:
    """Predict the seconds that the rest of the training takes, validation and checkpoints left out.

    What an image takes follows from `price.rates` where they have the sides of the pictures, else from their areas.

    Args:
        settings: of the training.
        in_epoch: the steps of an epoch of each phase.
        epoch: the present one.
        done: its steps that are done.
        images_per_s: in the phase that was measured:
        measured: its number.
    """
    rates, seen = settings.price.rates, settings.phases[measured].pixels
    total = 0.0
    for number, phase in enumerate(settings.phases):
        epochs = settings.begins[number + 1] - max(epoch, settings.begins[number])
        if epochs <= 0:
            continue
        steps = epochs * in_epoch[number] - (done if epoch >= settings.begins[number] else 0)
        known = phase.pixels in rates and seen in rates
        cost = rates[seen] / rates[phase.pixels] if known else (phase.pixels / seen) ** 2
        total += steps * phase.batch * cost / images_per_s
    return total
