"""The momentum that `TopK` takes over from an optimizer: whose it may be, and an optimizer that has given it away.

It is a class of its own beside the wrapper, because it also stands in front of the optimizer inside of a loss-scale
optimizer, which reduces nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_ext.compression.momentum import Momentum
from hvd_ext.errors import InvalidError
from hvd_ext.job import process_sets
from hvd_ext.keras.optimizers.lars import LARS
from hvd_ext.keras.optimizers.wrapper import KerasDistribution, OptimizerMixin, passes_factor
from hvd_ext.options.gradients import GradientOptions
from hvd_ext.tensorflow import norms, ops
from hvd_ext.tensorflow.gradients import kinds
from hvd_ext.tensorflow.topk import feedback

_NORMS = "gradient norms"  # the name of what is saved

# whose momentum is taken over with momentum_correction="auto"
BY_DEFAULT: tuple[type, ...] = (keras.optimizers.SGD,)


def momentum_of(optimizer: Any, options: GradientOptions) -> Momentum | None:
    """Give the momentum that `TopK` takes over from an optimizer.

    Args:
        optimizer: of Keras 3, without a loss-scale optimizer around it.
        options: momentum_correction of its `TopK` decides.

    Returns:
        None where none is asked for, or, with "auto", where there is none that should be taken over.

    Raises:
        InvalidError: momentum_correction is True, and the optimizer has no momentum that could be taken over.
    """
    codec = options.codec
    if codec is None or not codec.momentum_correction or options.local_steps is not None:
        return None
    hindrance = _hindrance(optimizer)
    if codec.momentum_correction == "auto":
        if hindrance or codec.selector == "random" or not isinstance(optimizer, BY_DEFAULT):
            return None
    elif hindrance:
        raise InvalidError(f"TopK, momentum_correction (True): {hindrance}, or leave momentum_correction out")
    nesterov = bool(optimizer.nesterov)
    # a weak reference: the reducer, which asks, must not keep the optimizer alive
    if isinstance(optimizer, LARS):
        # a variable or a schedule, which each step reads: ranks may have unequal ones until a broadcast, or 0 at first
        return OfLARS(0.0, nesterov, weakref.ref(optimizer))
    return OfSGD(float(optimizer.momentum), nesterov, weakref.ref(optimizer))


def _hindrance(optimizer: Any) -> str:
    """Say why the momentum of an optimizer cannot be taken over, and what to do; "" if it can."""
    name = f"optimizer {optimizer.name!r}"
    if not isinstance(optimizer, (keras.optimizers.SGD, LARS)):
        return (
            f"it takes over the momentum of keras.optimizers.SGD and hvd_ext.optimizers.LARS; {optimizer.name!r} is "
            f"{type(optimizer).__name__}, whose step is not a sum of gradients; use one of these with a momentum"
        )
    if isinstance(optimizer, LARS) and not optimizer.rate_in_momentum:
        return (
            f"{name} has rate_in_momentum=False, and what is sent late must have the rates of its own steps in it; "
            "use rate_in_momentum=True"
        )
    if isinstance(optimizer, keras.optimizers.SGD) and not optimizer.momentum:  # that of LARS may be another later
        return f"{name} has momentum 0, so there is none to take over; give the optimizer a momentum"
    if any(limit is not None for limit in (optimizer.clipnorm, optimizer.clipvalue, optimizer.global_clipnorm)):
        return (
            f"{name} has a clipnorm, clipvalue or global_clipnorm, which would act after its momentum and its learning "
            "rate; use TopK(clip=...) instead"
        )
    # one slot is enough: those of a layer that is frozen or dead stay 0
    if optimizer.built and any(bool(keras.ops.any(slot != 0)) for slot in optimizer.momentums):
        return f"{name} has trained without it, and its momentum would be lost; wrap an optimizer before its first step"
    return ""


@dataclasses.dataclass(frozen=True)
class OfSGD(Momentum):
    """The momentum of `keras.optimizers.SGD`.

    The optimizer may have a method `momentum_rates(variables)`, which returns the learning rate of the step under way
    for each variable, a number or a scalar tensor, equal on all ranks; else all have the optimizer's.
    """

    optimizer: weakref.ref[Any] = dataclasses.field(compare=False, repr=False)
    _sign: ClassVar[int] = -1  # the slots of SGD are the negatives of velocities

    def rates(self, variables: Sequence[Any]) -> list[Any]:
        """Give the learning rate of the step under way for each variable."""
        optimizer = self.optimizer()
        if hasattr(optimizer, "momentum_rates"):
            return list(optimizer.momentum_rates(variables))
        return [optimizer._get_current_learning_rate()] * len(variables)

    def give_back(self, velocities: Mapping[Any, NDArray[np.float32]]) -> None:
        """Add velocities to the optimizer's slots."""
        optimizer = self.optimizer()
        factor = np.float32(self._sign * passes_factor(optimizer._hvd_ext.reducer))
        with tf.init_scope():
            for variable, slot in zip(optimizer._trainable_variables, optimizer.momentums, strict=True):
                velocity = velocities.get(kinds.key(variable))
                if velocity is not None:
                    slot.assign(slot + keras.ops.cast(factor * velocity, slot.dtype))


@dataclasses.dataclass(frozen=True)
class OfLARS(OfSGD):
    """The momentum of `hvd_ext.optimizers.LARS`, whose rates follow from the gradients' norms of the step before.

    What goes through a rank's momentum is selected before the ranks' gradients are added up. So no rank has the sum
    whose norm the trust ratio needs. The ranks add up sketches of their gradients (`norms.sketches`) instead, while
    the step is under way, and the next step uses their norms.
    """

    _sign: ClassVar[int] = 1

    @property
    def measures(self) -> bool:
        """Yes: the norms of gradients."""
        return True

    def now(self) -> tf.Tensor:
        """Give the momentum of the step under way, which may be a schedule, or set between steps."""
        return tf.cast(tf.convert_to_tensor(self.optimizer().momentum), tf.float32)

    def rates(self, variables: Sequence[Any]) -> list[Any]:
        """Give the learning rate times the trust ratio for each variable."""
        if not variables:
            return []
        optimizer = self.optimizer()
        before = tf.gather(self._norms.read_value(), optimizer._places(variables))
        return tf.unstack(tf.cast(optimizer._rates_after(variables, before), tf.float32))

    def decays(self, variables: Sequence[Any]) -> list[float]:
        """Give the weight decays, on the scale of reduced gradients."""
        optimizer = self.optimizer()
        factor = passes_factor(optimizer._hvd_ext.reducer)
        return [float(decay) / factor for decay in optimizer._decays(optimizer._places(variables))]

    def measured(self, variables: Sequence[Any], gradients: Sequence[Any], reduced: Callable[[Any], Any]) -> tf.Tensor:
        """Give the norms of the reduced gradients; 0 for variables without a trust ratio."""
        optimizer, zeros = self.optimizer(), tf.zeros(len(variables), tf.float64)
        trusted = [i for i, place in enumerate(optimizer._places(variables)) if optimizer._has_trust[place]]
        if not trusted:
            return zeros
        tensors = [tf.reshape(gradients[i], variables[i].shape) for i in trusted]  # a graph may not know their shapes
        sums = tf.cast(reduced(norms.sketches(tensors)), tf.float64)
        lengths = tf.norm(sums, axis=1) * float(passes_factor(optimizer._hvd_ext.reducer))
        return tf.tensor_scatter_nd_update(zeros, [[i] for i in trusted], lengths)

    def keep(self, variables: Sequence[Any], measured: tf.Tensor, ok: tf.Tensor) -> None:
        """Keep the norms for the next step."""
        places = tf.constant(self.optimizer()._places(variables), tf.int32)[:, tf.newaxis]
        before = self._norms.read_value()
        after = tf.tensor_scatter_nd_update(before, places, measured)
        self._norms.assign(tf.where(ok, after, before), read_value=False)

    def save(self, keys: Sequence[Any]) -> dict[str, NDArray[Any]]:
        """Copy the norms of the gradients of these variables."""
        return {_NORMS: self._norms.numpy()[self._places(keys)]}

    def load(self, keys: Sequence[Any], saved: Mapping[str, NDArray[Any]]) -> None:
        """Restore the norms."""
        if _NORMS in saved:
            kept = self._norms.numpy()
            kept[self._places(keys)] = saved[_NORMS]
            self._norms.assign(kept)

    @functools.cached_property
    def _norms(self) -> tf.Variable:
        with tf.init_scope(), tf.device("CPU:0"):
            count = len(self.optimizer()._trainable_variables)
            return tf.Variable(tf.zeros(count, tf.float64), trainable=False, name="hvd_ext_topk_gradient_norms")

    def _places(self, keys: Sequence[Any]) -> list[int]:
        place_of = {kinds.key(variable): place for place, variable in enumerate(self.optimizer()._trainable_variables)}
        return [place_of[key] for key in keys]


class MomentumTaken(OptimizerMixin):
    """An optimizer whose gradients have gone through its momentum and its rates before they reach it."""

    _hvd_ext: KerasDistribution

    def end_momentum(self) -> None:
        """Set the slots that no step reads to zero; rank 0 warns where there was a momentum in them.

        A momentum that an earlier job without the correction has left there ends. Were it kept, it would come back in a
        job without the correction that goes on from this one's file. The slots stay if the optimizer has its momentum
        back (`TopK(until=...)`).
        """
        distribution = self._hvd_ext
        unread = distribution.moved - distribution.used
        if not unread or any(channel.is_whole for channel in distribution.reducer.channels):  # or there are no slots
            return
        with tf.init_scope():
            ended = [
                slot
                for variable, slot in zip(self._trainable_variables, self.momentums, strict=True)
                if kinds.key(variable) in unread and bool(keras.ops.any(slot != 0))
            ]
            for slot in ended:
                slot.assign(keras.ops.zeros_like(slot))
        job = process_sets.runtime_of(distribution.reducer.options.process_set)
        if ended and job is not None and job.engine.rank == 0:
            feedback.tell_of_momentum(distribution.reducer.label, "without")

    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        """Update variables; a gradient that has gone through momentum and rate is what the weights change by."""
        plain = super()._backend_update_step
        distribution, step = self._hvd_ext, self._hvd_ext.step
        through, sends_whole = (frozenset(), None) if step is None else (step.through_momentum, step.whole)
        pairs = [
            (kinds.key(variable), gradient, variable)
            for gradient, variable in zip(grads, trainable_variables, strict=True)
        ]

        def update() -> None:
            moved = [(gradient, variable) for key, gradient, variable in pairs if key in through]
            plain_pairs = [(gradient, variable) for key, gradient, variable in pairs if key not in through]
            read = {key for key, *_ in pairs if key not in through}
            distribution.used |= read
            if not through <= distribution.moved:
                distribution.moved |= through
                self.end_momentum()
            for gradient, variable in moved:
                self.assign_sub(variable, keras.ops.cast(gradient, variable.dtype))
            if plain_pairs:
                plain(*zip(*plain_pairs, strict=True), learning_rate)

        if sends_whole is None:
            update()
        else:
            ops.only_if(sends_whole, lambda: plain(grads, trainable_variables, learning_rate), update)
