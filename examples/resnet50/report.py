"""What a training tells: rows of epochs, and the time that DAWNBench counts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import psutil

import hvd_ext as hvd
from hvd_ext import state

from .settings import Settings


class Clock:
    """Seconds since the program began, as DAWNBench counts them: without validation and checkpoints.

    A job that goes on begins with the seconds that the checkpoint says.
    """

    def __init__(self) -> None:
        self._begun_s = psutil.Process().create_time()
        self._before_s = self._wall_before_s = self._left_out_s = 0.0
        self._stopped_s: float | None = None
        state.register("the clock of the recipe", self._save, load_all=self._load)

    @property
    def wall_s(self) -> float:
        """All seconds, those of earlier jobs included."""
        return self._wall_before_s + time.time() - self._begun_s

    @property
    def counted_s(self) -> float:
        """The seconds that count."""
        now = time.time() if self._stopped_s is None else self._stopped_s
        return self._before_s + now - self._begun_s - self._left_out_s

    def stop(self) -> None:
        """Leave out what follows."""
        if self._stopped_s is None:
            self._stopped_s = time.time()

    def go_on(self) -> None:
        """Count what follows."""
        if self._stopped_s is not None:
            self._left_out_s += time.time() - self._stopped_s
            self._stopped_s = None

    def _save(self) -> dict[str, np.ndarray]:
        return {"seconds": np.array([self.counted_s, self.wall_s])}

    def _load(self, _: dict[str, np.ndarray] | None, everyone: Any) -> None:
        for found in everyone():
            self._before_s, self._wall_before_s = (float(one) for one in found["seconds"])
            return


class Report(keras.callbacks.Callback):
    """Keeps a row for each epoch; it stands behind the validation in the list of callbacks."""

    def __init__(self, settings: Settings, kinds: tuple[str, ...], folder: Path, clock: Clock) -> None:
        super().__init__()
        self._settings, self._kinds, self._path, self._clock = settings, kinds, folder / "report.json", clock
        self.rows: list[dict[str, Any]] = []
        if self._path.exists():
            self.rows = json.loads(self._path.read_text(encoding="utf-8"))["rows"]
        self._begun_s = 0.0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Count from here."""
        self._clock.go_on()
        self._begun_s = self._clock.counted_s

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add a row, and leave out what follows, such as saving."""
        self._clock.stop()
        number = next(place for place, begin in enumerate(self._settings.begins[1:]) if epoch < begin)
        phase = self._settings.phases[number]
        row = {
            "epoch": epoch,
            "phase": number,
            "pixels": phase.pixels,
            "batch": phase.batch,
            "compression": self._kinds[number],
            "seconds": self._clock.counted_s - self._begun_s,
            "hours": self._clock.counted_s / 3600,
            "wall_hours": self._clock.wall_s / 3600,
            **{name: float(value) for name, value in (logs or {}).items()},
        }
        self.rows = [*(one for one in self.rows if one["epoch"] < epoch), row]
        if hvd.rank() == 0:
            half = self._path.with_suffix(".part")
            half.write_text(json.dumps({"rows": self.rows}, indent=1), encoding="utf-8")
            half.replace(self._path)
