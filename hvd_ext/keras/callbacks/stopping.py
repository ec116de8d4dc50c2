"""All ranks stop after the same step: a rank that left `fit` alone would leave the others waiting for its gradients."""

from __future__ import annotations

from typing import Any

from hvd_ext.errors import InvalidError, MismatchError
from hvd_ext.keras import base
from hvd_ext.keras.callbacks.broadcast import check_steps
from hvd_ext.keras.checkpoint.skipping import skips
from hvd_ext.keras.optimizers import models
from hvd_ext.tensorflow.collectives.objects import allgather_object
from hvd_ext.tensorflow.gradients.round_flags import STOP_BIT, RoundFlags, partial_reducer

_NAME = "fit"


class StopTogether(base.Callback):
    """Makes all ranks stop after the same step, as soon as a callback of one rank sets `model.stop_training`.

    Put it behind all callbacks that may stop, in the lists of all ranks. At the end of each epoch the ranks agree, in
    one small exchange. A rank that sets `stop_training` within an epoch trains on until they agree next.
    Where steps do not wait for all ranks, the wish to stop travels with the gradients, and ranks may have unequal
    numbers of batches.

    Args:
        every: the number of steps after which the ranks agree too; None: at the ends of epochs only. The smallest
            number of all ranks counts.
        restored: whether rank 0 may begin with a later epoch (`keras.callbacks.BackupAndRestore`); the others then
            begin with that epoch too.

    Raises:
        InvalidError: `every` is no number of steps; or, when `fit` begins, the ranks have unequal numbers of steps or
            epochs.
        MismatchError: the ranks have made unequal numbers of steps, because they had unequal data; on all ranks.
    """

    works_on_batches = True

    def __init__(self, every: int | None = None, *, restored: bool = False) -> None:
        super().__init__()
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise InvalidError(f"every ({every!r}): must be a number of steps, a whole number from 1, or None")
        self.every = every
        self.restored = restored
        self._every = every
        self._epoch = 0
        self._steps = 0
        self._stop_asked = False
        self._flags: RoundFlags | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Compare what `fit` was called with, and agree on how often to agree."""
        base.refuse_plain(self.model)
        reducer = partial_reducer(models.optimizers(self.model)) if base.trains_together(self.model) else None
        self._flags = None if reducer is None else RoundFlags(reducer, STOP_BIT, 1)
        if self._flags is not None:
            self._flags.send(0)
        first = getattr(self.model, "_initial_epoch", None) if self.restored else None
        ranks = allgather_object((self.params.get("steps"), self.params.get("epochs"), self.every, first), name=_NAME)
        if self._flags is None:
            check_steps([steps for steps, _, _, _ in ranks])
        for rank, (_, epochs, _, _) in enumerate(ranks):
            if epochs != ranks[0][1]:
                raise InvalidError(
                    f"fit: epochs must be the same on all ranks, or some would wait for ever; rank {rank} has "
                    f"{epochs}, rank 0 has {ranks[0][1]}"
                )
        self._every = min((every for _, _, every, _ in ranks if every is not None), default=None)
        self._stop_asked = False
        if self.restored:
            self.model._initial_epoch = ranks[0][3]

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Count the epoch's steps from 0."""
        self._epoch, self._steps = epoch, 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Hold `stop_training` back, and agree if it is time to."""
        self._steps += 1
        self._hold_back()
        if self._every and self._flags is not None:
            if self._stop_asked:
                self._flags.send(1)
            self.model.stop_training = bool(self._flags.received())
        elif self._every and self._steps % self._every == 0 and not skips(self.model):
            self._agree("is after")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Agree on whether to stop."""
        self._hold_back()
        self._agree("has ended with")

    def _hold_back(self) -> None:
        self._stop_asked = self._stop_asked or bool(self.model.stop_training)
        self.model.stop_training = False

    def _agree(self, where: str) -> None:
        steps = self._steps if self._flags is None else "all"  # partial rounds take unequal numbers of batches
        ranks = allgather_object((where, steps, self._epoch, self._stop_asked), name=_NAME)
        for rank, (*position, _) in enumerate(ranks):
            if position != list(ranks[0][:3]):
                raise MismatchError(
                    f"fit: all ranks must make the same steps; rank {rank} {_words(position)}, rank 0 "
                    f"{_words(ranks[0][:3])}; hvd_ext.shard(data, batch_size) gives all ranks the same number, "
                    "and steps_per_epoch cuts uneven data"
                )
        self.model.stop_training = any(wanted for *_, wanted in ranks)


def _words(position: Any) -> str:
    where, step, epoch = position
    return f"{where} step {step} of epoch {epoch + 1}"
