"""Keras' training step in two halves that XLA compiles: XLA cannot communicate, so the reduction stands between them.

The first half is Keras' own step up to the optimizer's `apply`: forward pass, loss, backward pass, metrics. The second
is the update by the reduced gradients. All gradients are ready at once, so that no communication hides behind the
backward pass; on a GPU what XLA saves is more than that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf


class Halves:
    """Where a wrapped optimizer's `apply` is while a divided step is traced."""

    def __init__(self) -> None:
        self._taken: list[tuple[list[Any], list[Any]]] | None = None
        self.compiles_update = False

    def take(self, gradients: Sequence[Any], variables: Sequence[Any]) -> bool:
        """Take the gradients of an `apply` in the first half.

        Returns:
            Whether it was one, so that there is nothing to reduce yet.
        """
        if self._taken is None:
            return False
        self._taken.append((list(gradients), list(variables)))
        return True

    @contextlib.contextmanager
    def first(self) -> Iterator[list[tuple[list[Any], list[Any]]]]:
        """Yield what `take` takes: gradients and variables of each `apply`."""
        self._taken = []
        try:
            yield self._taken
        finally:
            self._taken = None

    @contextlib.contextmanager
    def second(self) -> Iterator[None]:
        """Let `apply` compile the update."""
        self.compiles_update = True
        try:
            yield
        finally:
            self.compiles_update = False


def divided(plain: Callable[[Any], Any], optimizer: Any, halves: Halves) -> Callable[[Any], Any]:
    """Divide a training step.

    Args:
        plain: Keras' own step, which does nothing to the weights but `optimizer.apply`, and does not read them after.
        optimizer: wrapped.
        halves: of the optimizer.

    Returns:
        A step with the same results, for a function that XLA does not compile.
    """
    variables: list[Any] = []

    def gradients_of(data: Any) -> tuple[Any, list[Any]]:
        with halves.first() as taken:
            logs = plain(data)
        ((gradients, of),) = taken or [([], [])]
        variables[:] = of
        return logs, gradients

    first = tf.function(gradients_of, jit_compile=True, reduce_retracing=True, autograph=False)

    def step(data: Any) -> Any:
        if not optimizer.built:
            # The first half would be traced with an optimizer that is not built, whose loss scale is a constant; Keras
            # traces a step again once it is built. This finds the variables, and builds a model that has none yet.
            described = tf.nest.map_structure(lambda one: None if one is None else tf.type_spec_from_value(one), data)
            tf.function(gradients_of, autograph=False).get_concrete_function(described)
            with tf.init_scope():
                optimizer.build(list(variables))
        logs, gradients = first(data)
        if gradients:
            with halves.second():
                optimizer.apply(gradients, variables)
        return logs

    return step


def update(work: Callable[[list[Any]], None], gradients: Sequence[Any]) -> None:
    """Let XLA compile an update.

    Slices, whose number of rows XLA would have to know, are left to TensorFlow.

    Args:
        work: assigns variables, given the gradients.
        gradients: reduced; None where there is none.
    """
    if any(isinstance(one, tf.IndexedSlices) for one in gradients):
        work(list(gradients))
        return

    @tf.function(jit_compile=True, autograph=False)
    def compiled(given: list[tf.Tensor]) -> None:
        present = iter(given)
        work([None if one is None else next(present) for one in gradients])

    compiled([one for one in gradients if one is not None])
