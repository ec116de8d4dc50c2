"""Optimizers whose gradients are sent in part: what becomes of their momentum, and steps that all ranks leave out."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvd_ext.compression.momentum import Momentum
from hvd_ext.errors import InvalidError
from hvd_ext.job import process_sets
from hvd_ext.keras.optimizers import reduction, same_weights
from hvd_ext.keras.optimizers.distributed import Reducing
from hvd_ext.options.gradients import GradientOptions
from hvd_ext.tensorflow.gradients import kinds
from hvd_ext.tensorflow.gradients.reducer import Reducer
from hvd_ext.tensorflow.topk import feedback


def momentum_of(optimizer: Any, options: GradientOptions) -> Momentum | None:
    """Give the momentum that is taken over from an optimizer.

    Args:
        optimizer: of Keras 3, without a loss-scale optimizer around it.
        options: momentum_correction of its `TopK` counts.

    Returns:
        None where none is asked for, or, with "auto", where there is none that could be taken over.

    Raises:
        InvalidError: the optimizer has none that could be taken over.
    """
    if options.topk is None or not options.topk.momentum_correction:
        return None
    if options.topk.momentum_correction == "auto" and not _fits(optimizer, options):
        return None
    if not isinstance(optimizer, keras.optimizers.SGD):
        raise InvalidError(
            f"TopK, momentum_correction (True): it takes over the momentum of keras.optimizers.SGD; {optimizer.name!r} "
            f"is {type(optimizer).__name__}, whose step is not a sum of gradients; leave momentum_correction out, or "
            "take keras.optimizers.SGD(momentum=0.9)"
        )
    if not optimizer.momentum:
        raise InvalidError(
            f"TopK, momentum_correction (True): optimizer {optimizer.name!r} has momentum 0, there is nothing to take "
            "over; leave momentum_correction out, or give the optimizer a momentum"
        )
    if _clips(optimizer):
        raise InvalidError(
            f"TopK, momentum_correction (True): optimizer {optimizer.name!r} has a clipnorm, clipvalue or "
            "global_clipnorm, which would look at gradients that have gone through its momentum and its learning rate; "
            "take TopK(clip=...) in its place, or leave momentum_correction out"
        )
    if _has_trained(optimizer):
        raise InvalidError(
            f"TopK, momentum_correction (True): optimizer {optimizer.name!r} has trained without it, and its momentum "
            "would stop at once; wrap an optimizer before its first step, or leave momentum_correction out"
        )
    rate = functools.partial(_rate_of, weakref.ref(optimizer))
    return Momentum(float(optimizer.momentum), bool(optimizer.nesterov), rate)


def _rate_of(optimizer: weakref.ref[Any]) -> Any:
    """Give the learning rate of the step under way; who asks outlives the optimizer, and must not hold it."""
    return optimizer()._get_current_learning_rate()


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


class Corrected:
    """An optimizer whose gradients have gone through its momentum before they reach it."""

    _hvd_ext_reducer: Reducer
    # keys of variables: whose gradients have gone through it in some step, and whose slots some step has read
    _hvd_ext_through: frozenset[Any] = frozenset()
    _hvd_ext_read: frozenset[Any] = frozenset()

    def end_momentum(self) -> None:
        """Set the slots that no step reads to zero; rank 0 says so where there was a momentum in them.

        What an earlier job without the correction has left there stops. It must not come back either, in a job that
        goes on from this one's file without the correction.
        """
        unread = self._hvd_ext_through - self._hvd_ext_read
        if not unread:  # there may be no slots
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

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update a variable; with momentum 0 and rate 1 where the gradient has gone through them already."""
        through, key = self._hvd_ext_reducer.through_momentum, kinds.key(variable)
        if key not in through:
            object.__setattr__(self, "_hvd_ext_read", self._hvd_ext_read | {key})
            super().update_step(gradient, variable, learning_rate)
            return
        if not through <= self._hvd_ext_through:
            object.__setattr__(self, "_hvd_ext_through", self._hvd_ext_through | through)
            self.end_momentum()
        # in Python, while a step is traced: configuration and files keep the user's value
        momentum = self.momentum
        object.__setattr__(self, "momentum", 0.0)
        try:
            super().update_step(gradient, variable, 1.0)
        finally:
            object.__setattr__(self, "momentum", momentum)


class Inner(Corrected):
    """What stands in front of the class of an optimizer inside of a loss-scale optimizer."""

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, arguments = super().__reduce__()
        return getattr(self.__class__, rebuild.__name__), arguments  # of the plain class, which pickle finds


class InPart(Corrected, Reducing):
    """The way of optimizers with a `TopK`: a step whose gradients are not all finite is left out, on all ranks.

    Without accumulation the gradients are reduced in front of Keras' apply, so that such a step leaves no trace. With
    it they are reduced where Keras updates: then the passes of such a step are dropped, and counted.
    """

    _hvd_ext_finite: Any = True

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Apply one step's gradients, reduced over the ranks; or leave the step out, on all ranks."""
        grads = list(grads)
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        known = grads and (trainable_variables is not None or len(grads) == len(variables))
        if not known or self.gradient_accumulation_steps:
            super().apply(grads, trainable_variables)
            return
        if self.built:
            self._check_variables_are_known(variables)
        else:
            with tf.init_scope():
                self.build(variables)
        reducer, scale = self._hvd_ext_reducer, self.loss_scale_factor
        # slices cannot be divided by a scale
        facts = lambda: reduction.facts(self, reducer.label)  # noqa: E731 - one word for one thing
        with reducer.step(grads, variables, facts, dense=scale is not None) as ready:
            # what waits on the ranks is in the gradients' own unit
            present = _times([one for one in ready if one is not None], None if scale is None else 1 / scale)
            reduced = iter(reducer.reduce_step(present, self._iterations.value))
            given = [None if gradient is None else next(reduced) for gradient in ready]
            plain = super(Reducing, self).apply
            only_if(reducer.finite, lambda: plain(_times(given, scale), variables))
        same_weights.check(reducer, self._iterations.value, variables)

    def _clip_gradients(self, grads: Any) -> Any:
        if self._hvd_ext_reducer.was_reduced:
            return super(Reducing, self)._clip_gradients(grads)
        clipped = super()._clip_gradients(grads)
        object.__setattr__(self, "_hvd_ext_finite", self._hvd_ext_reducer.finite)
        return clipped

    def _apply_weight_decay(self, variables: Any) -> None:
        plain = super()._apply_weight_decay
        self._unless_left_out(lambda: plain(variables))

    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        plain = super()._backend_update_step
        self._unless_left_out(lambda: plain(grads, trainable_variables, learning_rate))

    def _unless_left_out(self, work: Callable[[], None]) -> None:
        if self.gradient_accumulation_steps:
            only_if(self._hvd_ext_finite, work)
        else:
            work()


def only_if(condition: Any, work: Callable[[], None]) -> None:
    """Do something where a condition holds; eager, or in the graph that is being traced.

    Args:
        condition: a boolean tensor.
        work: assigns variables.
    """
    if tf.executing_eagerly():
        if bool(condition):
            work()
        return

    def worked() -> tf.Tensor:
        work()
        return tf.constant(True)

    tf.cond(condition, worked, lambda: tf.constant(False))


def _times(gradients: list[Any], factor: float | None) -> list[Any]:
    if factor is None:
        return gradients
    return [None if gradient is None else kinds.scaled(gradient, factor) for gradient in gradients]
