"""Several backward passes for one update: Horovod's backward_passes_per_step on Keras' own gradient accumulation.

Keras adds gradients up in the optimizer's accumulators and updates at every N-th apply; only then the ranks
communicate. The accumulators are variables of the optimizer, so they are saved with it.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvd_ext.errors import InvalidError
from hvd_ext.options.gradients import GradientOptions


def prepare(optimizer: keras.optimizers.Optimizer, options: GradientOptions) -> None:
    """Set an optimizer's gradient_accumulation_steps to the options' backward_passes_per_step.

    Args:
        optimizer: the one that has the accumulators.
        options: backward_passes_per_step counts; 1 leaves the optimizer as it is.

    Raises:
        InvalidError: the optimizer has another number already, or its variables are there without accumulators.
    """
    passes, own = options.backward_passes_per_step, optimizer.gradient_accumulation_steps
    if passes == 1 or own == passes:
        return
    if own:
        raise InvalidError(
            f"backward_passes_per_step ({passes}): optimizer {optimizer.name!r} has gradient_accumulation_steps={own}, "
            "which says the same; give one of the two"
        )
    if optimizer.built:
        raise InvalidError(
            f"backward_passes_per_step ({passes}): optimizer {optimizer.name!r} has its variables already, and there "
            f"are no accumulators among them; create it with gradient_accumulation_steps={passes}, or wrap it before "
            "its first step"
        )
    optimizer.gradient_accumulation_steps = passes


def factor(options: GradientOptions) -> int:
    """Give what makes Keras' average over the passes what the options ask for.

    Args:
        options: backward_passes_per_step and average_aggregated_gradients count.

    Returns:
        The number of passes where Horovod's sum is wanted, else 1.
    """
    return 1 if options.average_aggregated_gradients else options.backward_passes_per_step


def communicates(optimizer: keras.optimizers.Optimizer) -> bool:
    """Tell whether the coming apply is an update step; a graph decides that when it runs.

    Args:
        optimizer: the one that has the accumulators.
    """
    steps: Any = optimizer.gradient_accumulation_steps
    return not steps or not tf.executing_eagerly() or (int(optimizer._iterations) + 1) % steps == 0
