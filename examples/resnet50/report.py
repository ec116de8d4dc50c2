"""What a training tells: a row for each epoch, the view of rank 0, and the files made of the rows."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from images.manifest import write_whole

import hvd_ext as hvd
from hvd_ext import state
from hvd_ext.bench.results import save

from . import dawnbench, plots, views
from .clock import Clock
from .rows import Row, at, figures, left, phases, reached, read, start_s, table, trained
from .schedule import Steps
from .settings import Settings


class Report(keras.callbacks.Callback):
    """Shows a training on rank 0 and keeps a row for each epoch, in files; it stands behind the validation.

    A file that cannot be written is named, and training goes on.

    Args:
        settings: of the training.
        kinds: "topk" or "dense" for each phase.
        steps: of the training.
        folder: of the results.
        clock: of the training.

    Attributes:
        rows: of the epochs that are done, on rank 0.

    Raises:
        SettingsError: the folder has a report that cannot be read.
    """

    def __init__(self, settings: Settings, kinds: tuple[str, ...], steps: Steps, folder: Path, clock: Clock) -> None:
        super().__init__()
        self._settings, self._kinds, self._steps, self._folder, self._clock = settings, kinds, steps, folder, clock
        root = hvd.rank() == 0
        self.rows: list[Row] = read(folder / "report.json") if root else []
        self._view = views.begin(settings, self._now) if root else None
        # Where the epochs were trained: a job that only writes the files of a finished training again may be elsewhere.
        self._here = dawnbench.place() if root else {}
        self._trained = (trained(folder / "report.json") if root else {}) or self._here
        self._scalars = Scalars(folder / "tensorboard")
        # the epoch, its steps that are done, those that an earlier job did, and what the epoch has taken until now
        self._epoch = self._done = self._skipped = 0
        self._begun_s: float | None = None
        self._first: tuple[int, float] | None = None  # steps done and counted time after this job's first one
        self._earlier = (0, 0, 0.0)
        self._said: set[str] = set()
        state.register("the report of the recipe", self._save, load_all=self._load)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Count from here, or from where an earlier job has begun this epoch."""
        before, done, trained_s = self._earlier
        self._skipped, trained_s = (done, trained_s) if epoch == before else (0, 0.0)
        self._epoch, self._done, self._first = epoch, self._skipped, None
        self._clock.go_on()
        self._begun_s = self._clock.counted_s - trained_s
        if self._view is not None:
            self.rows = [row for row in self.rows if row["epoch"] < epoch]
            self._view.begin(self.rows)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Count the step."""
        if batch < self._skipped:
            return
        self._done = batch + 1
        if self._first is None:
            self._first = self._done, self._clock.counted_s

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add a row, write the files, and leave out what follows, such as saving."""
        self._clock.stop()
        if self._done < self._steps.in_epoch[self._phase]:
            return  # a signal has stopped it, and another job goes on with it
        if self._view is not None:
            row = self._row(logs or {})
            self.rows.append(row)
            self._trained = self._here
            self._view.add(row)
            self._written(self.write)
            self._written(lambda: self._scalars.add(row))
        self._epoch, self._done, self._begun_s = epoch + 1, 0, None

    def close(self) -> None:
        """Draw the plot and show what the training has taken; call it once, at the end or when training has stopped."""
        if self._view is None:
            return
        self._clock.close()
        if self.rows:
            self._written(self.write)  # what an entry says may have changed since the last epoch
        if self.rows and importlib.util.find_spec("matplotlib"):
            self._written(lambda: plots.draw(self._settings, self.rows, self._folder / "report.png"))
        self._scalars.close()
        self._view.end(self.summary())

    def summary(self) -> dict[str, Any]:
        """Give the figures of the whole training.

        Returns:
            `phases`: rows of `phases`. `start_hours`: those of `start_s`. `hours`, `wall_hours`. `target`, and
            `target_hours`: when it was reached, or None. `entry`: the name that DAWNBench wants for both files of an
            entry, and `entry_lacks`: what they still lack.
        """
        last = self.rows[-1] if self.rows else {"hours": 0.0, "wall_hours": 0.0}
        return {
            "hours": last["hours"],
            "wall_hours": last["wall_hours"],
            "start_hours": start_s(self.rows) / 3600,
            "target": self._settings.target,
            "target_hours": reached(self.rows, self._settings.target),
            "entry": dawnbench.name(self._settings),
            "entry_lacks": dawnbench.lacks(self._record(), self.rows),
            "phases": phases(self.rows),
        }

    def write(self) -> None:
        """Write the files that have the rows, each whole or not at all."""
        save(self._folder / "report.json", {**self.summary(), "trained": self._trained, "rows": self.rows})
        write_whole(self._folder / "report.csv", table(self.rows).encode())
        if any("top5" in row for row in self.rows):
            write_whole(self._folder / "dawnbench.tsv", dawnbench.tsv(self.rows).encode())
            write_whole(self._folder / "dawnbench.json", (json.dumps(self._record(), indent=4) + "\n").encode())

    def _record(self) -> dict[str, Any]:
        return dawnbench.record(self._settings, self._kinds, self._trained, self.rows)

    def _written(self, write: Callable[[], None]) -> None:
        try:
            write()
        except (OSError, tf.errors.OpError) as error:
            words = f"report: cannot be written, and training goes on: {error}"
            if self._view is not None and words not in self._said:
                self._said.add(words)
                self._view.say(words)

    @property
    def _phase(self) -> int:
        return self._settings.phase_of(self._epoch)

    def _row(self, logs: Mapping[str, Any]) -> Row:
        phase, counted_s = self._settings.phases[self._phase], self._clock.counted_s
        begun_s = counted_s if self._begun_s is None else self._begun_s
        return {
            "epoch": self._epoch,
            "phase": self._phase,
            "pixels": phase.pixels,
            "batch": phase.batch,
            "compression": self._kinds[self._phase],
            "images": self._done * phase.batch,
            "seconds": counted_s - begun_s,
            "images_per_s": self._rate(counted_s) or self._done * phase.batch / max(counted_s - begun_s, 1e-9),
            "hours": counted_s / 3600,
            "wall_hours": self._clock.wall_s / 3600,
            "learning_rate": at(self._settings.optimizer.rate, self._epoch + 1),
            "momentum": at(self._settings.optimizer.momentum, self._epoch + 1),
            **figures(logs),
        }

    def _rate(self, counted_s: float) -> float | None:
        """Give the images per second of the steps behind the first one, in which TensorFlow traces."""
        if self._first is None or self._done <= self._first[0] or counted_s <= self._first[1]:
            return None
        images = (self._done - self._first[0]) * self._settings.phases[self._phase].batch
        return images / (counted_s - self._first[1])

    def _now(self) -> views.Now:
        """Tell the view where the training is."""
        phase, in_epoch = self._phase, self._steps.in_epoch
        rate, counted_s = self._rate(self._clock.counted_s), self._clock.counted_s
        if self._epoch == self._settings.epochs:
            status = "done"
        elif not self._clock.counts:
            status = "validates and saves"
        elif self._begun_s is None:
            status = "gets ready"
        else:
            status = "trains" if self._first else "first step"
        known = (rate, phase) if rate else None
        if known is None and self.rows:
            known = self.rows[-1]["images_per_s"], self.rows[-1]["phase"]
        return views.Now(
            epoch=self._epoch,
            kind=self._kinds[phase],
            done=self._done if self._epoch < self._settings.epochs else in_epoch[phase],
            steps=in_epoch[phase],
            images_per_s=rate,
            counted_s=counted_s,
            left_s=left(self._settings, in_epoch, self._epoch, self._done, *known) if known else None,
            status=status,
        )

    def _save(self) -> dict[str, np.ndarray]:
        trained_s = 0.0 if self._begun_s is None else self._clock.counted_s - self._begun_s
        return {"epoch": np.array([self._epoch, self._done, trained_s], np.float64)}

    def _load(self, own: dict[str, np.ndarray] | None, everyone: Any) -> None:
        epoch, done, trained_s = (float(one) for one in (own or next(iter(everyone())))["epoch"])
        self._earlier = int(epoch), int(done), trained_s


class Scalars:
    """The figures of the epochs for TensorBoard, where it is installed.

    Args:
        folder: of the events; it is made with the first of them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def add(self, row: Row) -> None:
        """Add an epoch."""
        if importlib.util.find_spec("tensorboard") is None:
            return
        self._writer = self._writer or tf.summary.create_file_writer(str(self._folder))
        with self._writer.as_default(step=row["epoch"] + 1):
            for name, value in row.items():
                if name not in ("epoch", "phase", "compression"):
                    tf.summary.scalar(name, value)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
