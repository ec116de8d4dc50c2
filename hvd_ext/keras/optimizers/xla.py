"""Keras' training step in two halves that XLA compiles: XLA cannot communicate, so the reduction stands between them.

The first half is Keras' own step up to the optimizer's `apply`: forward pass, loss, backward pass, metrics. The second
is the update by the reduced gradients. All gradients are ready at once, so that no communication hides behind the
backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def divided(model: Any) -> Callable[[Any], Any]:
    """Divide a model's training step.

    Args:
        model: of Keras 3, with a wrapped optimizer and Keras' own step, which does nothing to the weights but
            `optimizer.apply`.

    Returns:
        A step that does the same, for a function that XLA does not compile. Metrics are computed before the update.
    """
    plain, optimizer, distribution = model.train_step, model.optimizer, model.optimizer._hvd_ext

    def gradients_of(data: Any) -> tuple[Any, list[Any]]:
        distribution.first_half = gradients = []
        try:
            return plain(data), gradients
        finally:
            distribution.first_half = None

    first = tf.function(gradients_of, jit_compile=True, reduce_retracing=True, autograph=False)

    def step(data: Any) -> Any:
        if not optimizer.built:
            # An optimizer that is not built scales the loss by a constant. Keras traces a step again once it is built.
            if not model.built:
                described = tf.nest.map_structure(lambda x: None if x is None else tf.type_spec_from_value(x), data)
                tf.function(gradients_of, autograph=False).get_concrete_function(described)
            if model.trainable_weights:
                with tf.init_scope():
                    optimizer.build(model.trainable_weights)
        logs, gradients = first(data)
        if gradients:
            distribution.compiles_update = True
            try:
                optimizer.apply(gradients, model.trainable_weights)
            finally:
                distribution.compiles_update = False
        return logs

    return step


def update(work: Callable[[list[Any]], None], gradients: Sequence[Any]) -> None:
    """Let XLA compile an update, unless a gradient is sparse, whose number of rows XLA would have to know."""
    if any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
        work(list(gradients))
        return

    @tf.function(jit_compile=True, autograph=False)
    def compiled(tensors: list[tf.Tensor]) -> None:
        present = iter(tensors)
        work([None if gradient is None else next(present) for gradient in gradients])

    compiled([gradient for gradient in gradients if gradient is not None])
