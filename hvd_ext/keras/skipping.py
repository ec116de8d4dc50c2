"""Batches of an epoch that an earlier job has trained on: they are read and left out."""

from __future__ import annotations

import logging
from typing import Any

import keras

_LOG = logging.getLogger("hvd_ext")


class Skipping:
    """Stands in for a model's step of training until so many batches have been read."""

    def __init__(self, model: keras.Model, batches: int) -> None:
        """Put it in place.

        Args:
            model: whose `fit` is about to begin an epoch.
            batches: how many to leave out.
        """
        self._model = model
        self._left = batches
        self._step = model.train_function
        model.train_function = self._skip

    @property
    def left(self) -> int:
        """How many batches are still to be left out."""
        return self._left

    def end(self) -> None:
        """Train again; said aloud where the epoch has ended before."""
        self._model.train_function = self._step
        if self._left:
            _LOG.warning(
                "Checkpoint: the epoch ended %d batches before the one at which the earlier job stopped; is it the "
                "same data?",
                self._left,
            )
            self._left = 0

    def _skip(self, iterator: Any) -> dict[str, Any]:
        for _ in range(min(self._left, getattr(self._model, "steps_per_execution", 1) or 1)):
            next(iterator)
            self._left -= 1
        if not self._left:
            self.end()
        return self._model.get_metrics_result()
