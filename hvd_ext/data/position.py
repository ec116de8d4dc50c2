"""Where training stands: from which step on a data set gives its steps, and how many of them nobody needs.

A data set with an order (`hvd_ext.data.steps`) asks whenever an iterator of it gives its first element. Keras does not
tell a data set which epoch it is in, so the callbacks `Checkpoint` and `EndTogether` (`synchronized` has it) do, before
Keras makes the epoch's iterator. They also find the data of `fit` in its frame, because data sets of the same kind may
validate. Data sets that no callback has told anything count their iterators.

Steps are counted through all epochs: step s of epoch e is the step e * number + s. So it does not matter whether Keras
makes an iterator for each epoch, or, with steps_per_epoch, one for several epochs or for a part of one.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_ext import state
from hvd_ext.errors import CheckpointError
from hvd_ext.job import consensus, runtime

if TYPE_CHECKING:
    from hvd_ext.data.steps import Steps

_LOG = logging.getLogger("hvd_ext")

OWNER = "place in the data"
# The attribute by which a data set of `tf.data` names its steps.
MARK = "_hvd_ext_steps"

# Data sets that give one element for each of their inputs', in their order. Behind others, a step that is skipped may
# come out at another place, and be trained on.
_ONE_TO_ONE = ("Map", "ParallelMap", "Prefetch", "Options", "AssertCardinality", "Take", "Repeat", "Zip", "Model")

# What a checkpoint keeps of a data set, each a whole number.
_KEPT = ("parts", "samples", "samples of a step", "seed")


@dataclass
class Begun:
    """The iterators of a data set that have begun: how many that no `fit` has, and the newest one that a `fit` has."""

    counted: int = 0
    fit: int = 0
    epoch: int = -1
    of_epoch: int = 0
    first: int = 0
    wanted: int = 0  # the first step that is needed


@dataclass
class _Fit:
    number: int
    training: dict[Steps, bool]  # and whether Keras gets its elements one by one
    validation: set[Steps]
    steps: int | None  # of an epoch of Keras, where it is known
    kept: bool  # an iterator lives until it has no more elements, not for one epoch
    epoch: int = 0
    first_step: int = 0
    validates: bool = False


@dataclass
class Place:
    """Where the `fit` that runs stands, for all data sets of this process that have an order."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _fit: _Fit | None = None
    _fits: int = 0
    _restored: dict[str, dict[str, int]] = field(default_factory=dict)
    # those of the newest `fit`, by what a checkpoint calls them
    _trained: weakref.WeakValueDictionary[str, Steps] = field(default_factory=weakref.WeakValueDictionary)

    def forget_fit(self) -> None:
        """Note that no `fit` runs."""
        with self._lock:
            self._fit = None

    def epoch_begins(self, callback: Any, epoch: int, first_step: int = 0) -> None:
        """Note that an epoch of `fit` begins; see the function of this name."""
        with self._lock:
            if self._fit is None:
                self._fits += 1
                self._fit = _look(callback, self._fits)
                self._claim(self._fit.training)
            elif self._fit.epoch == epoch:  # another callback has told it too
                first_step = max(first_step, self._fit.first_step)
            self._fit.epoch, self._fit.first_step, self._fit.validates = epoch, first_step, False

    def validation_begins(self) -> None:
        """Note that the training of an epoch is over."""
        with self._lock:
            if self._fit is not None:
                self._fit.validates = True

    def nothing_to_skip(self) -> None:
        """Note that all further steps are needed, whichever iterator gives them."""
        with self._lock:
            if self._fit is not None:
                self._fit.first_step = 0

    def begin(self, steps: Steps) -> tuple[int, int]:
        """Tell where an iterator begins, which is about to give its first element.

        Args:
            steps: of its data set.

        Returns:
            Its first step, counted through all epochs, and the number of steps from there on that nobody needs.
        """
        with self._lock:
            fit, begun, number = self._fit, steps.begun, steps.number
            if fit is None or steps not in fit.training or (fit.validates and steps in fit.validation):
                begun.counted += 1
                return (begun.counted - 1) * number, 0
            needed = fit.first_step if fit.training[steps] else 0
            if fit.kept:
                _begin_kept(fit, begun, number, needed)
            else:
                _begin_epoch(fit, begun, number, needed)
            return begun.first, min(max(0, begun.wanted - begun.first), number)

    def save(self) -> dict[str, np.ndarray]:
        """Give what a checkpoint keeps; see `hvd_ext.state.register`."""
        with self._lock:
            trained = dict(self._trained)
        return {
            f"{name}/{what}": np.array(value) for name, steps in trained.items() for what, value in _kept(steps).items()
        }

    def load_all(self, own: dict[str, np.ndarray] | None, everyone: Any) -> None:
        """Take what the earlier job has saved, on any number of ranks; see `hvd_ext.state.register`."""
        if own is None:
            own = _of_any_rank(everyone)
        self._restored = {}
        for key, value in own.items():
            name, _, what = key.rpartition("/")
            self._restored.setdefault(name, {})[what] = int(value)

    def _claim(self, training: Iterable[Steps]) -> None:
        self._trained.clear()
        for steps in training:
            if not steps.shared:
                continue
            name, index = steps.name, 1
            while name in self._trained:
                index += 1
                name = f"{steps.name} {index}"
            self._trained[name] = steps
            saved = self._restored.pop(name, None)
            if saved is not None:
                _compare(steps, saved)
                steps.parts = saved["parts"]


_newest: weakref.ref[Place] | None = None


def of_this_process() -> Place:
    """Give the place, which lives as long as a data set has it; its state is part of every checkpoint."""
    global _newest
    place = _current()
    if place is None:
        place = Place()
        _newest = weakref.ref(place)
        state.register(OWNER, place.save, load_all=place.load_all)
    return place


def train_begins() -> None:
    """Tell the data that a `fit` begins; an earlier one may have ended with an exception."""
    if place := _current():
        place.forget_fit()


def train_ends() -> None:
    """Tell the data that `fit` has ended."""
    if place := _current():
        place.forget_fit()


def epoch_begins(callback: Any, epoch: int, first_step: int = 0) -> None:
    """Tell the data that an epoch of `fit` begins, before Keras has made its iterator; several callbacks may.

    Args:
        callback: one of `fit`, which calls this in its hook.
        epoch: from 0.
        first_step: the number of its batches that the training step will not see.
    """
    if place := _current():
        place.epoch_begins(callback, epoch, first_step)


def nothing_to_skip() -> None:
    """Tell the data that the training step sees all further batches."""
    if place := _current():
        place.nothing_to_skip()


def validation_begins() -> None:
    """Tell the data that the training of an epoch is over."""
    if place := _current():
        place.validation_begins()


def _current() -> Place | None:
    return None if _newest is None else _newest()


def _begin_kept(fit: _Fit, begun: Begun, number: int, needed: int) -> None:
    if begun.fit == fit.number:
        begun.first += number
        return
    begun.fit, begun.first = fit.number, fit.epoch * (fit.steps or number)
    begun.wanted = begun.first + needed


def _begin_epoch(fit: _Fit, begun: Begun, number: int, needed: int) -> None:
    # more than one where the user repeats the data set
    iterators = max(1, -(-(fit.steps or 1) // max(1, number)))
    if (begun.fit, begun.epoch) != (fit.number, fit.epoch):
        begun.fit, begun.epoch, begun.of_epoch = fit.number, fit.epoch, 0
        begun.wanted = fit.epoch * iterators * number + needed
    begun.first = (fit.epoch * iterators + begun.of_epoch % iterators) * number
    begun.of_epoch += 1


def _look(callback: Any, number: int) -> _Fit:
    """Find the data of the `fit` that calls a callback."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "fit" and frame.f_locals.get("self") is callback.model:
            break
        frame = frame.f_back
    given = {} if frame is None else frame.f_locals
    per_epoch = given.get("steps_per_epoch")
    training: dict[Steps, bool] = {}
    for steps, exact in _found(given.get("x")):
        training[steps] = exact and training.get(steps, True)
    return _Fit(
        number,
        training=training,
        validation={steps for steps, _ in _found(given.get("validation_data"))},
        steps=per_epoch or callback.params.get("steps"),
        kept=bool(per_epoch),
    )


def _found(data: Any, exact: bool = True) -> Iterator[tuple[Steps, bool]]:
    """Yield the steps that a data set is made of, and whether it gives one element for each of them, in their order."""
    steps = getattr(data, MARK, None)
    if steps is not None:
        yield steps, exact
    elif hasattr(data, "_inputs"):
        kind = type(data).__name__.lstrip("_").removesuffix("Dataset")
        for one in data._inputs():
            yield from _found(one, exact and kind in _ONE_TO_ONE)


def _kept(steps: Steps) -> dict[str, int]:
    values = (steps.parts, steps.samples, steps.batch_size * steps.size, steps.seed)
    return dict(zip(_KEPT, values, strict=True))


def _compare(steps: Steps, saved: dict[str, int]) -> None:
    """Warn, on one rank, where training will not go on with the samples that would have come."""
    now = _kept(steps)
    other = [
        f"{saved[what]} {what}, now {now[what]}"
        for what in ("samples", "samples of a step")
        if saved[what] != now[what]
    ]
    if saved["seed"] != now["seed"]:
        other.append(f"seed {saved['seed']}, now {now['seed']}")
    if other and steps.rank == 0:
        _LOG.warning(
            "%s: the checkpoint was saved with %s: training goes on with the same epoch and step, but its steps have "
            "other samples than those that would have come; ranks * batch_size must be the same for that",
            steps.name,
            "; ".join(other),
        )


def _of_any_rank(everyone: Any) -> dict[str, np.ndarray]:
    """Read the state of some rank of an earlier job, which all ranks have alike, where any rank of this one can."""

    def read() -> dict[str, int] | None:
        try:
            own = next(iter(everyone()), None)
        except CheckpointError:
            return None
        return None if own is None else {key: int(value) for key, value in own.items()}

    engine = runtime.current().engine
    found = [each for each in consensus.exchange(engine, "Checkpoint: place in the data", read) if each is not None]
    if not found and engine.rank == 0:
        _LOG.warning("Checkpoint: no rank can read how the data were divided: the order of shuffled data is another")
    return {key: np.array(value) for key, value in found[0].items()} if found else {}
