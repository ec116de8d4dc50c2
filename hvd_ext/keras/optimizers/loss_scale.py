"""Mixed precision in float16: a loss-scale optimizer whose ranks take or skip every step together.

Keras scales the loss, looks at the gradients, and skips the step and halves the scale where one of them is not finite.
Here the gradients are reduced before they are looked at: a value that is not finite on one rank is not finite in the
sum, so that all ranks see the same and decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvd_ext.errors import InvalidError
from hvd_ext.keras.optimizers import accumulation, reduction, same_weights
from hvd_ext.keras.optimizers.distributed import Distributed
from hvd_ext.tensorflow.gradients import kinds


class LossScaling(Distributed):
    """What `DistributedOptimizer` puts in front of the class of a `keras.optimizers.LossScaleOptimizer`."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Apply one step's gradients, reduced over the ranks; or skip the step, on all ranks."""
        grads = list(grads)
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if not grads or (trainable_variables is None and len(grads) != len(variables)):
            super().apply(grads, trainable_variables)
            return
        reducer = self._hvd_ext_reducer
        facts = lambda: reduction.facts(self, reducer.label)  # noqa: E731 - one word for one thing
        with reducer.step(grads, variables, facts, dense=True) as ready:
            present = [gradient for gradient in ready if gradient is not None]
            factor = accumulation.factor(reducer.options)
            scale: Any = None
            if reducer.options.topk is not None:
                # what waits on the ranks is in the gradients' own unit, whatever the scale will be
                scale = self._hvd_ext_scale(variables)
                present = [gradient / tf.cast(scale, gradient.dtype) for gradient in present]
            reduced = iter(reducer.reduce_step(_told(present, reducer.local_now), self._iterations.value))
            ready = [None if gradient is None else kinds.scaled(next(reduced), factor) for gradient in ready]
            if scale is not None:
                ready = [None if gradient is None else gradient * tf.cast(scale, gradient.dtype) for gradient in ready]
            super().apply(ready, variables)
        inner = self.inner_optimizer
        same_weights.check(reducer, inner._iterations.value, variables, inner.gradient_accumulation_steps or 1)

    def _hvd_ext_scale(self, variables: Sequence[Any]) -> tf.Tensor:
        if not self.built:
            with tf.init_scope():
                self.build(variables)
        return tf.convert_to_tensor(self.dynamic_scale)


def scaled(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Put a loss-scale optimizer around one where the global policy is mixed_float16, as `compile` would.

    Args:
        optimizer: to be wrapped by `DistributedOptimizer`.

    Returns:
        The same, or a new `keras.optimizers.LossScaleOptimizer` with it inside. An optimizer with a fixed
        loss_scale_factor is left as it is: give `compile` auto_scale_loss=False then.

    Raises:
        InvalidError: the optimizer inside of a loss-scale optimizer is wrapped already.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        if isinstance(optimizer.inner_optimizer, Distributed):
            raise InvalidError(
                f"optimizer {optimizer.name!r}: the optimizer inside of it is wrapped already, and it would be reduced "
                "twice; wrap the outer one only: "
                "hvd_ext.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"
            )
        return optimizer
    if keras.config.dtype_policy().name != "mixed_float16" or optimizer.loss_scale_factor is not None:
        return optimizer
    return keras.optimizers.LossScaleOptimizer(optimizer)


def _told(gradients: Sequence[tf.Tensor], local: Sequence[bool]) -> list[tf.Tensor]:
    """Make the first reduced gradient not finite where a local one is not: the others do not see that one."""
    told = list(gradients)
    if not any(local) or all(local):
        return told
    finite = [tf.reduce_all(tf.math.is_finite(gradient)) for gradient, own in zip(gradients, local, strict=True) if own]
    first = list(local).index(False)
    nothing = tf.where(tf.reduce_all(finite), 0.0, float("nan"))
    told[first] = gradients[first] + tf.cast(nothing, gradients[first].dtype)
    return told
