"""The momentum that `TopK` takes over from an optimizer: whose it may be, and an optimizer that has given it away.

It is a class of its own beside the wrapper, because it also stands in front of the optimizer inside of a loss-scale
optimizer, which reduces nothing.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_ext.compression.momentum import Momentum
from hvd_ext.errors import InvalidError
from hvd_ext.job import process_sets
from hvd_ext.keras.optimizers.wrapper import InFront, only_if, passes_factor
from hvd_ext.options.gradients import GradientOptions
from hvd_ext.tensorflow.gradients import kinds
from hvd_ext.tensorflow.gradients.reducer import Reducer
from hvd_ext.tensorflow.topk import feedback


def momentum_of(optimizer: Any, options: GradientOptions) -> Momentum | None:
    """Give the momentum that `TopK` takes over from an optimizer.

    Args:
        optimizer: of Keras 3, without a loss-scale optimizer around it.
        options: momentum_correction of its `TopK` decides.

    Returns:
        None where none is asked for, or, with "auto", where there is none that could be taken over.

    Raises:
        InvalidError: momentum_correction is True, and the optimizer has no momentum that could be taken over.
    """
    if options.topk is None or not options.topk.momentum_correction:
        return None
    if options.topk.momentum_correction == "auto" and not _fits(optimizer, options):
        return None
    if not isinstance(optimizer, keras.optimizers.SGD):
        raise InvalidError(
            f"TopK, momentum_correction (True): it takes over the momentum of keras.optimizers.SGD; {optimizer.name!r} "
            f"is {type(optimizer).__name__}, whose step is not a sum of gradients; leave momentum_correction out, or "
            "use keras.optimizers.SGD(momentum=0.9)"
        )
    if not optimizer.momentum:
        raise InvalidError(
            f"TopK, momentum_correction (True): optimizer {optimizer.name!r} has momentum 0, so there is none to take "
            "over; leave momentum_correction out, or give the optimizer a momentum"
        )
    if _clips(optimizer):
        raise InvalidError(
            f"TopK, momentum_correction (True): optimizer {optimizer.name!r} has a clipnorm, clipvalue or "
            "global_clipnorm, which would act after its momentum and its learning rate; "
            "use TopK(clip=...) instead, or leave momentum_correction out"
        )
    if _has_trained(optimizer):
        raise InvalidError(
            f"TopK, momentum_correction (True): optimizer {optimizer.name!r} has trained without it, and its momentum "
            "would be lost; wrap an optimizer before its first step, or leave momentum_correction out"
        )
    itself = weakref.ref(optimizer)  # the reducer, which asks, must not keep the optimizer alive
    rates, give_back = functools.partial(_rates_of, itself), functools.partial(_give_back, itself)
    return Momentum(float(optimizer.momentum), bool(optimizer.nesterov), rates, give_back)


class MomentumTaken(InFront):
    """An optimizer whose gradients have gone through its momentum and its learning rate before they reach it.

    The optimizer may have a method `momentum_rates(variables)`, which returns the learning rate of the step under way
    for each variable, a number or a scalar tensor, equal on all ranks; else all have the optimizer's.
    """

    _hvd_ext_reducer: Reducer
    # keys of variables: whose gradients have gone through it in some step, and whose slots some step has read
    _hvd_ext_through: frozenset[Any] = frozenset()
    _hvd_ext_read: frozenset[Any] = frozenset()
    # whether the part of a step that is running or being traced has the momentum in its own hands again
    _hvd_ext_has_momentum: bool = False

    def end_momentum(self) -> None:
        """Set the slots that no step reads to zero; rank 0 warns where there was a momentum in them.

        A momentum that an earlier job without the correction has left there ends. Were it kept, it would come back in a
        job without the correction that goes on from this one's file. The slots stay if the optimizer has its momentum
        back (`TopK(until=...)`).
        """
        unread = self._hvd_ext_through - self._hvd_ext_read
        if not unread or any(channel.is_whole for channel in self._hvd_ext_reducer.channels):  # or there are no slots
            return
        with tf.init_scope():
            ended = [
                slot
                for variable, slot in zip(self._trainable_variables, self.momentums, strict=True)
                if kinds.key(variable) in unread and bool(keras.ops.any(slot != 0))
            ]
            for slot in ended:
                slot.assign(keras.ops.zeros_like(slot))
        job = process_sets.runtime_of(self._hvd_ext_reducer.options.process_set)
        if ended and job is not None and job.engine.rank == 0:
            feedback.tell_of_momentum(self._hvd_ext_reducer.label, "without")

    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        plain = super()._backend_update_step
        update = lambda: plain(grads, trainable_variables, learning_rate)  # noqa: E731 - used twice
        whole = self._hvd_ext_reducer.whole
        if whole is None:
            update()
        else:
            only_if(whole, functools.partial(self._with_momentum, update), update)

    def _with_momentum(self, update: Callable[[], None]) -> None:
        object.__setattr__(self, "_hvd_ext_has_momentum", True)
        try:
            update()
        finally:
            object.__setattr__(self, "_hvd_ext_has_momentum", False)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update a variable; a gradient that has gone through momentum and rate is what the weights change by."""
        through, key = self._hvd_ext_reducer.through_momentum, kinds.key(variable)
        if key in through and self._hvd_ext_has_momentum:
            super().update_step(gradient, variable, learning_rate)
            return
        if key not in through:
            if key not in self._hvd_ext_read:
                object.__setattr__(self, "_hvd_ext_read", self._hvd_ext_read | {key})
            super().update_step(gradient, variable, learning_rate)
            return
        if key not in self._hvd_ext_through:
            object.__setattr__(self, "_hvd_ext_through", self._hvd_ext_through | through)
            self.end_momentum()
        self.assign_sub(variable, keras.ops.cast(gradient, variable.dtype))


def _rates_of(optimizer: weakref.ref[Any], variables: Sequence[Any]) -> list[Any]:
    """Give the learning rate of the step under way for each variable."""
    itself = optimizer()
    if hasattr(itself, "momentum_rates"):
        return list(itself.momentum_rates(variables))
    return [itself._get_current_learning_rate()] * len(variables)


def _give_back(optimizer: weakref.ref[Any], velocities: Mapping[Any, NDArray[np.float32]]) -> None:
    """Add velocities to the slots of SGD, which are their negatives."""
    itself = optimizer()
    factor = np.float32(passes_factor(itself._hvd_ext_reducer))
    with tf.init_scope():
        for variable, slot in zip(itself._trainable_variables, itself.momentums, strict=True):
            velocity = velocities.get(kinds.key(variable))
            if velocity is not None:
                slot.assign(slot - keras.ops.cast(factor * velocity, slot.dtype))


def _fits(optimizer: Any, options: GradientOptions) -> bool:
    return (
        isinstance(optimizer, keras.optimizers.SGD)
        and bool(optimizer.momentum)
        and not _clips(optimizer)
        and options.topk.selector != "random"
        and not _has_trained(optimizer)
    )


def _clips(optimizer: Any) -> bool:
    return any(limit is not None for limit in (optimizer.clipnorm, optimizer.clipvalue, optimizer.global_clipnorm))


def _has_trained(optimizer: Any) -> bool:
    return optimizer.built and all(bool(keras.ops.any(slot != 0)) for slot in optimizer.momentums)
