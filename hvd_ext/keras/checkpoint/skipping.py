"""What stands in for a model's step: at its first call in an epoch, and while batches are skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from hvd_ext.job.log import logger


def before_reading(model: Any, read: Callable[[Any], object], function: str = "train_function") -> None:
    """Have a function called before the training step, or that of validation, reads from its iterator.

    Args:
        model: of any Keras, whose `fit` is about to begin an epoch or its validation.
        read: is called with the iterator.
        function: the attribute of the model that has the step.
    """
    step = getattr(model, function, None)
    if step is None:  # a `fit` of the user's own
        return

    def first(iterator: Any) -> Any:
        setattr(model, function, step)
        read(iterator)
        return step(iterator)

    setattr(model, function, first)


def skips(model: Any) -> bool:
    """Tell whether a model of any Keras reads its coming batch and does not train on it."""
    return isinstance(getattr(getattr(model, "train_function", None), "__self__", None), Skipping)


class Skipping:
    """Stands in for a model's training step until the batches that an earlier job has trained on have been read.

    Attributes:
        left: the number of batches that are still to be skipped.
    """

    def __init__(
        self,
        model: keras.Model,
        batches: int,
        read: Callable[[Any], object],
        then: Callable[[], None] = lambda: None,
        *,
        reads: bool = True,
    ) -> None:
        """Replace the training step of a model whose `fit` is about to begin an epoch.

        Args:
            model: the model.
            batches: the number of batches to skip.
            read: called before the first of them, with the iterator.
            then: called after the last of them. The metrics have their variables by then, unless a training step of the
                user's own keeps Keras from making them.
            reads: whether the iterator gives these batches; else it begins behind them.
        """
        self._reads = reads
        self._model = model
        self._batches = self.left = batches
        self._read, self._then = read, then
        self._step = model.train_function
        model.train_function = self._skip

    def drop(self) -> None:
        """Give the model its training step back, wherever it is."""
        self._model.train_function = self._step
        self.left = 0

    def end(self) -> None:
        """Give the model its training step back; warn if the epoch has ended too early."""
        self._model.train_function = self._step
        if self.left:
            logger.warning(
                "Checkpoint: the epoch ended %d batches before the one at which the earlier job stopped; are the data "
                "the same?",
                self.left,
            )
            self.left = 0

    def _skip(self, iterator: Any) -> dict[str, Any]:
        if self.left == self._batches:
            self._read(iterator)
        for _ in range(min(self.left, getattr(self._model, "steps_per_execution", 1) or 1)):
            batch = next(iterator) if self._reads else None
            self.left -= 1
        if self.left:
            return {}
        if self._reads:
            _build_metrics(self._model, batch)
        self.end()
        self._then()
        try:
            return dict(self._model.get_metrics_result())
        except ValueError:  # not built
            return {}


def _build_metrics(model: keras.Model, batch: Any) -> None:
    """Make the variables of metrics, which Keras itself makes in its first step only."""
    if not any(not metric.variables for metric in model.metrics):
        return
    try:
        model._symbolic_build(data_batch=batch)
    except Exception as error:  # a training step of the user's own may need more than Keras knows
        logger.info("Checkpoint: the metrics of this epoch are not restored: %s: %s", type(error).__name__, error)
