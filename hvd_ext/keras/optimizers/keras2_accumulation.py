"""Gradient accumulation for optimizers of Keras 2, which have none: backward_passes_per_step passes for one update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvd_ext.options.gradients import GradientOptions
from hvd_ext.tensorflow import ops
from hvd_ext.tensorflow.gradients import kinds

Pairs = Sequence[tuple[Any, Any]]


class Accumulation:
    """The sums of an optimizer's gradients on this rank since its last update."""

    def __init__(self, options: GradientOptions) -> None:
        self._count = options.backward_passes_per_step
        self._divisor = self._count if options.average_aggregated_gradients else 1
        self._passes: tf.Variable | None = None
        self._sums: dict[Any, tf.Variable] = {}

    def step(self, pairs: Pairs, update: Callable[[Pairs], None]) -> None:
        """Add the gradients of one pass; after the last pass before an update, hand the sums on and clear them.

        Eager, or while a function is traced: then `update` is traced too, as a branch.

        Args:
            pairs: each a gradient (dense, slices or None) and its variable.
            update: takes pairs of a dense sum and its variable; the sum is None for a variable that has had no gradient
                yet.
        """
        with tf.control_dependencies(self._add(pairs)):
            self.when_due(lambda: self._cleared(pairs, update(self._totals(pairs))))

    def gathered(self, pairs: Pairs, reduce: Callable[[Pairs], Pairs]) -> Pairs:
        """Add the gradients of one pass, and give what is to be applied `when_due`; eager, or while tracing a function.

        Args:
            reduce: takes the pairs that `update` of `step` takes, and gives them reduced over the ranks; called after
                the last pass before an update.

        Returns:
            After the last pass before an update what `reduce` gave, and the sums are cleared; after any other pass this
            rank's sums so far.
        """
        variables = [variable for _, variable in pairs]
        present: list[int] = []

        def full() -> list[tf.Tensor]:
            reduced = self._cleared(pairs, reduce(self._totals(pairs)))
            present[:] = [index for index, (gradient, _) in enumerate(reduced) if gradient is not None]
            return [tf.identity(reduced[index][0]) for index in present]

        def waiting() -> list[tf.Tensor]:
            if tf.executing_eagerly():
                present[:] = [index for index, variable in enumerate(variables) if kinds.key(variable) in self._sums]
            return [self._sum(variables[index]) for index in present]

        with tf.control_dependencies(self._add(pairs)):
            due = self._due()
            # a graph's second branch is traced after the first one has said which gradients there are
            gradients = iter(tf.cond(due, full, waiting))
            return [
                (next(gradients) if index in present else None, variable) for index, variable in enumerate(variables)
            ]

    def when_due(self, then: Callable[[], Any]) -> None:
        """Call a function if the newest pass was the last one before an update; a graph gets the call as a branch."""
        ops.only_if(self._due(), then)

    def _due(self) -> tf.Tensor:
        assert self._passes is not None
        return tf.equal(self._passes.read_value() % self._count, 0)

    def _add(self, pairs: Pairs) -> list[tf.Operation]:
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
        return [operation for operation in added if operation is not None]

    def _totals(self, pairs: Pairs) -> Pairs:
        return [
            (self._sum(variable) / self._divisor if kinds.key(variable) in self._sums else None, variable)
            for _, variable in pairs
        ]

    def _sum(self, variable: Any) -> tf.Tensor:
        total = self._sums.get(kinds.key(variable))
        return tf.zeros(variable.shape, kinds.dtype(variable)) if total is None else total.read_value()

    def _cleared(self, pairs: Pairs, result: Any) -> Any:
        for _, variable in pairs:
            total = self._sums.get(kinds.key(variable))
            if total is not None:
                total.assign(tf.zeros_like(total), read_value=False)
        return result
