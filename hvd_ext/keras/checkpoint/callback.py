"""`Checkpoint`: a callback that saves training, so that another job goes on with it bit for bit."""

from __future__ import annotations

import collections
import functools
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import numpy as np

from hvd_ext import state
from hvd_ext.data.cursor import Cursors, DataCursor, begin_epoch, begin_validation, cursors_of
from hvd_ext.errors import InvalidError
from hvd_ext.job import consensus, runtime
from hvd_ext.job.log import logger
from hvd_ext.keras import base
from hvd_ext.keras.checkpoint import callback_states, model_state
from hvd_ext.keras.checkpoint.skipping import Skipping, before_reading
from hvd_ext.keras.checkpoint.store import Store
from hvd_ext.keras.optimizers.models import optimizers
from hvd_ext.keras.pace import Pace
from hvd_ext.state import signals as watched
from hvd_ext.state.folder import newest
from hvd_ext.state.manifest import Manifest
from hvd_ext.tensorflow.gradients.round_flags import SIGNAL_BIT, RoundFlags, partial_reducer

__all__ = ["Checkpoint", "newest"]


@dataclass
class _Here:
    """What this process has done with a directory.

    Attributes:
        trained: up to which epoch.
        stopped_by: the signal that has stopped it.
        seen: one that came when a `fit` could not stop any more: the next one does.
    """

    trained: int = 0
    stopped_by: str | None = None
    seen: str | None = None


# The directories that this process has gone on from or begun in: from then on its models are further than checkpoints.
_here: collections.defaultdict[Path, _Here] = collections.defaultdict(_Here)


class Checkpoint(base.Callback):
    """Saves a job's training in a directory, and goes on from the newest complete checkpoint when `fit` begins.

    All ranks have it in their callbacks. Rank 0 writes the model with its optimizers, in a file that plain Keras reads.
    Every rank writes its own state: variables that differ from rank 0's (moving statistics, local variables), states of
    seed generators and random generators, the state of Keras' callbacks in its list (EarlyStopping, ReduceLROnPlateau,
    ModelCheckpoint), and what is registered in `hvd_ext.state`. A checkpoint gets its name when all of it has reached
    the disk; only then are older ones removed. With the same number of ranks training goes on bit for bit, even in the
    middle of an epoch, if the data come in the same order. With another number every rank gets rank 0's model, and a
    line of the log says what was dropped.

    A directory serves all calls of `fit` of a training, one for each of its phases, whose epochs are counted through
    (`initial_epoch`, `epochs`). A program that is started again calls them all again: a `fit` whose epochs are done
    trains nothing, one in whose epochs the newest checkpoint lies goes on from it, and later ones train as ever. After
    a signal, later calls of `fit` with this directory train nothing.

    In a loop of your own: `set_model`, then `epoch, step = restore()`, then `save(epoch, step)`.

    Args:
        directory: a directory for this job alone; on a disk that ranks share, or on one of each host.
        every: save after every so many epochs; None: not at the ends of epochs.
        every_steps: save after every so many batches too; None: not in the middle of an epoch.
        keep: the number of checkpoints that stay.
        resume: "auto" goes on from a checkpoint if there is one; True must find one; False begins afresh.
        signals: names of signals that stop training. When one rank gets one while `fit` runs, all ranks save after the
            same batch and stop: within a quarter of a second, or one batch; with sync= and unequal numbers of batches,
            at the end of the epoch.
        on_signal: "stop" ends `fit`, so that the script goes on (`stopped_by` tells why); "exit" ends the program with
            the status 128 + the signal's number.

    Attributes:
        stopped_by: the signal's name, or None.
        exit_status: 0, or 128 + the signal's number, for `sys.exit`.

    Raises:
        InvalidError: an argument breaks its rule; the message says which. When `fit` begins: the model is one of
            tf_keras.
    """

    works_on_batches = True

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int | None = 1,
        every_steps: int | None = None,
        keep: int = 3,
        resume: bool | Literal["auto"] = "auto",
        signals: Sequence[str] = ("SIGTERM", "SIGUSR1"),
        on_signal: Literal["stop", "exit"] = "stop",
    ) -> None:
        super().__init__()
        for name, value in (("every", every), ("every_steps", every_steps), ("keep", keep)):
            left_out = value is None and name != "keep"
            if not left_out and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InvalidError(f"Checkpoint, {name} ({value!r}): must be a whole number from 1")
        if resume not in (True, False, "auto"):
            raise InvalidError(f"Checkpoint, resume ({resume!r}): must be True, False or 'auto'")
        if on_signal not in ("stop", "exit"):
            raise InvalidError(f"Checkpoint, on_signal ({on_signal!r}): must be 'stop' or 'exit'")
        self.every, self.every_steps, self.keep = every, every_steps, keep
        self.resume, self.on_signal = resume, on_signal
        self.signals = watched.check(signals)
        self.stopped_by: str | None = None
        self._directory = Path(directory)
        self._watch = watched.Watch(self.signals, lambda frame: bool(self._fit_of(frame)))
        self._store: Store | None = None
        self._skipping: Skipping | None = None
        self._data: Cursors | None = None  # that `fit` reads
        self._epoch = self._step = self._first_step = 0
        self._unsaved = 0
        # the callbacks of `fit`, and the state of the random generators when its epoch began
        self._beside: list[Any] = []
        self._began: dict[str, np.ndarray] = {}
        self._pace = Pace()  # of asking for signals
        # with partial rounds: how signals travel; None: the ranks have unequal numbers of batches, and exchange signals
        # at the ends of epochs
        self._flags: RoundFlags | None = None
        self._partial = self._goes_on = False
        self._done_before = (0, 0)  # batches that an elastic `fit` leaves out

    def goes_on(self, epoch: int, step: int) -> None:
        """Restore nothing when `fit` begins: training continues in this process, after a step of an epoch."""
        self._goes_on, self._done_before = True, (epoch, step)

    def leave_signal(self, name: str) -> None:
        """Leave a signal to others: in an elastic job SIGTERM asks one worker to leave."""
        self.signals = tuple(signal for signal in self.signals if signal != name)
        self._watch = watched.Watch(self.signals, lambda frame: bool(self._fit_of(frame)))

    def save_data(self, data: Any) -> None:
        """Let the next checkpoint have how data are divided from which nothing has been read yet."""
        self._data = Cursors() if self._data is None else self._data
        for cursor in cursors_of(data):
            self._data.add(cursor)

    @property
    def exit_status(self) -> int:
        """The status for `sys.exit`: 0, or 128 + the number of the signal that has stopped training."""
        return 0 if self.stopped_by is None else 128 + int(getattr(signal, self.stopped_by))

    def restore(self) -> tuple[int, int]:
        """Go on from the newest checkpoint that is complete on all ranks; all ranks call it.

        In a loop of your own, the next iterator of each data set of `DataCache` and `hvd_ext.shard(shuffle=True)` has
        the order of the epoch to go on with, from its first batch on: `data.skip(step)` leaves out those that are done.

        Returns:
            The epoch to go on with, from 0, and the number of its batches that are done; (0, 0) where training begins
            afresh.

        Raises:
            CheckpointError: there is none and resume=True, or it was saved from another model; on all ranks.
            InvalidError: the model has no variables yet, or the directory cannot be used; on all ranks.
            MismatchError: the ranks have different arguments.
        """
        self._store = Store(self.model, self._directory, self.keep, self._arguments())
        found = self._find(self._store)
        _here[self._directory.absolute()] = _Here()
        if found is None:
            return 0, 0
        self._store.restore(*found)
        if found[1].swapped:
            self._store.swap_back(())
        self._data, DataCursor.loop = None, Cursors(found[1].data, found[1].epoch)
        return found[1].epoch, found[1].step

    def save(self, epoch: int, step: int = 0, reason: str = "asked for") -> None:
        """Save; all ranks call it, after the same batch.

        Args:
            epoch: the epoch to go on with, from 0.
            step: the number of its batches that are done.
            reason: for the log and the manifest.

        Raises:
            CheckpointError: the disk of some rank is full or does not work; on all ranks. Older checkpoints are as they
                were.
        """
        began = self._began if step else {}
        data = (DataCursor.loop if self._data is None else self._data).get()
        asked = self._opened.save(epoch, step, reason, self._watch.seen, data, self._beside, began)
        self._unsaved = 0
        if asked and self.stopped_by is None:
            self._stop(asked)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restore, and begin to watch for signals."""
        base.refuse_plain(self.model)
        self.stopped_by = None
        self._beside, self._data = callback_states.beside(self), Cursors()
        first = self._fit_of(sys._getframe()).get("initial_epoch", 0)
        begin = self._go_on(first)
        self._step, self._unsaved = self._first_step, 0
        self._pace.restart()
        if begin != first:  # `fit` reads it after this hook; Keras' own BackupAndRestore sets it too
            self.model._initial_epoch = begin
        if begin >= self.params["epochs"]:
            return
        self._agree_on_signals()
        if not self._watch.start():
            logger.warning("Checkpoint: signals cannot be caught, because `fit` does not run in the main thread")
        here = _here[self._directory.absolute()]
        self._watch.seen, here.seen = self._watch.seen or here.seen, None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Skip the batches of the first epoch that are done."""
        self.model._initial_epoch = None  # a later `fit` begins where it is told to
        # after this callback's on_train_begin another one may have broadcast rank 0's variables
        self._opened.restore_own()
        self._opened.restore_callbacks(self._beside)
        skipped = self._first_step if epoch == self._epoch else 0
        read = functools.partial(self._begin_epoch, epoch, skipped)
        if skipped:
            self._opened.replay()
            self._skipping = Skipping(self.model, skipped, read, self._opened.replayed)
        else:
            self._opened.forget()
            before_reading(self.model, read)
        _here[self._directory.absolute()].trained = epoch + 1
        self._began = model_state.random_state()
        self._epoch, self._step, self._first_step = epoch, 0, 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Save if it is time, or if a rank has got a signal."""
        done, self._step = batch + 1 - self._step, batch + 1
        if (self._epoch, self._step) <= self._done_before:
            return
        if self._skipping is not None:
            if not self._skipping.left:
                self._skipping = None
                self._opened.restore_callbacks(self._beside)  # they have counted the batches that were skipped
            return
        if self._unsaved == 0:
            self._name_unclaimed()
        self._unsaved += done
        self._pace.count()
        asked = self._ask() if self.signals and (self._partial or self._pace.is_due) else None
        if asked or (self.every_steps and self._unsaved >= self.every_steps):
            self.save(self._epoch, self._step, asked or f"{self._unsaved} batches")

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Let validation count its iterators by themselves."""
        before_reading(self.model, begin_validation, "test_function")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Save if it is time."""
        if self._skipping is not None:
            self._skipping.end()
            self._skipping = None
        self._opened.forget()  # or the next epoch would begin with the checkpoint's state
        if self.stopped_by is not None:
            return
        asked = self._exchange_signals()[0] if self._partial and self._flags is None and self.signals else None
        if asked or (self.every and (epoch + 1) % self.every == 0):
            self.save(epoch + 1, 0, asked or "end of epoch")

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Give signals their former handlers back."""
        self.model._initial_epoch = None
        self._beside, self._began, self._data = [], {}, None
        self._watch.stop()
        if self.stopped_by is None:
            _here[self._directory.absolute()].seen = self._watch.seen

    @property
    def _opened(self) -> Store:
        """The store; in a loop of the user's own that has restored nothing, all ranks make it with their first save."""
        self._store = self._store or Store(self.model, self._directory, self.keep, self._arguments())
        return self._store

    def _find(self, store: Store) -> tuple[Path, Manifest] | None:
        return None if self.resume is False else store.find(must=self.resume is True)

    def _go_on(self, first: int) -> int:
        """Restore what the newest checkpoint has for this `fit`.

        Args:
            first: the epoch with which it was told to begin.

        Returns:
            The epoch with which it begins; at least that of its end where there is nothing to train.
        """
        epochs, place = self.params["epochs"], self._directory.absolute()
        asked = {"initial_epoch": repr(first), "epochs": repr(epochs)}
        self._store = Store(self.model, self._directory, self.keep, self._arguments() | asked)
        self._epoch, self._first_step = first, 0
        found = self._find(self._store)
        before, here = _here.get(place), _here[place]
        goes_on, self._goes_on = self._goes_on, False
        if goes_on or (before is not None and found is not None and found[1].position <= (first, 0)):
            found = None  # training has come here in this process
        if found is None and here.stopped_by is not None:
            self.stopped_by = here.stopped_by
            self._tell(logging.WARNING, "%s has stopped training: this fit trains nothing", here.stopped_by)
            return max(first, epochs)
        here.stopped_by = None
        if found is None:
            return first
        path, saved = found
        if saved.position >= (epochs, 0):
            words = "the epochs of this fit, %d to %d, are done: it trains nothing"
            # not a program that was started again, but one whose calls of `fit` have the same epochs
            level = logging.WARNING if first < here.trained else logging.INFO
            self._tell(level, words, first, epochs - 1)
        if saved.position > (epochs, 0):
            if not self._store.restore_variables(path, saved):
                words = "%s is of a later fit with another model: the model of this one stays as it is"
                self._tell(logging.WARNING, words, path.name)
            return epochs
        self._store.restore(path, saved)
        self._data = Cursors(saved.data)
        self._epoch, self._first_step = saved.position
        if self._was_stopped(self._store):
            return epochs
        if saved.swapped and self._epoch < epochs:
            self._store.swap_back(self._beside)
        return self._epoch

    def _tell(self, level: int, words: str, *values: Any) -> None:
        if runtime.current().engine.rank == 0:
            logger.log(level, "Checkpoint, directory (%s): " + words, self._directory, *values)

    def _was_stopped(self, store: Store) -> bool:
        """Give the callbacks their state, and tell whether a callback of any rank had ended training."""
        left = store.restore_callbacks(self._beside)
        engine = runtime.current().engine
        stopped = any(consensus.exchange(engine, "Checkpoint: stopped", lambda: store.stopped))
        if engine.rank == 0 and left:
            words = "Checkpoint: the checkpoint has the state of callbacks that this fit does not have; dropped: %s"
            logger.warning(words, ", ".join(left))
        if engine.rank == 0 and stopped:
            logger.warning(
                "Checkpoint: a callback had ended training after epoch %d: there is nothing left to train in this fit",
                self._epoch,
            )
        return stopped

    def _ask(self) -> str | None:
        """Learn whether a signal has come on some rank, and agree on when to ask again."""
        if self._flags is not None:
            self._flags.send(0 if self._watch.seen is None else 1 + self.signals.index(self._watch.seen))
            signal = self._flags.received()
            return self.signals[signal - 1] if signal else None
        if self._partial:
            return None
        seen, pace_s = self._exchange_signals(self._pace.seconds())
        self._pace.agree(pace_s)
        return seen

    def _exchange_signals(self, pace_s: float = 0.0) -> tuple[str | None, float]:
        """Exchange the signals of all ranks; return the first one, and the `pace_s` of rank 0."""
        engine = runtime.current().engine
        answers = consensus.exchange(engine, "Checkpoint: signals", lambda: [self._watch.seen, pace_s])
        return next((seen for seen, _ in answers if seen), None), answers[0][1]

    def _agree_on_signals(self) -> None:
        """Have signals travel with the gradients, where steps do not wait for all ranks and ranks have equal steps."""
        from hvd_ext.keras import base

        reducer = partial_reducer(optimizers(self.model))
        self._partial, self._flags = reducer is not None and base.trains_together(self.model), None
        if reducer is None or not self._partial:
            return
        engine, own = runtime.current().engine, self.params.get("steps")
        steps = consensus.exchange(engine, "Checkpoint: steps of an epoch", lambda: own)
        if steps[0] is not None and all(one == steps[0] for one in steps):
            self._flags = RoundFlags(reducer, SIGNAL_BIT, 5)
            self._flags.send(0)
        elif self.every_steps:
            raise InvalidError(
                f"Checkpoint, every_steps ({self.every_steps}): with sync={reducer.options.sync!r} all ranks must have "
                f"the same number of batches, which Keras must know, to save in the middle of an epoch; they are "
                f"{', '.join(map(str, steps))}; hvd_ext.shard(data, batch_size) divides data evenly, and "
                "steps_per_epoch cuts uneven data"
            )

    def _stop(self, name: str) -> None:
        self.stopped_by = _here[self._directory.absolute()].stopped_by = name
        if runtime.current().engine.rank == 0:
            logger.warning("Checkpoint: %s: all ranks have saved, training stops", name)
        if self.on_signal == "exit":
            self._watch.stop()
            sys.exit(self.exit_status)
        self.model.stop_training = True

    def _name_unclaimed(self) -> None:
        waiting = state.unclaimed()
        if waiting and runtime.current().engine.rank == 0:
            names = ", ".join(f"{owner} ({', '.join(arrays)})" for owner, arrays in waiting.items())
            logger.warning("Checkpoint: state in the checkpoint that no owner has claimed is dropped: %s", names)
        state.forget_unclaimed()

    def _arguments(self) -> dict[str, Any]:
        names = ("every", "every_steps", "keep", "resume", "signals", "on_signal")
        return {name: repr(getattr(self, name)) for name in names}

    def _fit_of(self, frame: FrameType | None) -> dict[str, Any]:
        """Give the local variables of the `fit` of our model that has called a frame; empty where there is none."""
        for caller, _ in () if frame is None else traceback.walk_stack(frame):
            if caller.f_code.co_name == "fit" and caller.f_locals.get("self") is self.model:
                return caller.f_locals
        return {}

    def _begin_epoch(self, epoch: int, skipped: int, iterator: Any) -> None:
        """Let the data that `fit` is about to read begin with an epoch, divided as they were when it was saved."""
        for cursor in begin_epoch(iterator, epoch, self.params.get("steps"), skipped):
            if self._data is not None:
                self._data.add(cursor)
