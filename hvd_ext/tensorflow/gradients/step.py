"""One step of a reducer: what the ranks have agreed on for it, and the reduction itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_ext.job.runtime import Runtime
from hvd_ext.options.gradients import GradientOptions
from hvd_ext.tensorflow.collectives import sparse
from hvd_ext.tensorflow.gradients import kinds
from hvd_ext.tensorflow.gradients.channel import Channel
from hvd_ext.tensorflow.topk.feedback import Feedback
from hvd_ext.tensorflow.topk.in_part import InPart


@dataclasses.dataclass
class Step:
    """A step under way.

    Args:
        job: the runtime of the ranks that take part; None where this rank does not.
        channel: for the dense gradients; None where this rank does not take part.
        feedback: of a step in which a part of the gradients is sent; else None.
        kinds: the agreed kind of each gradient.
        shared: the indices of the variables that are not local.
        ready: what was given to the caller.
        variables: of the step.
        name: of the calls for sparse gradients.

    Attributes:
        reduced: whether the gradients were reduced.
        compared: in a graph, the comparison of the weights that comes before the reduction; None where there is none.
        finite: whether all that was reduced is finite; None where nobody asks.
    """

    job: Runtime | None
    channel: Channel | None
    feedback: Feedback | None
    kinds: str
    shared: tuple[int, ...]
    ready: list[Any]
    variables: Sequence[Any]
    name: str
    reduced: bool = False
    compared: tf.Operation | None = None
    finite: tf.Tensor | None = None

    @property
    def present(self) -> list[int]:
        """The indices of the gradients that are there."""
        return [index for index, gradient in enumerate(self.ready) if gradient is not None]

    def reduced_now(self, gradients: Sequence[Any], options: GradientOptions, in_part: InPart | None) -> list[Any]:
        """Reduce the gradients over the ranks.

        Args:
            gradients: those that are present.
            options: how they become one.
            in_part: how a part of them is sent; None: they are sent whole.

        Returns:
            The sums or averages, in their order; what has gone through a momentum has the learning rate in it.
        """
        assert self.job is not None
        assert self.channel is not None
        factor = options.gradient_predivide_factor
        results = dict(zip(self.present, gradients, strict=True))
        if in_part is not None and in_part.options.clip is not None:
            shared = [index for index in self.shared if index in results]
            limit = in_part.options.clip / self.job.engine.size**0.5
            results |= zip(shared, _clipped([results[index] for index in shared], limit), strict=True)
        rates: dict[int, tf.Tensor] = {}
        if in_part is not None and in_part.momentum is not None:
            rate = tf.cast(in_part.momentum.rate(), tf.float32)
            rates = {self.shared[index]: rate for index in self.channel.with_momentum}
            results |= {index: results[index] * rate for index in rates}
        dense = [results[index] if self.kinds[index] == kinds.DENSE else None for index in self.shared]
        scaled = [None if gradient is None else kinds.scaled(gradient, 1 / factor) for gradient in dense]
        density = None if self.feedback is None else self.feedback.density(self.channel)
        for index, own, reduced in zip(self.shared, dense, self.channel.reduce(scaled, density), strict=True):
            if own is not None:
                results[index] = kinds.scaled(reduced, factor)
        for index in self.shared:
            if self.kinds[index] == kinds.SPARSE:
                results[index] = sparse.reduce(
                    self.job,
                    f"{self.name}/{kinds.name(self.variables[index])}#{index}",
                    results[index],
                    options,
                    shape=tuple(self.variables[index].shape),
                    dtype=kinds.dtype(self.variables[index]),
                )
        if self.feedback is not None:
            shared = [index for index in self.shared if index in results]
            each = [rates.get(index, 1.0) for index in shared]
            ended, self.finite = self.feedback.ended(self.channel, [results[index] for index in shared], each)
            results |= zip(shared, ended, strict=True)
        return [results[index] for index in self.present]


def _clipped(gradients: Sequence[Any], limit: float) -> list[Any]:
    """Scale gradients down to a norm over all of them, in float32; of slices the rows count as they are."""
    values = [one.values if isinstance(one, tf.IndexedSlices) else one for one in gradients]
    squares = [tf.reduce_sum(tf.square(tf.cast(one, tf.float32))) for one in values]
    norm = tf.sqrt(tf.add_n(squares)) if squares else tf.constant(0.0)
    # a norm that is not finite makes gradients that are not: the step is left out on all ranks
    factor = tf.where(tf.math.is_finite(norm), tf.where(norm > limit, limit / norm, 1.0), float("nan"))
    scaled = [one * tf.cast(factor, one.dtype) for one in values]
    return [
        tf.IndexedSlices(value, one.indices, one.dense_shape) if isinstance(one, tf.IndexedSlices) else value
        for one, value in zip(gradients, scaled, strict=True)
    ]
