"""Callbacks that keep a state up to date while `fit` trains, and commit it."""

from __future__ import annotations

import weakref
from typing import Any

from hvd_ext.elastic.state import State
from hvd_ext.errors import InvalidError
from hvd_ext.keras import base

# The callbacks of the newest `fit` that update a state: a commit needs their values, whatever the order in the list.
_updating: weakref.WeakKeyDictionary[State, dict[type, _Updating]] = weakref.WeakKeyDictionary()


class CommitStateCallback(base.Callback):
    """Commits a state after every so many batches, and at the end of each epoch.

    The last batch of an epoch has no commit of its own. A commit copies all variables to host memory, so a large model
    may be committed less often; a failure then costs more batches.

    Args:
        state: the state, which has the model.
        batches_per_commit: a whole number from 1, the same on all ranks.

    Raises:
        InvalidError: batches_per_commit breaks its rule.
    """

    works_on_batches = True

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        if isinstance(batches_per_commit, bool) or not isinstance(batches_per_commit, int) or batches_per_commit < 1:
            raise InvalidError(f"batches_per_commit ({batches_per_commit!r}): must be a whole number from 1")
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._since = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Count from here, as all ranks do."""
        self._since = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Commit, if it is time."""
        self._since += 1
        steps = self.params.get("steps")
        if self._since < self.batches_per_commit or (steps and batch + 1 >= steps):
            return
        for updating in self._others():
            updating.on_train_batch_end(batch, logs)
        self._commit()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Commit."""
        for updating in self._others():
            updating.on_epoch_end(epoch, logs)
        self._commit()

    def _commit(self) -> None:
        self._since = 0
        self.state.commit()

    def _others(self) -> list[_Updating]:
        # Keras hands one dictionary to all callbacks of a `fit`
        return [other for other in _updating.get(self.state, {}).values() if other.params is self.params]


class _Updating(base.Callback):
    """Updates an attribute of a state; a second call of the same hook changes nothing."""

    works_on_batches = True

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        _updating.setdefault(self.state, {})[type(self)] = self


class UpdateBatchStateCallback(_Updating):
    """Sets `state.batch` to the number of batches of this epoch that are done; 0 at the end of an epoch.

    If `fit` begins with `state.batch` > 0, it continues an epoch, and counts from there.

    Args:
        state: a state with an attribute `batch`.
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Note the batches that were done before."""
        super().on_train_begin(logs)
        self._before = self.state.batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Count the batch."""
        self.state.batch = self._before + batch + 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Count from 0."""
        self.state.batch = self._before = 0


class UpdateEpochStateCallback(_Updating):
    """Sets `state.epoch` to the number of epochs that are done, those before this `fit` included.

    Args:
        state: a state with an attribute `epoch`.
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Note the epochs that were done before."""
        super().on_train_begin(logs)
        self._before, self._first = self.state.epoch, -1

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note the first epoch of this `fit`: with `initial_epoch` Keras does not count from 0."""
        self._first = epoch if self._first < 0 else self._first

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Count the epoch."""
        self.state.epoch = self._before + epoch - self._first + 1
