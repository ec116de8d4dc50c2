"""`synchronized`: a list of Keras' callbacks for a job of several ranks; what callbacks set must be equal on all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import keras

from hvd_ext.errors import InvalidError, MismatchError
from hvd_ext.job import process_sets, rank_lists
from hvd_ext.job.process import rank, size
from hvd_ext.keras.base import Callback, flat
from hvd_ext.keras.callbacks.additive import is_keras
from hvd_ext.keras.callbacks.broadcast import BroadcastGlobalVariablesCallback
from hvd_ext.keras.callbacks.caches import CacheLogs
from hvd_ext.keras.callbacks.ending import EndTogether
from hvd_ext.keras.callbacks.metrics import AverageAdded, MetricAverageCallback
from hvd_ext.keras.callbacks.statistics import AverageStatistics
from hvd_ext.keras.callbacks.stopping import StopTogether
from hvd_ext.keras.checkpoint.callback import Checkpoint
from hvd_ext.keras.elastic_fit.callback import Elastic
from hvd_ext.keras.elastic_fit.first_rank import OnFirstRank
from hvd_ext.keras.optimizers import models
from hvd_ext.keras.optimizers.comparable import current
from hvd_ext.tensorflow.collectives.objects import allgather_object

# Keras' callbacks that write files or to the screen: on several ranks they would write the same to the same place.
_WRITERS = (
    "ModelCheckpoint",
    "BackupAndRestore",
    "TensorBoard",
    "CSVLogger",
    "RemoteMonitor",
    "OrbaxCheckpoint",
    "ProgbarLogger",
)
# Keras' callbacks that decide by a log on each rank.
_DECIDERS = ("EarlyStopping", "ReduceLROnPlateau")
_STEPS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


def synchronized(
    callbacks: Iterable[Any] | Any = (),
    *,
    root_rank: int = 0,
    only_on_root: Iterable[type] = (),
    stop_every: int | Literal["auto"] | None = "auto",
    elastic: bool | Elastic = False,
) -> list[Any]:
    """Prepare a list of callbacks for several ranks; every rank passes the same callbacks, and the result to `fit`.

    - All ranks begin with one rank's variables.
    - Each epoch's metrics become those of all ranks' data, so that callbacks decide alike (early stopping, learning
      rates).
    - Numbers that callbacks add to the logs are averaged before `EarlyStopping` and `ReduceLROnPlateau` read them, and
      behind the last callback. Those of a `hvd_ext.DataCache` stay each rank's own.
    - Callbacks that write files stay on rank 0 only, and only rank 0 has a progress bar.
    - Where steps do not wait for all ranks (sync=), the ranks end each epoch together, also with unequal numbers of
      batches, and the last step of `fit` waits for all.
    - Learning rates and the other settings of the optimizers must be equal on all ranks at the end of each epoch.
    - When a callback of one rank stops training, all ranks stop after the same step.
    - Moving statistics are averaged before each validation, if `AverageStatistics` is among the callbacks.
    - The logs of each epoch have the hits of each open `hvd_ext.DataCache`.
    - `BackupAndRestore` restores on rank 0, and the others get weights, optimizer and epoch from it. It stands in front
      of `SwapEMAWeights`, so that a backup has the weights that training resumes with.

    Args:
        callbacks: those of Keras, of hvd_ext and of your own; a `BroadcastGlobalVariablesCallback`,
            `MetricAverageCallback` or `StopTogether` among them takes the place of the one that would be made.
        root_rank: the rank whose variables all get; must be 0 with `BackupAndRestore`.
        only_on_root: classes of your own callbacks that belong on rank 0 only, because they write.
        stop_every: the number of steps after which the ranks agree on stopping; None: at the ends of epochs only.
            "auto": after every step if a callback may stop within an epoch (`TerminateOnNaN`, or one of your own that
            works on batches), else at the ends of epochs. One exchange takes about as long as an allreduce of a few
            bytes.
        elastic: whether `fit` continues when ranks are lost or join, in a job that `python -m hvd_ext run` supervises;
            or an `Elastic` with its options. The data of `fit` must then be a function that returns them.

    Returns:
        The list for `fit`.

    Raises:
        InvalidError: root_rank is no rank, or is not 0 with `BackupAndRestore`.
        MismatchError: in `fit`, on all ranks: a setting of an optimizer differs; the message has the values by rank.
        NotInitializedError: before `init()`.
    """
    listed: list[Any] = flat(callbacks)
    start = _pop(listed, BroadcastGlobalVariablesCallback) or BroadcastGlobalVariablesCallback(root_rank)
    end = _pop(listed, EndTogether) or EndTogether()
    average = _pop(listed, MetricAverageCallback) or MetricAverageCallback(exact=True)
    restoring = [callback for callback in listed if _is(callback, ("BackupAndRestore",))]
    if restoring and start.root_rank != 0:
        raise InvalidError(
            f"root_rank ({start.root_rank}): must be 0 with BackupAndRestore, which restores on rank 0; or use "
            "hvd_ext.callbacks.Checkpoint"
        )
    if any(not isinstance(callback, keras.callbacks.Callback) for callback in restoring):
        raise InvalidError(
            "BackupAndRestore of tf_keras: it cannot tell the other ranks at which epoch it resumes; use "
            "BackupAndRestore of Keras 3"
        )
    if restoring and elastic:
        raise InvalidError(
            "BackupAndRestore: with elastic=True it would go back to its backup whenever the ranks change; use "
            "hvd_ext.callbacks.Checkpoint"
        )
    steps = stop_every
    if steps == "auto":
        steps = 1 if any(map(_may_stop_within_an_epoch, listed)) else None
    stop = _pop(listed, StopTogether) or StopTogether(steps, restored=bool(restoring))
    stop.restored = stop.restored or bool(restoring)
    writers = tuple(only_on_root)

    def writes(callback: Any) -> bool:
        return _is(callback, _WRITERS) or isinstance(callback, writers)

    if elastic:  # another rank may become rank 0
        kept = [OnFirstRank(callback) if writes(callback) else callback for callback in listed]
    else:
        kept = [callback for callback in listed if rank() == 0 or not writes(callback)]
    for callback in kept:
        if rank() != 0 and is_keras(type(callback)) and isinstance(getattr(callback, "verbose", None), int):
            callback.verbose = 0
    first = [_RestoreFirst(callback) for callback in restoring if rank() == 0]
    # `Checkpoint` saves what the others have changed, and its own ranks agree on stopping
    last = [callback for callback in kept if isinstance(callback, Checkpoint)]
    # a rank that validates averages statistics before its validation, another one before the metrics are exchanged
    statistics = [callback for callback in kept if isinstance(callback, AverageStatistics)][:1]
    logged = _pop(kept, CacheLogs) or CacheLogs()
    same = _pop(kept, SameHyperparameters) or SameHyperparameters()
    others: list[Any] = []
    added: list[AverageAdded] = []
    for callback in _backups_first([callback for callback in kept if callback not in (*statistics, *last)]):
        if _is(callback, _DECIDERS):
            added.append(AverageAdded(average, logged))
            others.append(added[-1])
        others.append(callback)
    others.append(AverageAdded(average, logged, added))
    going_on = [Elastic()] if elastic is True else [elastic] if elastic else []  # after all others
    return [end, *first, start, *statistics, average, logged, *others, same, stop, *last, *going_on]


def _backups_first(callbacks: list[Any]) -> list[Any]:
    """Put `BackupAndRestore` in front of `SwapEMAWeights`: a backup has the weights that training resumes with."""
    swaps = [index for index, callback in enumerate(callbacks) if _is(callback, ("SwapEMAWeights",))]
    if not swaps:
        return callbacks
    before, behind = callbacks[: swaps[0]], callbacks[swaps[0] :]
    backups = [callback for callback in behind if _is(callback, ("BackupAndRestore",))]
    return [*before, *backups, *(callback for callback in behind if callback not in backups)]


class SameHyperparameters(Callback):
    """Compares the ranks' learning rates, momenta, loss scales and other settings of optimizers after each epoch.

    A callback that sets them from a value of its own rank gives each rank another value, and the weights then differ.
    `SameHyperparameters` must come after such callbacks. It compares the wrapped optimizers of the model; those for a
    process set are compared within the set.

    Raises:
        MismatchError: at the end of an epoch, on all ranks: a value differs; the message has the values by rank.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Compare."""
        if size() == 1:
            return
        settings: dict[tuple[tuple[int, ...], str], str] = {}
        wrapped = models.distributed(self.model)
        for number, optimizer in enumerate(wrapped):
            reducer = optimizer._hvd_ext.reducer
            job = process_sets.runtime_of(reducer.used.process_set)  # with local steps hosts may skip different steps
            if job is not None:
                subject = f"optimizer {reducer.label!r}" + (f" ({number + 1} of {len(wrapped)})" if wrapped[1:] else "")
                settings |= {
                    (job.engine.ranks, f"{subject}: {key}"): value for key, value in current(optimizer).items()
                }
        by_rank = allgather_object(settings, name="SameHyperparameters")
        for ranks, what in {key: None for of_rank in by_rank for key in of_rank}:
            values = {member: by_rank[member].get((ranks, what), "none") for member in ranks}
            having = {value: [member for member in values if values[member] == value] for value in values.values()}
            if len(having) > 1:
                words = "; ".join(
                    f"{value} on rank{'s' * (len(ranks_with) > 1)} {rank_lists.listed(ranks_with)}"
                    for value, ranks_with in having.items()
                )
                raise MismatchError(
                    f"fit: {what} must be the same on all ranks at the end of epoch {epoch + 1}; it is {words}; a "
                    "callback must set it from a value that is equal on all ranks: from a metric in the logs, or from "
                    "hvd_ext.allreduce(value)"
                )


class _RestoreFirst(Callback):
    """Lets a callback restore before the broadcast; in its own place of the list it restores once more."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self._other = other

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._other.on_train_begin(logs)


def _pop(listed: list[Any], kind: type) -> Any:
    """Take the first callback of a class out of the list; None if there is none."""
    for index, callback in enumerate(listed):
        if isinstance(callback, kind):
            return listed.pop(index)
    return None


def _is(callback: Any, names: tuple[str, ...]) -> bool:
    """Tell whether a callback is one of these classes of Keras 3 or Keras 2, or derived from one."""
    return any(kind.__name__ in names and is_keras(kind) for kind in type(callback).__mro__)


def _may_stop_within_an_epoch(callback: Any) -> bool:
    if _is(callback, ("TerminateOnNaN",)) or any(name in vars(callback) for name in _STEPS):  # LambdaCallback
        return True
    for kind in type(callback).__mro__:
        if is_keras(kind) or kind.__module__.split(".")[0] == "hvd_ext":
            return False
        if any(name in vars(kind) for name in _STEPS):
            return True
    return False
