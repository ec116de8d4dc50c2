"""Momentum correction: what is done to a step's gradients before they go through the momentum on the shards."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvd_ext.compression.momentum import Momentum
from hvd_ext.options import Compression, Sum
from hvd_ext.options.gradients import GradientOptions
from hvd_ext.tensorflow.collectives import single

if TYPE_CHECKING:
    from hvd_ext.job.runtime import Runtime


@dataclasses.dataclass(frozen=True)
class Corrected:
    """Gradients that go through a momentum, with decays, times rates; and what it has measured, or None."""

    momentum: Momentum
    variables: Sequence[Any]
    gradients: list[Any]
    rates: list[tf.Tensor]
    measured: Any

    def end(self, ok: tf.Tensor) -> None:
        """Have the momentum keep what it has measured, if the step is applied."""
        if self.measured is not None:
            self.momentum.keep(self.variables, self.measured, ok)


def corrected(
    momentum: Momentum,
    variables: Sequence[Any],
    gradients: Sequence[Any],
    whole: tf.Tensor | None,
    options: GradientOptions,
    job: Runtime,
    name: str,
) -> Corrected:
    """Prepare gradients that go through a momentum; all ranks call it in each step.

    Args:
        whole: whether the step sends whole gradients, which stay as they are; None: it does not.
    """

    def unless_whole(value: Any, otherwise: float) -> tf.Tensor:
        value = tf.cast(value, tf.float32)
        return value if whole is None else tf.where(whole, otherwise, value)

    def reduced(tensor: tf.Tensor) -> tf.Tensor:
        exact = {"op": options.op, "compression": Compression.none, "process_set": options.process_set}
        return single.allreduce(tensor, name=f"{name}: measures", **exact)

    rates = momentum.rates(variables)
    once = {id(rate): tf.cast(rate, tf.float32) for rate in rates}  # all may have the same one
    for_decay = {key: unless_whole(rate, 0.0) for key, rate in once.items()}
    once = {key: unless_whole(rate, 1.0) for key, rate in once.items()}
    # each rank adds an equal part of the decay, so that the sum or the average over the ranks has all of it
    parts = job.engine.size if options.op == Sum else 1
    moved_gradients = []
    for variable, gradient, rate, decay in zip(variables, gradients, rates, momentum.decays(variables), strict=True):
        moved = gradient * once[id(rate)]
        if decay:
            moved += tf.convert_to_tensor(variable) * (for_decay[id(rate)] * (decay / parts))
        moved_gradients.append(moved)
    measured = None
    if momentum.measures:
        measure = functools.partial(momentum.measured, variables, gradients, reduced)
        nothing = lambda: tf.zeros(len(variables), tf.float64)  # noqa: E731 - as short as its meaning
        measured = measure() if whole is None else tf.cond(whole, nothing, measure)
    return Corrected(momentum, variables, moved_gradients, [once[id(rate)] for rate in rates], measured)
