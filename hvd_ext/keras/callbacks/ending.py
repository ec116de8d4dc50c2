"""The ends of epochs and of `fit` where steps do not wait for all ranks, or return their results one step late.

And the begins: data with an order of their own get the epoch (`hvd_ext.data.cursor`).
"""

from __future__ import annotations

import functools
from typing import Any

from hvd_ext.data.cursor import begin_epoch, begin_validation
from hvd_ext.keras import base
from hvd_ext.keras.checkpoint.skipping import before_reading
from hvd_ext.keras.optimizers import models
from hvd_ext.keras.optimizers.catching_up import accumulated, catch_up, end_together
from hvd_ext.keras.optimizers.wrapper import Distributed


class EndTogether(base.Callback):
    """Brings the ranks together at the end of each epoch, and applies what is left at the end of `fit`.

    Where steps do not wait for all ranks, a rank that has no more batches applies the rounds of the others until they
    have none either, so that ranks may have unequal numbers of batches. The last step of `fit` waits for all ranks, so
    that no gradient is left over; this needs a number of steps that Keras knows, and a `fit` that is not stopped
    before. With delay=1, the last result is applied at the end, also of a `fit` that is stopped.

    It must be the first of the callbacks. Where steps wait for all ranks, it only passes the epoch to the data of
    `fit`, so that shuffled data have the order of this epoch.
    """

    works_on_batches = True

    def __init__(self) -> None:
        super().__init__()
        self._under_way = self._last = False
        self._partial: list[Distributed] = []

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note whether it is the last epoch, and pass it to the data."""
        before_reading(self.model, functools.partial(begin_epoch, epoch=epoch, batches=self.params.get("steps")))
        self._under_way = True
        self._last = epoch + 1 == self.params.get("epochs")
        self._partial = _optimizers(self.model, "partial")

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Make the last update of `fit` wait for all ranks."""
        steps = self.params.get("steps")
        if not self._last or steps is None:
            return
        left = steps - batch
        now = min(left, getattr(self.model, "steps_per_execution", 1))
        for optimizer in self._partial:
            passes, done = accumulated(optimizer)
            if 0 < (done + now) // passes == (done + left) // passes:
                optimizer._hvd_ext.reducer.flush((done + now) // passes)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """End the epoch before its validation."""
        before_reading(self.model, begin_validation, "test_function")
        self._end()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """End the epoch."""
        self._end()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Apply the last result of a `fit` that was stopped."""
        self._catch_up()

    def _end(self) -> None:
        if not self._under_way:
            return
        self._under_way = False
        for optimizer in self._partial:
            end_together(optimizer)
        if self._last:
            self._catch_up()

    def _catch_up(self) -> None:
        for optimizer in _optimizers(self.model, "delay"):
            catch_up(optimizer)  # once: there is nothing left afterwards


def _optimizers(model: Any, option: str) -> list[Distributed]:
    """List the wrapped optimizers of a model that have an option."""
    return [optimizer for optimizer in models.distributed(model) if getattr(optimizer._hvd_ext.reducer.options, option)]
