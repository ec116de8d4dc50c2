"""`Elastic`: the callback with which `fit` survives the loss of ranks, and takes new ones."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Mapping
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
from hvd_ext.keras.elastic_fit.calls import calls
from hvd_ext.keras.elastic_fit.carried import Carried
from hvd_ext.keras.elastic_fit.progress import Progress
from hvd_ext.keras.optimizers import models, wrapper
from hvd_ext.keras.optimizers.catching_up import accumulated
from hvd_ext.keras.optimizers.checks import count_again
from hvd_ext.keras.pace import Pace
from hvd_ext.tensorflow.failures import is_loss

# so many worlds in a row may fail before a step is done in one of them
_MOST = 10


class Changed(Exception):
    """The ranks leave their world together, after the same batch, because others join or leave."""


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where this rank is in its world: the epoch, its batches that are done, and the updates at that time."""

    epoch: int
    step: int
    updates: int


class Elastic(base.Callback):
    """Lets `fit` continue when ranks are lost or join; for jobs that `python -m hvd_ext run` supervises.

    All ranks have it in their callbacks; `synchronized(..., elastic=True)` makes one. When a rank is lost, those that
    are left take the weights of the one that is furthest, which is one update ahead at most, and continue from the step
    that was interrupted. When others wait to join, all leave after the same batch, and the new ones get weights, slots,
    residuals and the place in the data. Nothing is restarted: optimizers and models stay in the process.

    The data of `fit` must be a function that returns them (`fit(lambda: hvd_ext.shard(...))`), which is called in each
    world, because the data are divided among other ranks; so must `validation_data` be where they are divided. With
    `DataCache` and `shard(..., shuffle=True)` each sample of an epoch is seen once, but for those that a last, smaller
    division drops; of other data as many batches are left out as the ranks have trained on. Other callbacks get
    `on_train_begin` again in each world.

    If too few workers are left for too long, those that are left save a checkpoint, with the `Checkpoint` in the list
    of callbacks, and end.

    In a job of another launcher it does nothing, and a lost rank ends the job.

    Args:
        scale: "linear" multiplies the learning rate by the ratio of the new number of ranks to the old one; "none"
            leaves it as it is.
        redundancy: 1: after each step each rank gives another rank, on another host if hosts are of one size, a copy of
            what it carries over (the residuals of `TopK`, `Quantized`, `Sign` and `LowRank`), which then survives the
            loss of the one or the other. Each copy is as large as the gradients before they are compressed. 0: the
            residuals of a lost rank are lost.

    Raises:
        InvalidError: an argument breaks its rule; in `fit`, the data are no function, or the model trains with what is
            not elastic yet (sync=, delay, local_steps, steps_per_execution, several optimizers).
    """

    works_on_batches = True

    def __init__(self, scale: Literal["none", "linear"] = "none", redundancy: Literal[0, 1] = 0) -> None:
        super().__init__()
        if scale not in ("none", "linear"):
            raise InvalidError(f"Elastic, scale ({scale!r}): must be 'none' or 'linear'")
        if redundancy not in (0, 1):
            raise InvalidError(f"Elastic, redundancy ({redundancy!r}): must be 0 or 1, the number of copies")
        self.scale, self.redundancy = scale, redundancy
        self._own: Progress | None = None  # how far this rank was when its world began; None: it is new
        self._met: Progress | None = None  # where its world has begun; None: with this call of `fit`
        self._place: _Place | None = None  # where it is; None: no epoch has begun in this world
        self._carried = Carried(redundancy)
        self._begun = self._over = False  # whether Keras' `fit` has begun in this world, and has returned
        self._left_out = 0  # batches of the first epoch in this world
        self._rest: Skipping | None = None
        # the state of the callbacks, and the metrics, when all batches of an epoch are done: validation has its own
        self._at_end: tuple[States, list[np.ndarray]] | None = None
        self._leaves_garbage = False  # a `fit` that has failed is freed by Python's collector alone
        self._data: Any = None  # of `fit`, made in this world
        self._beside: list[Any] = []
        self._pace = Pace()  # of asking whether others wait to join

    def around_fit(self, model: keras.Model, plain: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Call the `fit` of a model until its epochs are done; returns its history, of all worlds.

        Args:
            model: the model.
            plain: Keras' method.
            arguments: those of the user, by name.
        """
        _refuse(model, arguments, self.scale)
        session = membership.session()
        if session is None:
            return plain(model, **arguments | _made(arguments))
        options, listed = runtime.current().options, base.flat(arguments.get("callbacks"))
        self.set_model(model)
        number, late, fruitless = calls.begin(), session.waits, 0
        self._carried = Carried(self.redundancy)
        self._own, self._over = None, False
        for callback in listed:
            if hasattr(callback, "leave_signal"):
                callback.leave_signal("SIGTERM")
        if late:
            _trace(model, plain, arguments)
            process.rejoin(options)
            _trace_again(model)
        elif number:
            first = arguments.get("initial_epoch", 0)
            self._own = Progress(number, first, 0, self._updates(), process.size(), rates=progresses.rates_of(model))
        if calls.is_over(number):
            return calls.history(number)
        meets = late or calls.here(number) is not None
        of_world: keras.callbacks.History | None = None
        while True:
            updates = self._updates()
            try:
                begun = self._begin_world(model, arguments, number, meets=meets)
                if begun is None:
                    return calls.history(number, of_world)
                updates = self._updates()
                if not self._over:
                    of_world = plain(model, **begun)
                    calls.add(number, of_world)
                    self._over = True
                consensus.exchange(runtime.current().engine, "elastic fit: end", lambda: number)
                return calls.history(number, of_world)
            except Exception as error:
                together = isinstance(error, Changed)
                if not together and not is_loss(error):
                    raise
                fruitless = 0 if self._updates() > updates else fruitless + 1
                if fruitless > _MOST:
                    raise
                logger.info("elastic: %s", error)
            self._end_world(model, number, arguments.get("epochs", 1), together=together)
            meets = True
            process.rejoin(options)
            _trace_again(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Give the other callbacks their state again, which they have just reset."""
        self._begun = True
        self._beside = callback_states.beside(self)
        if self._met is not None:
            callback_states.restore(self._beside, self._met.callbacks)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Leave out the batches of the first epoch that earlier worlds have trained on."""
        is_first = self._place is None
        self._rest = self._at_end = None
        left_out = 0
        if self._met is not None and epoch == self._met.epoch:
            left_out = self._left_out
            read = functools.partial(self._begin_rest, epoch, left_out)
            if left_out:
                reads = not cursors_of(self._data)
                self._rest = Skipping(self.model, left_out, read, self._end_skipping, reads=reads)
            else:
                before_reading(self.model, read)
        self._place = _Place(epoch, left_out, self._updates())
        if (why := membership.last()) is not None:
            self._save_and_end(why)
        if not is_first:
            self._leave_if_asked()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Leave the world if others wait to join; all ranks do so after the same batch."""
        is_last = batch + 1 == self.params.get("steps")  # its epoch ends first, with its metrics
        if self._rest is not None:
            if self._rest.left:
                return
            self._rest = None
            assert self._met is not None
            callback_states.restore(self._beside, self._met.callbacks)  # they have counted the batches left out
            if self._met.stops:
                self.model.stop_training = True
        else:
            assert self._place is not None
            self._place = _Place(self._place.epoch, batch + 1, self._updates())
            self._pace.count()
            self._carried.copy(self.model, self._place.updates)
            if not is_last:
                self._leave_if_asked()
        if is_last or self.model.stop_training:
            self._at_end = self._states()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note that the epoch is done."""
        if self._rest is not None:
            self._rest.end()
            self._rest = None
        if self._leaves_garbage:
            self._leaves_garbage = False
            gc.collect()
        self._place, self._at_end = _Place(epoch + 1, 0, self._updates()), None

    def _begin_world(
        self, model: keras.Model, arguments: dict[str, Any], number: int, *, meets: bool
    ) -> dict[str, Any] | None:
        """Begin a call of `fit` in a world; returns its arguments.

        Args:
            model: the model.
            arguments: those of the user.
            number: of the call.
            meets: whether the ranks may be at different places; else all begin with this call.

        Returns:
            The arguments; None if the others are in a later call.
        """
        self._met, self._place, self._begun, self._at_end = None, None, False, None
        self._beside, self._left_out = [], 0
        self._pace.restart()
        meeting = calls.here(number) or (progresses.furthest(self._own, calls.logs) if meets else None)
        if meeting is not None:
            if calls.met(meeting, number):
                return None
            met = progresses.take(model, self._own, meeting)
            self._own = self._met = met  # from here on this rank has these weights
            self._carried.share(model, met.updates)
        now = arguments | _made(arguments)
        self._data = now["x"]
        if self._met is None:
            self._end_last()
            return now
        met, size = self._met, runtime.current().engine.size
        rates = met.rates
        if self.scale == "linear":
            rates = [None if rate is None else rate * size / met.size for rate in rates]
            progresses.set_rates(model, rates)
        self._left_out = progresses.left_out(now["x"], met, size)
        for callback in base.flat(arguments.get("callbacks")):
            if hasattr(callback, "goes_on"):
                callback.goes_on(met.epoch, self._left_out)
        self._own = self._met = dataclasses.replace(met, step=self._left_out, size=size, rates=rates)
        now["initial_epoch"] = met.epoch
        go, where = "ranks go" if size > 1 else "rank goes", f"epoch {met.epoch + 1}, after {self._left_out} batches"
        banner.say(runtime.current(), f"elastic: {size} {go} on in {where}; {met.size} before")
        if met.epoch >= now.get("epochs", 1):
            self._end_last()
        return now

    def _end_world(self, model: keras.Model, number: int, epochs: int, *, together: bool) -> None:
        """Keep what is needed in the next world: how far this rank is, and what it carries over."""
        if self._rest is not None:
            self._rest.drop()
            self._rest = None
        self._leaves_garbage = True
        if self._begun and not self._over:
            calls.add(number, model.history)
        place, updates = self._place, self._updates()
        if place is None:
            return
        step = place.step + updates - place.updates  # an update may have been applied, and its step have not ended
        stops = bool(model.stop_training)
        over = self._over or (stops and place.step == 0)
        if not over:
            done = self._forget_passes()
            step, updates = max(0, step - done), updates - done
        states, metrics = self._states() if self._at_end is None else self._at_end
        self._own = Progress(
            number,
            max(epochs, place.epoch) if over else place.epoch,
            0 if over else step,
            updates,
            runtime.current().engine.size,
            {} if over else progresses.position(self._data, place.epoch, step),
            states,
            progresses.rates_of(model),
            metrics,
            stops,
        )
        try:
            self._carried.leave(model, updates, together=together)
        except Exception as error:
            if not is_loss(error):
                raise
            self._carried.leave(model, updates, together=False)

    def _save_and_end(self, why: str) -> None:
        """Save a checkpoint in the last world of a job, if a callback does that, and end this worker."""
        assert self._place is not None
        if self._met is not None:
            progresses.set_metrics(self.model, self._met.metrics)
        for callback in self._beside:
            if hasattr(callback, "save_data"):
                callback.save_data(self._data)
                callback.save(self._place.epoch, self._place.step, "too few workers")
                break
        else:
            logger.warning("elastic: no Checkpoint is in the callbacks of fit, and what was trained is lost")
        membership.end(why)

    def _end_last(self) -> None:
        """End this worker in the last world of a job, if there is nothing to save."""
        if (why := membership.last()) is not None:
            membership.end(why)

    def _states(self) -> tuple[States, list[np.ndarray]]:
        return callback_states.collect(self._beside), progresses.metrics_of(self.model)

    def _updates(self) -> int:
        """Give the number of updates; where gradients are accumulated, of the passes, by which Keras counts them."""
        optimizer = self.model.optimizer
        accumulates = getattr(optimizer, "gradient_accumulation_steps", None)
        return int(optimizer._iterations if accumulates else optimizer.iterations)

    def _forget_passes(self) -> int:
        """Forget the gradients that were accumulated since the last update; returns of how many steps.

        A lost rank had its own, so these steps are repeated.
        """
        optimizer, (_, done) = self.model.optimizer, accumulated(self.model.optimizer)
        if done:
            for variable in optimizer._accumulated_gradients:
                variable.assign(np.zeros(variable.shape))
            optimizer._iterations.assign_sub(done)
        return done

    def _begin_rest(self, epoch: int, step: int, iterator: Any) -> None:
        setattr(iterator, MARK, True)
        for cursor in cursors_of(getattr(iterator, "_dataset", None)):
            cursor.set(epoch, step)

    def _end_skipping(self) -> None:
        assert self._met is not None
        progresses.set_metrics(self.model, self._met.metrics)

    def _leave_if_asked(self) -> None:
        """Leave the world with all other ranks if workers join or leave; in between two updates, if it is time to ask.

        Raises:
            Changed: on all ranks.
        """
        if not self._pace.is_due or accumulated(self.model.optimizer)[1]:
            return
        session = membership.session()
        own = [session is not None and session.changed, self._pace.seconds()]
        answers = consensus.exchange(runtime.current().engine, "elastic: others wait", lambda: own)
        self._pace.agree(answers[0][1])
        if any(changed for changed, _ in answers):
            raise Changed("workers join or leave")


def _refuse(model: Any, arguments: Mapping[str, Any], scale: str) -> None:
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
    if len(optimizers) != 1 or not models.wrapped(getattr(model, "optimizer", None)):
        raise InvalidError(
            f"model {model.name!r}: elastic=True needs one distributed optimizer, given to compile, whose updates say "
            f"how far a rank is; it has {len(optimizers)}"
        )
    validation = arguments.get("validation_data")
    if cursors_of(validation[0] if isinstance(validation, tuple) else validation):
        raise InvalidError(
            "fit, validation_data: with elastic=True divided data must be a function that returns them, as x is: "
            "validation_data=lambda: hvd_ext.shard(...)"
        )
    if scale == "linear" and None in progresses.rates_of(model):
        raise InvalidError(
            f"optimizer {model.optimizer.name!r}: scale='linear' multiplies its learning rate, which is a schedule "
            "here; use hvd_ext.scale_learning_rate in it, and scale='none'"
        )
    for optimizer in optimizers:
        asked = optimizer._hvd_ext.reducer.options
        for option in ("partial", "delay", "local_steps", "process_set"):
            if getattr(asked, option, None):
                raise InvalidError(
                    f"optimizer {optimizer.name!r}: elastic=True does not go with {option}: a step of all ranks is the "
                    "same step, so that it can be repeated"
                )
        updating = wrapper.updates(optimizer)
        if updating is not optimizer and updating.gradient_accumulation_steps:
            raise InvalidError(
                f"optimizer {optimizer.name!r}: elastic=True does not go with accumulated gradients and a loss scale"
            )


def _trace(model: Any, plain: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Trace the training step of a worker that comes late, by a step of its own, whose weights it will not keep.

    The others train meanwhile. Where functions are traced again in each world, the step still makes the variables of
    the metrics. The functions of other data than a data set are traced in the first step with the others.
    """
    data = _made(arguments)["x"]
    if not isinstance(data, tf.data.Dataset):
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


def _trace_again(model: keras.Model) -> None:
    """Have the functions of a model traced again in a new world, where they know more of the old one than channels."""
    if models.outlives_world(model):
        return
    model.train_function = model.test_function = model.predict_function = None
    for optimizer in models.distributed(model):
        count_again(optimizer._hvd_ext.reducer)
