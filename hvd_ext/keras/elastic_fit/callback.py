"""`Elastic`: the callback with which `fit` survives the loss of ranks, and takes new ones."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from hvd_ext.data.cursor import MARK, cursors_of
from hvd_ext.errors import InvalidError
from hvd_ext.job import banner, consensus, membership, process, runtime
from hvd_ext.job.log import logger
from hvd_ext.keras import base
from hvd_ext.keras.checkpoint import callback_states, model_state
from hvd_ext.keras.checkpoint.callback_states import States
from hvd_ext.keras.checkpoint.skipping import Skipping, before_reading
from hvd_ext.keras.elastic_fit import progress as progresses
from hvd_ext.keras.elastic_fit.progress import Progress
from hvd_ext.keras.optimizers import models
from hvd_ext.keras.optimizers.checks import count_again
from hvd_ext.tensorflow.failures import is_loss

# The ranks ask each other about so often, in seconds, whether others wait to join; an exchange takes a thousandth.
_ASK_S = 0.25
# so many worlds in a row may fail before a step is done in one of them
_MOST = 10


class _Passed:
    """Counts the calls of `fit`: a worker that comes late passes over those that the others have done."""

    def __init__(self) -> None:
        self._count = 0
        self._met: Progress | None = None  # the others are in a later call, and this worker has met them already

    def next(self) -> int:
        """Give the number of a call that begins."""
        self._count += 1
        return self._count - 1

    def is_over(self, number: int) -> bool:
        """Tell whether the others are in a later call."""
        return self._met is not None and self._met.fit > number

    def keep(self, met: Progress, number: int) -> bool:
        """Keep where the others are for the call in which they are; returns whether it is a later one."""
        self._met = met if met.fit > number else None
        return self._met is not None

    def waiting(self, number: int) -> Progress | None:
        """Give where the others are, if this is their call and this worker has met them in an earlier one."""
        return self._met if self._met is not None and self._met.fit == number else None


_passed = _Passed()


class Changed(Exception):
    """The ranks leave their world together, after the same batch, because others join or leave."""


class Elastic(base.Callback):
    """Lets `fit` continue when ranks are lost or join; for jobs that `python -m hvd_ext run` supervises.

    All ranks have it in their callbacks; `synchronized(..., elastic=True)` makes one. When a rank is lost, those that
    are left take the weights of the one that is furthest, which is one update ahead at most, and continue from the step
    that was interrupted. When others wait to join, all leave after the same batch, and the new ones get weights, slots,
    residuals and the place in the data. Nothing is restarted: optimizers and models stay in the process.

    The data of `fit` must be a function that returns them (`fit(lambda: hvd_ext.shard(...))`), which is called in each
    world, because the data are divided among other ranks. With `DataCache` and `shard(..., shuffle=True)` each sample
    of an epoch is seen once, but for those that a last, smaller division drops; of other data as many batches are left
    out as the ranks have trained on. Other callbacks get `on_train_begin` again in each world.

    In a job of another launcher it does nothing, and a lost rank ends the job.

    Args:
        scale: "linear" multiplies the learning rate by the ratio of the new number of ranks to the old one; "none"
            leaves it as it is.

    Raises:
        InvalidError: an argument breaks its rule; in `fit`, the data are no function, or the model trains with what is
            not elastic yet (sync=, delay, local_steps, steps_per_execution, accumulation).
    """

    works_on_batches = True

    def __init__(self, scale: Literal["none", "linear"] = "none") -> None:
        super().__init__()
        if scale not in ("none", "linear"):
            raise InvalidError(f"Elastic, scale ({scale!r}): must be 'none' or 'linear'")
        self.scale = scale
        self._progress: Progress | None = None  # where this rank continues; None: it is new
        self._left_out = 0
        self._rest: Skipping | None = None
        self._leaves_garbage = False  # a `fit` that has failed is freed by Python's collector alone
        self._data: Any = None  # of `fit`, made in this world
        self._beside: list[Any] = []
        self._epoch = self._step = self._before = self._first = 0
        self._trains = False
        self._next_ask = self._interval = 1
        self._asked_s = 0.0

    def around_fit(self, model: keras.Model, plain: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Call the `fit` of a model until its epochs are done; returns its history, of all worlds.

        Args:
            model: the model.
            plain: Keras' method.
            arguments: those of the user, by name.
        """
        _refuse(model, arguments)
        if membership.session() is None:
            return plain(model, **arguments | _made(arguments))
        options, kept = runtime.current().options, list[States]()
        self.set_model(model)
        self._trains, number = False, _passed.next()
        first = arguments.get("initial_epoch", 0)
        self._progress = Progress(number, first, 0, self._updates(), process.size(), {}, {}) if number else None
        for callback in _flat(arguments.get("callbacks")):
            if hasattr(callback, "leave_signal"):
                callback.leave_signal("SIGTERM")
        session = membership.session()
        late = session is not None and session.waits
        if late:
            self._progress = None
            _trace(model, plain, arguments)
            process.rejoin(options)
        if _passed.is_over(number):
            return _passed_over()
        meets = late or _passed.waiting(number) is not None
        history: keras.callbacks.History | None = None
        fruitless = 0
        while True:
            try:
                begun = self._begun(model, arguments, kept, number, meets=meets)
                if begun is None:
                    return _passed_over()
                return _joined(history, plain(model, **begun))
            except Exception as error:
                if not isinstance(error, Changed) and not is_loss(error):
                    raise
                fruitless = 0 if self._trains else fruitless + 1
                if fruitless > _MOST:
                    raise
                logger.info("elastic: %s", error)
                together = isinstance(error, Changed)
            if self._rest is not None:
                self._rest.drop()
                self._rest = None
            if self._trains:
                history = _joined(history, model.history)
                self._progress = self._here(number)
                try:
                    kept = progresses.carried_over(model, together=together)
                except Exception as error:
                    if not is_loss(error):
                        raise
                    kept = progresses.carried_over(model, together=False)
            self._trains, self._leaves_garbage, meets = False, True, True
            process.rejoin(options)
            if not models.outlives_world(model):
                model.train_function = model.test_function = model.predict_function = None
                for optimizer in models.distributed(model):
                    count_again(optimizer._hvd_ext.reducer)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Leave out the batches of the first epoch that earlier worlds have trained on."""
        self._beside = self._beside or callback_states.beside(self)
        self._rest, resumed = None, self._progress
        self._epoch, self._step, self._before = epoch, 0, self._updates()
        self._first = 0
        if resumed is not None and epoch == resumed.epoch:
            callback_states.restore(self._beside, resumed.callbacks)
            self._first = self._step = self._left_out
            read = functools.partial(self._begin_rest, epoch)
            reads = not self._has_order
            if self._first:
                self._rest = Skipping(self.model, self._first, read, reads=reads)
            else:
                before_reading(self.model, read)
        self._trains = True
        self._asked_s = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Leave the world if others wait to join; all ranks do so after the same batch."""
        if self._rest is not None:
            if not self._rest.left:
                self._rest = None
            return
        self._step, self._before = batch + 1, self._updates()
        self._next_ask -= 1
        is_last = batch + 1 == self.params.get("steps")  # its epoch ends first, with its metrics
        if self._next_ask <= 0 and not is_last and self._ask():
            raise Changed("workers join or leave")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note that the epoch is done."""
        if self._rest is not None:
            self._rest.end()
            self._rest = None
        if self._leaves_garbage:
            self._leaves_garbage = False
            gc.collect()
        self._progress = None
        self._epoch, self._step, self._before = epoch + 1, 0, self._updates()
        self._first = 0

    def _begun(
        self, model: keras.Model, arguments: dict[str, Any], kept: list[States], number: int, *, meets: bool
    ) -> dict[str, Any] | None:
        """Begin a call of `fit` in a world; returns its arguments.

        Args:
            model: the model.
            arguments: those of the user.
            kept: what this rank carries over from the world before.
            number: of the call.
            meets: whether the ranks may be at different places; else all begin with this call.

        Returns:
            The arguments; None if the others are in a later call.
        """
        before = self._progress
        self._beside, self._left_out, self._has_order = [], 0, False
        self._next_ask = self._interval = 1
        met = _passed.waiting(number) or (progresses.meet(model, before, kept) if meets else None)
        if met is not None and _passed.keep(met, number):
            return None
        listed = _flat(arguments.get("callbacks"))
        now = dict(arguments)
        now.update(_made(arguments))
        self._progress, self._data = met, now["x"]
        if met is None:
            return now
        size = runtime.current().engine.size
        for callback in listed:
            if hasattr(callback, "goes_on"):
                callback.goes_on()
        if self.scale == "linear" and met.size != size:
            for optimizer in models.distributed(model):
                _scale(optimizer, size / met.size)
        self._left_out = progresses.left_out(now["x"], met, size)
        self._has_order = bool(cursors_of(now["x"]))
        now["initial_epoch"] = met.epoch
        job, words = runtime.current(), f"epoch {met.epoch + 1}, after {self._left_out} batches"
        banner.say(job, f"elastic: {size} {'ranks go' if size > 1 else 'rank goes'} on in {words}; {met.size} before")
        return now

    def _here(self, number: int) -> Progress:
        """Give how far this rank is, between two steps; a step may have been applied and not have ended."""
        updates = self._updates()
        step = self._step + updates - self._before
        data = progresses.position(self._data, self._epoch, step)
        states = callback_states.collect(self._beside)
        return Progress(number, self._epoch, step, updates, runtime.current().engine.size, data, states)

    def _updates(self) -> int:
        return int(self.model.optimizer.iterations)

    def _begin_rest(self, epoch: int, iterator: Any) -> None:
        setattr(iterator, MARK, True)
        for cursor in cursors_of(getattr(iterator, "_dataset", None)):
            cursor.set(epoch, self._first)

    def _ask(self) -> bool:
        """Ask all ranks whether others wait to join, and agree on when to ask again."""
        session, now_s = membership.session(), time.monotonic()
        pace_s = (now_s - self._asked_s) / self._interval
        self._asked_s = now_s
        own = [session is not None and session.changed, pace_s]
        answers = consensus.exchange(runtime.current().engine, "elastic: others wait", lambda: own)
        self._next_ask = self._interval = max(1, int(_ASK_S / max(answers[0][1], 1e-6)))
        return any(changed for changed, _ in answers)


def _refuse(model: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse what `Elastic` cannot continue with."""
    if not callable(arguments.get("x")) or isinstance(arguments["x"], tf.data.Dataset | keras.utils.PyDataset):
        raise InvalidError(
            f"fit, x ({type(arguments.get('x')).__name__}): with elastic=True it must be a function that returns the "
            "data, which are divided again when the ranks change: fit(lambda: hvd_ext.shard(data, batch_size), ...)"
        )
    if arguments.get("steps_per_epoch") is not None:
        raise InvalidError(
            f"fit, steps_per_epoch ({arguments['steps_per_epoch']}): with elastic=True the data say how long an epoch "
            "is, because the number of steps depends on the number of ranks; leave it out"
        )
    if getattr(model, "steps_per_execution", 1) not in (1, None):
        raise InvalidError("fit: elastic=True needs steps_per_execution=1, a step that was lost is repeated alone")
    optimizers: list[Any] = [*models.distributed(model)]
    for optimizer in optimizers:
        asked = optimizer._hvd_ext.reducer.options
        for option in ("partial", "delay", "local_steps", "process_set"):
            if getattr(asked, option, None):
                raise InvalidError(
                    f"optimizer {optimizer.name!r}: elastic=True does not go with {option}: a step of all ranks is the "
                    "same step, so that it can be repeated"
                )
        if getattr(optimizer, "gradient_accumulation_steps", None):
            raise InvalidError(
                f"optimizer {optimizer.name!r}: elastic=True does not go with accumulated gradients, of which a lost "
                "rank has its own"
            )


def _trace(model: Any, plain: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Trace the training step of a worker that comes late, by a step of its own, whose weights it will not keep.

    The others train meanwhile. The functions of other data than a data set are traced in the first step with them.
    """
    data = _made(arguments)["x"]
    if not models.outlives_world(model) or not isinstance(data, tf.data.Dataset):
        return
    model_state.ready(model)
    listed, _ = model_state.variables(model)
    before = model_state.arrays(listed)
    plain(model, x=data.take(1), epochs=1, verbose=0)
    model_state.assign(listed, before, "elastic")


def _made(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Make the data of `fit` in this world."""
    made: dict[str, Any] = {}
    data = arguments["x"]()
    if isinstance(data, tuple):
        made.update(zip(("x", "y", "sample_weight"), data, strict=False))
    else:
        made["x"] = data
    validation = arguments.get("validation_data")
    if callable(validation) and not isinstance(validation, tf.data.Dataset | keras.utils.PyDataset):
        made["validation_data"] = validation()
    return made


def _scale(optimizer: Any, factor: float) -> None:
    rate: Any = getattr(optimizer, "_learning_rate", None)
    if not hasattr(rate, "assign"):
        raise InvalidError(
            f"optimizer {optimizer.name!r}: scale='linear' multiplies its learning rate, which is a schedule here; use "
            "hvd_ext.scale_learning_rate in it, and scale='none'"
        )
    rate.assign(np.asarray(rate.numpy()) * np.asarray(factor, rate.dtype))


def _passed_over() -> keras.callbacks.History:
    """Give the history of a call of `fit` that trains nothing."""
    history = keras.callbacks.History()
    history.on_train_begin()
    return history


def _joined(first: keras.callbacks.History | None, second: Any) -> Any:
    """Give the history of all worlds: an epoch that was interrupted has the logs of its last world."""
    if first is None or not isinstance(second, keras.callbacks.History) or second is first:
        return second
    for name, values in first.history.items():
        second.history[name] = [*values, *second.history.get(name, [])]
    second.epoch = [*first.epoch, *second.epoch]
    return second


def _flat(callbacks: Any) -> list[Any]:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    if isinstance(callbacks, Iterable):
        return [one for part in callbacks for one in _flat(part)]
    return [] if callbacks is None else [callbacks]
