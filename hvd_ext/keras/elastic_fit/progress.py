"""How far a training is, and how the ranks of a new world come to the same weights and the same place."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import keras
import numpy as np

from hvd_ext.data.cursor import Cursors, DataCursor, cursors_of
from hvd_ext.job import consensus, runtime
from hvd_ext.keras.checkpoint import model_state
from hvd_ext.keras.checkpoint.callback_states import States
from hvd_ext.keras.optimizers import models
from hvd_ext.tensorflow import layers
from hvd_ext.tensorflow.collectives.objects import broadcast_object

_NAME = "elastic fit"
# call of `fit`, updates, epoch, step: of two ranks, the one whose numbers are larger is further
Key = tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a training is on one rank.

    Attributes:
        fit: the number of the call of `fit`, counted in the process.
        epoch: the one under way; at least that of the end where nothing is left to train.
        step: the number of its batches that are done, those included that were left out because an earlier world had
            them.
        updates: the number of the optimizer's updates.
        size: the number of ranks for which `step` and `rates` are meant.
        data: of each data set with an order, by its name: the parts of the order, and the position in the epoch.
        callbacks: the state of Keras' callbacks.
        rates: the learning rates of the optimizers; None for schedules.
        metrics: the variables of the model's metrics, whose epoch is under way.
        stops: whether a callback has asked `fit` to stop after this step.
    """

    fit: int
    epoch: int
    step: int
    updates: int
    size: int
    data: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    callbacks: States = dataclasses.field(default_factory=dict)
    rates: list[float | None] = dataclasses.field(default_factory=list)
    metrics: list[np.ndarray] = dataclasses.field(default_factory=list)
    stops: bool = False

    @property
    def key(self) -> Key:
        """Tells which of two ranks is further."""
        return self.fit, self.updates, self.epoch, self.step


class Logs(NamedTuple):
    """The history of a call of `fit`: its epochs, and for each name of the logs the values of these epochs."""

    epochs: list[int]
    values: dict[str, list[float]]


class Meeting(NamedTuple):
    """Where the ranks of a world are when they meet.

    Attributes:
        keys: of each rank; None for one that is new.
        source: the rank that is furthest.
        logs: of its calls of `fit`, the last one included.
    """

    keys: list[Key | None]
    source: int
    logs: list[Logs]

    @property
    def fit(self) -> int:
        """The call of `fit` in which the training is."""
        key = self.keys[self.source]
        assert key is not None
        return key[0]


def furthest(own: Progress | None, logs: list[Logs]) -> Meeting | None:
    """Find the rank that is furthest; all ranks of a world call it.

    Args:
        own: how far this rank is; None: it is new.
        logs: of the calls of `fit` on this rank.

    Returns:
        None if all ranks are new.
    """
    engine = runtime.current().engine
    said = consensus.exchange(engine, f"{_NAME}: progress", lambda: [own and own.key, logs])
    keys = [None if key is None else (key[0], key[1], key[2], key[3]) for key, _ in said]
    known = [key for key in keys if key is not None]
    if not known:
        return None
    source = keys.index(max(known))
    return Meeting(keys, source, [Logs(*each) for each in said[source][1]])


def take(model: keras.Model, own: Progress | None, meeting: Meeting) -> Progress:
    """Give all ranks of a world the weights, and the place, of the rank that is furthest; all ranks call it.

    If a rank is lost meanwhile, each of the others has all of the weights or none.

    Args:
        model: has the weights.
        own: how far this rank is; None: it is new.
        meeting: from `furthest`.

    Returns:
        Where all ranks continue, with the metrics of this rank if it has some of this epoch.

    Raises:
        InvalidError: the variables of a rank that is new do not exist yet.
        CheckpointError: the ranks have different models.
    """
    engine, source = runtime.current().engine, meeting.source
    root = engine.ranks[source]

    def described() -> list[str]:
        model_state.ready(model)
        return model_state.described(model_state.variables(model)[0])

    variables = consensus.exchange(engine, f"{_NAME}: model", described)
    listed = model_state.variables(model)[0]
    model_state.check(variables[source], listed, _NAME)
    progress: Progress = broadcast_object(own, root, name=f"{_NAME}: progress")
    if any(key != meeting.keys[source] for key in meeting.keys):
        takes = own is not None and engine.rank != root
        before = model_state.arrays(listed) if takes else {}
        try:
            layers.send(_NAME, model, root)
            model_state.send(listed, root)
        except BaseException:
            model_state.assign(listed, before, _NAME)
            raise
        layers.refresh(model)
    set_rates(model, progress.rates)
    if own is not None and (own.fit, own.epoch) == (progress.fit, progress.epoch):
        progress = dataclasses.replace(progress, metrics=own.metrics)
    return progress


def rates_of(model: Any) -> list[float | None]:
    """Give the learning rates of a model's optimizers; None where it is a schedule."""
    return [None if rate is None else float(rate.numpy()) for rate in _rates(model)]


def set_rates(model: Any, rates: list[float | None]) -> None:
    """Set the learning rates of a model's optimizers, in the order of `rates_of`."""
    for variable, rate in zip(_rates(model), rates, strict=True):
        if variable is not None and rate is not None and rate != float(variable.numpy()):
            variable.assign(rate)


def _rates(model: Any) -> list[Any]:
    """Give the variables of the learning rates; None for a schedule."""
    rates = [getattr(optimizer, "_learning_rate", None) for optimizer in models.distributed(model)]
    return [rate if hasattr(rate, "assign") else None for rate in rates]


def metrics_of(model: keras.Model) -> list[np.ndarray]:
    """Copy the variables of a model's metrics."""
    return [np.array(variable.numpy()) for metric in model.metrics for variable in metric.variables]


def set_metrics(model: keras.Model, values: list[np.ndarray]) -> None:
    """Set the variables of a model's metrics, if it has such ones."""
    variables = [variable for metric in model.metrics for variable in metric.variables]
    if [tuple(variable.shape) for variable in variables] == [value.shape for value in values]:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


def position(data: Any, epoch: int, step: int) -> dict[str, dict[str, int]]:
    """Give how far the data sets with an order are, by their names.

    Args:
        data: the data of `fit`.
        epoch: the one under way.
        step: the number of its batches that are done.
    """
    return {
        name: {"parts": cursor.parts, "position": cursor.division.position_of(epoch, step)}
        for name, cursor in _named(data)
        if cursor.division is not None
    }


def left_out(data: Any, progress: Progress, size: int) -> int:
    """Divide what is left of an epoch among the ranks of this world.

    Args:
        data: the data of `fit`, made in this world.
        progress: where all ranks continue.
        size: the number of ranks.

    Returns:
        How many batches of the epoch are left out, because the earlier worlds had theirs.
    """
    steps = []
    for name, cursor in _named(data):
        saved = progress.data.get(name)
        if saved is not None and cursor.division is not None:
            cursor.parts = saved["parts"]
            cursor.again = cursor.division.divide_again(progress.epoch, saved["position"], cursor.parts)
            steps.append(cursor.again.step)
    return max(steps) if steps else progress.step * progress.size // size  # as near as batches come


def _named(data: Any) -> list[tuple[str, DataCursor]]:
    cursors = Cursors()
    for cursor in cursors_of(data):
        cursors.add(cursor)
    return cursors.items()
