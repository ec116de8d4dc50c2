"""Several backward passes for one update of an optimizer of Keras 2, which cannot add gradients up itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvd_ext.gradient_options import GradientOptions
from hvd_ext.tensorflow import kinds

Pairs = Sequence[tuple[Any, Any]]


class Passes:
    """The sums of an optimizer's gradients since its last update, on this rank.

    Args:
        options: backward_passes_per_step and average_aggregated_gradients count.
    """

    def __init__(self, options: GradientOptions) -> None:
        self._count = options.backward_passes_per_step
        self._divisor = self._count if options.average_aggregated_gradients else 1
        self._passes: tf.Variable | None = None
        self._sums: dict[Any, tf.Variable] = {}

    def step(self, pairs: Pairs, update: Callable[[Pairs], None]) -> None:
        """Add one pass's gradients; after every backward_passes_per_step of them the sums are handed on and cleared.

        Eager, or while a function is traced: then `update` is traced too, as a branch.

        Args:
            pairs: of a gradient (dense, slices or None) and its variable.
            update: gets the pairs of the sums, dense; None for a variable that has had no gradient yet.
        """
        with tf.init_scope():
            if self._passes is None:
                self._passes = tf.Variable(0, dtype=tf.int64, trainable=False, name="hvd_ext_passes")
            for gradient, variable in pairs:
                if gradient is not None and kinds.key(variable) not in self._sums:
                    zeros = tf.zeros(variable.shape, kinds.dtype(variable))
                    self._sums[kinds.key(variable)] = tf.Variable(zeros, trainable=False, name="hvd_ext_sum")
        added = [self._passes.assign_add(1, read_value=False)]
        for gradient, variable in pairs:
            if gradient is not None:
                dense = kinds.ready("backward_passes_per_step", gradient, variable, kinds.DENSE, 1)
                added.append(self._sums[kinds.key(variable)].assign_add(dense, read_value=False))
        sums = [self._sums.get(kinds.key(variable)) for _, variable in pairs]

        def full() -> tf.Tensor:
            totals = [None if own is None else own.read_value() / self._divisor for own in sums]
            update([(total, variable) for total, (_, variable) in zip(totals, pairs, strict=True)])
            for own in sums:
                if own is not None:
                    own.assign(tf.zeros_like(own), read_value=False)
            return tf.constant(0)

        with tf.control_dependencies([one for one in added if one is not None]):
            due = tf.equal(self._passes.read_value() % self._count, 0)
            if tf.executing_eagerly():
                if due:
                    full()
            else:
                tf.cond(due, full, lambda: tf.constant(0))
