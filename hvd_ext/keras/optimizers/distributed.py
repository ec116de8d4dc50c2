"""What every wrapped Keras 3 optimizer is, and the swap of its class that makes it so."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from hvd_ext.errors import HvdExtError, InvalidError
from hvd_ext.keras.optimizers import accumulation, reduction, same_weights
from hvd_ext.options import compatibility
from hvd_ext.tensorflow.gradients import kinds
from hvd_ext.tensorflow.gradients.reducer import Reducer


class Distributed:
    """What `DistributedOptimizer` puts in front of the optimizer's class; `isinstance` tells a wrapped optimizer."""

    _hvd_ext_reducer: Reducer
    _hvd_ext_local_layers: tuple[Any, ...]

    def register_local_var(self, variable: Any) -> None:
        """Keep a variable's gradients on their rank: they are not reduced.

        By default they are divided by the number of ranks (`scale_local_gradients`), as those of the others are.

        Args:
            variable: a trainable variable of the model; ranks may have local variables of different shapes.

        Raises:
            InvalidError: the optimizer has a global_clipnorm.
        """
        self.check_local()
        self._hvd_ext_reducer.register_local_var(variable)

    def check_local(self) -> None:
        """Refuse local variables where the reduced gradients would be scaled by them.

        Raises:
            InvalidError: the optimizer has a global_clipnorm.
        """
        refuse_global_norm(self)

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, arguments = super().__reduce__()
        return getattr(self.__class__, rebuild.__name__), arguments  # of the plain class, which pickle finds


if TYPE_CHECKING:
    import keras

    class WrappedOptimizer(Distributed, keras.optimizers.Optimizer):
        """What a type checker sees of a wrapped optimizer; its class at run time is made by `class_of`."""


def refuse_global_norm(optimizer: Any) -> None:
    """Refuse an optimizer, or one inside of it, whose global norm would count local variables.

    Args:
        optimizer: wrapped or not.

    Raises:
        InvalidError: it has a global_clipnorm.
    """
    if getattr(getattr(optimizer, "inner_optimizer", optimizer), "global_clipnorm", None) is not None:
        raise InvalidError(compatibility.words("local variables", "global_clipnorm"))


class Reducing(Distributed):
    """The way of most optimizers: gradients are reduced in `_clip_gradients`, behind Keras' accumulation."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Apply one step's gradients, reduced over the ranks; see `keras.optimizers.Optimizer.apply`."""
        grads = list(grads)
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if not grads or (trainable_variables is None and len(grads) != len(variables)):
            super().apply(grads, trainable_variables)  # Keras does nothing, or says what is wrong
            return
        if self.built:
            self._check_variables_are_known(variables)
        reducer = self._hvd_ext_reducer
        with reducer.step(
            grads,
            variables,
            lambda: reduction.facts(self, reducer.label),
            # Keras adds dense ones up, and divides by a loss_scale_factor what can be divided
            dense=bool(self.gradient_accumulation_steps) or self.loss_scale_factor is not None,
            communicates=accumulation.communicates(self),
        ) as ready:
            super().apply(ready, variables)
            # with accumulation, an eager apply that is no update step rightly reduces nothing
            if not reducer.was_reduced and not self.gradient_accumulation_steps:
                raise HvdExtError(
                    f"optimizer {reducer.label!r}: its apply did not call _clip_gradients, where gradients are "
                    "reduced: they were applied without the other ranks; derive it from keras.optimizers.Optimizer and "
                    "leave apply to that class"
                )
        same_weights.check(reducer, self._iterations.value, variables, self.gradient_accumulation_steps or 1)

    def _clip_gradients(self, grads: Any) -> Any:
        reducer = self._hvd_ext_reducer
        factor = accumulation.factor(reducer.options)
        reduced = reducer.reduce_step(grads, self._iterations.value)
        return super()._clip_gradients([kinds.scaled(gradient, factor) for gradient in reduced])


@functools.cache
def class_of(plain: type, front: type[Distributed]) -> type:
    """Give the class of a wrapped optimizer.

    Keras writes `optimizer.__class__` into files: the property answers with the plain class, whatever name that is
    registered under. What is made from the class (`from_config`) is a plain optimizer too.

    Args:
        plain: the optimizer's own class.
        front: what stands in front of it.

    Returns:
        The same class for the same arguments.
    """
    return type(
        plain.__name__,
        (front, plain),
        {
            "__module__": plain.__module__,
            "__qualname__": plain.__qualname__,
            "__doc__": plain.__doc__,
            "__class__": property(lambda self: plain),
            "__new__": lambda cls, *args, **kwargs: plain(*args, **kwargs),
        },
    )
