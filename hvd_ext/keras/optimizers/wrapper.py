"""The wrapper of Keras 3's optimizers: the class that `DistributedOptimizer` puts in front of an optimizer's own class.

Keras 3 calls `apply` -> `_backend_apply_gradients` (gradient accumulation) -> `_clip_gradients` -> the update step. The
wrapper reduces the gradients at one of two places:

- Most optimizers reduce in `_clip_gradients`. Passes that only accumulate do not communicate, and a global norm is that
  of the reduced gradient.
- A loss-scale optimizer, and an optimizer with `TopK` or a delay that does not accumulate, reduce in front of Keras'
  `apply`: all ranks must take or skip the step together, and a skipped step must leave no trace. A value that is not
  finite on one rank is not finite in the reduced gradient, so all ranks see the same and decide alike.
- An optimizer that does not accumulate, and whose update XLA compiles (`xla`), reduces in front of Keras' `apply`, too.

With gradient accumulation the reduction is in `_clip_gradients`, and what is skipped there is the update: the
accumulated passes are dropped, and counted.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from hvd_ext.errors import HvdExtError, InvalidError
from hvd_ext.keras.optimizers import checks, xla
from hvd_ext.keras.optimizers.layerwise import Layerwise
from hvd_ext.options import compatibility
from hvd_ext.tensorflow import ops
from hvd_ext.tensorflow.gradients import kinds
from hvd_ext.tensorflow.gradients.reducer import Distribution, Reducer
from hvd_ext.tensorflow.gradients.step import Step
from hvd_ext.tensorflow.sharing import Trial
from hvd_ext.tensorflow.skipping import Skipping


@dataclasses.dataclass(eq=False)
class KerasDistribution(Distribution):
    """What a wrapped optimizer of Keras 3 has of ours.

    Args:
        first_half: in the first half of a step that is divided for XLA (`xla.divided`): takes the gradients.
        compiles_update: whether XLA compiles the update by reduced gradients, the second half of such a step.
        trial: which way to compute the norms of LARS and LAMB is faster, while that is tried out.
        moved: keys of variables whose gradients have gone through momentum correction in some step.
        used: keys of variables whose slots of momentum some step has read.
    """

    skipping: Skipping | None = None
    first_half: list[Any] | None = None
    compiles_update: bool = False
    trial: Trial | None = None
    moved: frozenset[Any] = frozenset()
    used: frozenset[Any] = frozenset()


class OptimizerMixin:
    """A class that `class_of` puts in front of an optimizer's own: a pickled optimizer is a plain one."""

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, arguments = super().__reduce__()
        return getattr(self.__class__, rebuild.__name__), arguments  # of the plain class, which pickle finds


class Distributed(OptimizerMixin):
    """An optimizer of Keras 3 or Keras 2 that reduces its gradients; `isinstance` tells a wrapped optimizer."""

    _hvd_ext: Distribution

    def register_local_var(self, variable: Any) -> None:
        """Keep the gradients of a variable on this rank: they are not reduced.

        By default they are divided by the number of ranks (`scale_local_gradients`), as an average is.

        Args:
            variable: a trainable variable of the model; ranks may have local variables of different shapes.

        Raises:
            InvalidError: the optimizer has a global_clipnorm.
        """
        self.check_local()
        self._hvd_ext.reducer.register_local_var(variable)

    def check_local(self) -> None:
        """Raise `InvalidError` if local variables would change the reduced gradients (global_clipnorm)."""
        refuse_global_norm(self)


if TYPE_CHECKING:

    class WrappedOptimizer(Distributed, keras.optimizers.Optimizer):
        """What a type checker sees of a wrapped optimizer; its class at run time is made by `class_of`."""


class Wrapper(Distributed):
    """An optimizer of Keras 3 that reduces its gradients, whole or with `TopK`, with or without a loss scale."""

    _hvd_ext: KerasDistribution

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Reduce one step's gradients over the ranks and apply them; see `keras.optimizers.Optimizer.apply`.

        With `TopK` or a loss scale all ranks skip a step in which a gradient of any rank is not finite; with a delay,
        the first step.
        """
        grads = list(grads)
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if self._hvd_ext.first_half is not None:
            self._hvd_ext.first_half += grads
            return
        if not grads or (trainable_variables is None and len(grads) != len(variables)):
            super().apply(grads, trainable_variables)  # Keras does nothing, or says what is wrong
            return
        self._take_step(grads, variables)

    def apply_absent(self, variables: Sequence[Any]) -> None:
        """Take a step without gradients of this rank, whose result is there already; eager only."""
        zeros = [tf.zeros(tuple(variable.shape), kinds.dtype(variable)) for variable in variables]
        self._take_step(zeros, list(variables), absent=True)

    def _settings(self, variables: Sequence[Any]) -> dict[str, Any]:
        """Give what the ranks compare before a first step."""
        settings = {**checks.settings(self), "jit_compile": self._hvd_ext.compiles_update}
        inner = getattr(self, "inner_optimizer", self)
        return settings | ({"norms": inner._place_of_norms(variables)} if isinstance(inner, Layerwise) else {})

    def _take_step(self, grads: list[Any], variables: list[Any], *, absent: bool = False) -> None:
        plain = super().apply
        scaling, first, reducer = _scales_loss(self), _reduces_first(self), self._hvd_ext.reducer
        if not self.built and first and reducer.policy.keeps:
            with tf.init_scope():
                self.build(variables)
        elif self.built and not scaling:
            self._check_variables_are_known(variables)
        begun = reducer.begin(
            grads,
            variables,
            lambda: self._settings(variables),
            refuse=lambda: refuse_around(self, reducer.label),
            # slices can be neither accumulated nor divided by a loss scale
            dense=scaling or bool(self.gradient_accumulation_steps) or self.loss_scale_factor is not None,
            communicates=scaling or _is_update_step(self),
            absent=absent,
        )
        with self._hvd_ext.within(begun) as step:
            before = tf.identity(updates(self)._iterations.value) if scaling else None
            if first:
                reduced, scale = _reduced_first(self, step)
                update = functools.partial(_update, self, plain, variables, reduced, scale)
                # with a loss scale Keras looks whether the gradients are finite
                if step.applies is not None and (reducer.options.delay or not scaling):
                    ops.only_if(step.applies, update)
                else:
                    update()
            else:
                plain(step.gradients, variables)
                # with accumulation, an eager apply that is no update step rightly reduces nothing
                if not step.is_reduced and not self.gradient_accumulation_steps:
                    raise HvdExtError(
                        f"optimizer {reducer.label!r}: its apply did not call _clip_gradients, which reduces the "
                        "gradients, so only those of this rank were applied; derive it from "
                        "keras.optimizers.Optimizer and leave apply to that class"
                    )
            updating = updates(self)
            passes = updating.gradient_accumulation_steps or 1
            step.updated(passes)
            if self._hvd_ext.skipping is not None:
                self._hvd_ext.skipping.count(
                    tf.not_equal(updating._iterations.value, before), tf.convert_to_tensor(self.dynamic_scale) > 1
                )
            if reducer.options.check_every:
                checks.same_weights(reducer, step, updating._iterations.value, variables, passes)

    def _clip_gradients(self, grads: Any) -> Any:
        if _reduces_first(self):
            return super()._clip_gradients(grads)
        step, reducer = self._hvd_ext.step, self._hvd_ext.reducer
        if step is None:
            raise HvdExtError(f"{reducer.label}: its gradients were asked for outside of a step; call apply")
        reduced = step.reduce(grads, self._iterations.value)
        return super()._clip_gradients([kinds.scaled(gradient, passes_factor(reducer)) for gradient in reduced])

    def _apply_weight_decay(self, variables: Any) -> None:
        plain = super()._apply_weight_decay
        _unless_skipped(self, lambda: plain(variables))

    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        plain = super()._backend_update_step
        _unless_skipped(self, lambda: plain(grads, trainable_variables, learning_rate))


class MomentumInside(OptimizerMixin):
    """A loss-scale optimizer whose momentum is that of the optimizer inside of it, as Keras has it with the rate."""

    @property
    def momentum(self) -> Any:
        """The momentum of the optimizer inside, if that has one."""
        return updates(self).momentum

    @momentum.setter
    def momentum(self, value: Any) -> None:
        """Set the momentum of the optimizer inside."""
        updates(self).momentum = value


@functools.cache
def class_of(plain: type, *fronts: type[OptimizerMixin]) -> type:
    """Make the class of a wrapped optimizer.

    Keras writes `optimizer.__class__` into files: the property answers with the plain class, whatever name that is
    registered under. What is made from the class (`from_config`) is a plain optimizer too.
    """
    return type(
        plain.__name__,
        (*fronts, plain),
        {
            "__module__": plain.__module__,
            "__qualname__": plain.__qualname__,
            "__doc__": plain.__doc__,
            "__class__": property(lambda self: plain),
            "__new__": lambda cls, *args, **kwargs: plain(*args, **kwargs),
        },
    )


def put_in_front(optimizer: Any, distribution: Distribution, *fronts: type[OptimizerMixin]) -> None:
    """Put classes in front of an optimizer's own, in place; without any it keeps its class."""
    # past the __setattr__ of Keras, which tracks what it is given
    object.__setattr__(optimizer, "_hvd_ext", distribution)
    if fronts:
        object.__setattr__(optimizer, "__class__", class_of(type(optimizer), *fronts))


def updates(optimizer: Any) -> Any:
    """Give the optimizer that updates the variables, in Keras 3: the inner one of a loss-scale optimizer, or itself."""
    return optimizer.inner_optimizer if _scales_loss(optimizer) else optimizer


def refuse_global_norm(optimizer: Any) -> None:
    """Raise `InvalidError` if an optimizer, or the one inside of it, has a global_clipnorm, which counts local ones."""
    if getattr(getattr(optimizer, "inner_optimizer", optimizer), "global_clipnorm", None) is not None:
        raise InvalidError(compatibility.words("local variables", "global_clipnorm"))


def refuse_around(optimizer: Any, label: str) -> None:
    """Raise `InvalidError` if a step runs inside a distribution strategy, or a loss-scale optimizer that is plain."""
    if tf.distribute.has_strategy():
        raise InvalidError(
            f"optimizer {label!r}: it cannot run inside a tf.distribute strategy as well; leave the strategy out and "
            "start one process per device"
        )
    # compile() wraps the optimizer under a mixed_float16 policy and leaves no mark on it: only the callers know
    module = keras.optimizers.LossScaleOptimizer.__module__
    for frame, _ in traceback.walk_stack(None):
        # reading f_locals keeps a frame's locals alive, so only Keras' own frames are looked into
        caller = frame.f_locals.get("self") if frame.f_globals.get("__name__") == module else None
        if getattr(caller, "inner_optimizer", None) is optimizer:
            raise InvalidError(
                f"optimizer {label!r}: it is inside a LossScaleOptimizer (policy mixed_float16) that decides on each "
                "rank alone whether a step is taken, so that ranks would wait for ever; wrap the outer one: "
                "hvd_ext.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)), and give that to "
                "compile()"
            )


def _scales_loss(optimizer: Any) -> bool:
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def _reduces_first(optimizer: Any) -> bool:
    """Whether the gradients are reduced in front of Keras' `apply`; else `_clip_gradients` reduces them."""
    at_once = optimizer._hvd_ext.reducer.policy.may_skip or optimizer._hvd_ext.compiles_update
    return _scales_loss(optimizer) or (at_once and not optimizer.gradient_accumulation_steps)


def _is_update_step(optimizer: Any) -> bool:
    """Whether the coming apply updates the variables; a graph decides that when it runs."""
    steps: Any = optimizer.gradient_accumulation_steps
    return not steps or not tf.executing_eagerly() or (int(optimizer._iterations) + 1) % steps == 0


def passes_factor(reducer: Reducer) -> int:
    """What Keras' average over accumulated passes is multiplied by: the number of passes gives Horovod's sum."""
    return 1 if reducer.options.average_aggregated_gradients else reducer.options.backward_passes_per_step


def _reduced_first(optimizer: Any, step: Step) -> tuple[list[Any], Any]:
    """Reduce the gradients of a step in front of Keras' `apply`.

    Where something of them may be applied later, they are divided by the loss scale first: residuals and what is held
    are in the gradients' own unit, whatever the scale will be in that step. A fixed scale never travels: nothing
    would skip a step in which it is too large for the wire.

    Returns:
        The reduced gradients, and the scale that they must be multiplied by again, or None.
    """
    reducer = optimizer._hvd_ext.reducer
    present = [slot.gradient for slot in step.present]
    scale: Any = None
    scaling = _scales_loss(optimizer)
    if reducer.policy.keeps or not scaling:
        scale = tf.convert_to_tensor(optimizer.dynamic_scale) if scaling else optimizer.loss_scale_factor
        present = [_divided(gradient, scale) for gradient in present]
    if scaling:
        present = _propagate_nonfinite(present, step.local)
    reduced = iter(step.reduce(present, optimizer._iterations.value))
    factor = passes_factor(reducer)
    return [None if gradient is None else kinds.scaled(next(reduced), factor) for gradient in step.gradients], scale


def _update(optimizer: Any, plain: Any, variables: list[Any], reduced: Sequence[Any], scale: Any) -> None:
    """Apply reduced gradients, multiplied by their scale, by Keras' `apply`.

    XLA compiles the update if it compiles the step, but not that of LARS and LAMB where it is nothing but ops of our
    own.
    """
    gradients = [_multiplied(gradient, scale) for gradient in reduced]
    if optimizer._hvd_ext.compiles_update and not _updates_by_ops(optimizer, variables):
        xla.update(lambda tensors: plain(tensors, variables), gradients)
    else:
        plain(gradients, variables)


def _updates_by_ops(optimizer: Any, variables: list[Any]) -> bool:
    """Whether an update is a few ops, and no operations of Keras for each variable, as clipping and loss scales are."""
    if not isinstance(optimizer, Layerwise) or optimizer._device_of_update(variables) is None:
        return False
    limits = optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue, optimizer.loss_scale_factor
    return not optimizer.use_ema and not optimizer.gradient_accumulation_steps and limits == (None,) * len(limits)


def _divided(gradient: Any, scale: Any) -> Any:
    if isinstance(scale, tf.Tensor):
        return gradient / tf.cast(scale, gradient.dtype)
    return gradient if scale is None else kinds.scaled(gradient, 1 / scale)


def _multiplied(gradient: Any, scale: Any) -> Any:
    if gradient is None or scale is None:
        return gradient
    return gradient * tf.cast(scale, gradient.dtype) if isinstance(scale, tf.Tensor) else kinds.scaled(gradient, scale)


def _propagate_nonfinite(gradients: Sequence[tf.Tensor], local: Sequence[bool]) -> list[tf.Tensor]:
    """Make the first reduced gradient not finite where a local one is not: the other ranks do not see that one."""
    propagated = list(gradients)
    if not any(local) or all(local):
        return propagated
    finite = [tf.reduce_all(tf.math.is_finite(gradient)) for gradient in itertools.compress(gradients, local)]
    first = list(local).index(False)
    nothing = tf.where(tf.reduce_all(finite), 0.0, float("nan"))
    propagated[first] = gradients[first] + tf.cast(nothing, gradients[first].dtype)
    return propagated


def _unless_skipped(optimizer: Any, work: Callable[[], None]) -> None:
    """Do a part of an update step; with accumulation, in a step that may be skipped, only if it applies."""
    step = optimizer._hvd_ext.step
    if step is not None and step.applies is not None and optimizer.gradient_accumulation_steps:
        ops.only_if(step.applies, work)
    else:
        work()
