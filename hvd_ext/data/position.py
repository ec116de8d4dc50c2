"""Where training stands: from which step on a data set gives its steps, and how many of them are skipped.

A data set with an order (`hvd_ext.data.steps`) asks whenever an iterator of it gives its first element. Keras does not
tell a data set which epoch it is in, so the callbacks `Checkpoint` and `EndTogether` (`synchronized` has it) do, before
Keras makes the epoch's iterator. They also find the data of `fit` in its frame, because data sets of the same kind may
validate. Data sets that no callback has told anything, as in loops of the user's own, count their iterators, from the
epoch on that `Checkpoint.restore` has found.

Steps are counted through all epochs: step s of epoch e is the step e * number + s. So it does not matter whether Keras
makes an iterator for each epoch, or, with steps_per_epoch, one for several epochs or for a part of one.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_ext.data.steps import Steps

_LOG = logging.getLogger("hvd_ext")

# The attribute by which a data set of `tf.data` names its steps.
MARK = "_hvd_ext"

# Data sets that give one element for each of their inputs', in their order. Behind others, what stands in for a step
# that is skipped may come out at another place, and be trained on.
_ONE_TO_ONE = ("Map", "ParallelMap", "Prefetch", "Options", "AssertCardinality", "Take", "Repeat", "Zip", "Model")

# What a checkpoint keeps of a data set, each a whole number.
_KEPT = ("parts", "samples", "samples of a step", "seed")


@dataclass
class Begun:
    """The iterators of a data set that have begun: how many that no `fit` has, and the newest one that a `fit` has."""

    counted: int = 0
    went_on: int = 0  # which `resume_at` it has followed
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


_lock = threading.Lock()
# the `fit` that runs, and how many there have been
_fit: _Fit | None = None
_fits = 0
# how often training has gone on in a loop of the user's own, and with which epoch the last time
_gone_on = (0, 0)
# what a checkpoint has said of data sets that have not begun since, by their names
_restored: dict[str, dict[str, int]] = {}
# the data sets of the newest `fit`, or those that have begun since and without one, by their names in checkpoints
_trained: weakref.WeakValueDictionary[str, Steps] = weakref.WeakValueDictionary()


def train_begins() -> None:
    """Note that a `fit` begins; an earlier one may have ended with an exception."""
    global _fit
    with _lock:
        _fit = None


def train_ends() -> None:
    """Note that `fit` has ended."""
    train_begins()


def epoch_begins(callback: Any, epoch: int, first_step: int = 0) -> None:
    """Note that an epoch of `fit` begins, before Keras has made its iterator; several callbacks may tell it.

    Args:
        callback: one of `fit`, which calls this in its hook.
        epoch: from 0.
        first_step: the number of its batches that the training step will not see.
    """
    global _fit, _fits
    with _lock:
        if _fit is None:
            _fits += 1
            _fit = _look(callback, _fits)
            _trained.clear()
            for steps in _fit.training:
                _claim(steps)
        elif _fit.epoch == epoch:  # another callback has told it too
            first_step = max(first_step, _fit.first_step)
        _fit.epoch, _fit.first_step, _fit.validates = epoch, first_step, False


def nothing_to_skip() -> None:
    """Note that the training step sees all further batches, whichever iterator gives them."""
    with _lock:
        if _fit is not None:
            _fit.first_step = 0


def validation_begins() -> None:
    """Note that the training of an epoch is over."""
    with _lock:
        if _fit is not None:
            _fit.validates = True


def begin(steps: Steps) -> tuple[int, int]:
    """Tell where an iterator begins, which is about to give its first element.

    Args:
        steps: of its data set.

    Returns:
        Its first step, counted through all epochs, and the number of steps from there on that are skipped.
    """
    with _lock:
        fit, begun, number = _fit, steps.begun, steps.number
        if fit is None or steps not in fit.training or (fit.validates and steps in fit.validation):
            if fit is None:
                _follow(steps)
            begun.counted += 1
            return (begun.counted - 1) * number, 0
        needed = fit.first_step if fit.training[steps] else 0
        if fit.kept:
            _begin_kept(fit, begun, number, needed)
        else:
            _begin_epoch(fit, begun, number, needed)
        return begun.first, min(max(0, begun.wanted - begun.first), number)


def divided() -> dict[str, dict[str, int]]:
    """Give what a checkpoint keeps of the data of `fit`, or of a loop of the user's own, by their names.

    All ranks that share data have the same.
    """
    with _lock:
        return {name: _kept(steps) for name, steps in _trained.items()}


def restore(saved: Mapping[str, Mapping[str, int]]) -> None:
    """Let training go on with data as they were divided when a checkpoint was saved, on any number of ranks.

    Args:
        saved: what `divided` gave.
    """
    with _lock:
        _restored.clear()
        _restored.update({name: dict(values) for name, values in saved.items()})


def resume_at(epoch: int) -> None:
    """Let the next iterator of each data set, in a loop of the user's own, be one for this epoch.

    Args:
        epoch: from 0.
    """
    global _gone_on
    with _lock:
        _gone_on = (_gone_on[0] + 1, epoch)
        _trained.clear()


def _follow(steps: Steps) -> None:
    """Note that an iterator begins without a `fit`."""
    if not any(steps is one for one in _trained.values()):
        _claim(steps)
    times, epoch = _gone_on
    if steps.begun.went_on != times:
        steps.begun.went_on, steps.begun.counted = times, epoch


def _claim(steps: Steps) -> None:
    """Let a checkpoint keep how data are divided, and divide them as the one that was restored says."""
    if not steps.shared:
        return
    name, index = steps.name, 1
    while name in _trained:
        index += 1
        name = f"{steps.name} {index}"
    _trained[name] = steps
    saved = _restored.pop(name, None)
    if saved is not None:
        _compare(steps, saved)
        steps.parts = saved["parts"]


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


def fit_arguments(callback: Any) -> Mapping[str, Any]:
    """Give the arguments of the `fit` that calls a callback, which Keras tells callbacks in part only.

    Args:
        callback: one of `fit`, whose hook calls this.

    Returns:
        The local variables of `fit`; empty where no such `fit` is among the callers.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "fit" and frame.f_locals.get("self") is callback.model:
            return frame.f_locals
        frame = frame.f_back
    return {}


def _look(callback: Any, number: int) -> _Fit:
    """Find the data of the `fit` that calls a callback."""
    given = fit_arguments(callback)
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
        ordered = getattr(data, "_deterministic", "default") != "false" and data.options().deterministic is not False
        for one in data._inputs():
            yield from _found(one, exact and ordered and kind in _ONE_TO_ONE)


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
