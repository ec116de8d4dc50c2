"""Learning rate and momentum over the update steps of all phases."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from .settings import Points, Settings, SettingsError


class Steps:
    """The update steps of a training, phase by phase.

    Args:
        settings: of the training.
        pictures: the number of training pictures.

    Attributes:
        in_epoch: the steps of an epoch of each phase; what does not fill a last step is left out.
        begins: the first step of each phase, and the number of all steps.

    Raises:
        SettingsError: a phase's batch has more pictures than there are.
    """

    def __init__(self, settings: Settings, pictures: int) -> None:
        self._settings = settings
        self.in_epoch = tuple(pictures // phase.batch for phase in settings.phases)
        for number, (phase, steps) in enumerate(zip(settings.phases, self.in_epoch, strict=True)):
            if not steps:
                raise SettingsError(f"phases.{number}.batch ({phase.batch}): there are only {pictures} pictures")
        sums = [0]
        for phase, steps in zip(settings.phases, self.in_epoch, strict=True):
            sums.append(sums[-1] + phase.epochs * steps)
        self.begins = tuple(sums)

    @property
    def all(self) -> int:
        """The number of all steps."""
        return self.begins[-1]

    def at(self, epoch: float) -> float:
        """Give the step at which an epoch begins; epochs have fractions."""
        return float(np.interp(epoch, self._settings.begins, self.begins))

    def lines(self, points: Points) -> Lines:
        """Make a schedule of (epoch, value) points; lines over epochs bend where steps change their size."""
        epochs = sorted({epoch for epoch, _ in points} | set(self._settings.begins))
        values = np.interp(epochs, *zip(*points, strict=True))
        return Lines([self.at(epoch) for epoch in epochs], [float(value) for value in values])

    def sparse(self, kinds: tuple[str, ...]) -> int:
        """Give the number of steps of the phases at the begin that are sparse.

        Args:
            kinds: "topk" or "dense", for each phase.
        """
        return self.begins[kinds.index("dense") if "dense" in kinds else len(kinds)]


@keras.saving.register_keras_serializable("resnet50")
class Lines(keras.optimizers.schedules.LearningRateSchedule):
    """A value that follows straight lines between points, and stays before the first and after the last one.

    Args:
        steps: of the points, rising; some may be equal.
        values: at these steps.
    """

    def __init__(self, steps: list[float], values: list[float]) -> None:
        self.steps, self.values = list(steps), list(values)

    def __call__(self, step: Any) -> Any:
        """Give the value at an update step: a float32 scalar."""
        step = ops.cast(step, "float32")
        value = ops.convert_to_tensor(self.values[0], "float32")
        for place in range(1, len(self.steps)):
            begin, end = self.steps[place - 1 : place + 1]
            if end > begin:
                share = ops.clip((step - begin) / (end - begin), 0.0, 1.0)
                value = value + share * (self.values[place] - self.values[place - 1])
            else:
                value = ops.where(step >= end, value + (self.values[place] - self.values[place - 1]), value)
        return value

    def get_config(self) -> dict[str, Any]:
        """Give the points."""
        return {"steps": self.steps, "values": self.values}
