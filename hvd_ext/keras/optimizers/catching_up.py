"""Rounds without a gradient of this rank: a loop that skips ahead, and a rank that has no more batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from hvd_ext.errors import InvalidError
from hvd_ext.keras.optimizers.wrapper import Distributed, updates
from hvd_ext.tensorflow.gradients import kinds
from hvd_ext.tensorflow.gradients.reducer import GradientSet, Reducer, reducer_of


def catch_up(optimizer: Any) -> int:
    """Apply the results that are there already, without gradients of this rank.

    Where steps do not wait for all ranks, a rank that computes slowly finds that rounds are over whose steps it has not
    begun. It may compute each of these steps, and its gradients then come late; or skip ahead by this call, so that
    its next gradient is one of the newest weights. With a delay it applies the result of the last step; all ranks call
    it alike then.

    Args:
        optimizer: from `hvd_ext.DistributedOptimizer` with sync= or delay=1. With gradient accumulation, passes since
            the last update are this rank's gradient of the first of these steps; with a delay nothing is applied before
            the next update.

    Returns:
        The number of results that were applied; 0 before the first step.

    Raises:
        InvalidError: the optimizer was not wrapped with these options, or the call is inside of a tf.function.
        CommunicationError: a peer is gone.
    """
    reducer = reducer_of(optimizer)
    if reducer is None or not (reducer.options.partial or reducer.options.delay):
        raise InvalidError(
            f"catch_up ({optimizer!r}): must be an optimizer from hvd_ext.DistributedOptimizer with sync= or delay=1; "
            "steps of others have nothing to catch up with"
        )
    if not tf.executing_eagerly():
        raise InvalidError("catch_up: call it between two steps, outside of a tf.function")
    if reducer.options.delay and accumulated(optimizer)[1]:
        return 0
    applied = 0
    for gradients in _open(reducer):
        while gradients.policy.behind() > 0:
            _apply(optimizer, gradients)
            applied += 1
    return applied


def end_together(optimizer: Distributed) -> None:
    """Give no more gradients, and apply the rounds of the other ranks until none of them gives any; all ranks call it.

    Afterwards all ranks have applied the same rounds, and their next steps are one round again.

    Args:
        optimizer: whose steps do not wait for all ranks.
    """
    sets = list(_open(optimizer._hvd_ext.reducer))
    for gradients in sets:
        gradients.job.engine.leave(gradients.channels[0].handle)
    for gradients in sets:
        while gradients.job.engine.next_round(gradients.channels[0].handle):
            _apply(optimizer, gradients)


def _open(reducer: Reducer) -> Iterator[GradientSet]:
    return (gradients for gradients in reducer.sets if gradients.channels and gradients.is_open)


def _apply(optimizer: Any, gradients: GradientSet) -> None:
    """Apply a result that is there, in as many passes as an update takes."""
    passes, done = accumulated(optimizer)
    by_key = {kinds.key(variable): variable for variable in updates(optimizer)._trainable_variables}
    variables = [by_key[key] for key in gradients.keys]
    for _ in range(passes - done):
        if done:  # the passes before are this rank's gradient of the step
            optimizer.apply(
                [tf.zeros(tuple(variable.shape), kinds.dtype(variable)) for variable in variables], variables
            )
        else:
            optimizer.apply_absent(variables)


def accumulated(optimizer: Any) -> tuple[int, int]:
    """Give the number of passes that a reduction of an optimizer takes, and that of the passes since the last one."""
    updating = updates(optimizer)
    # with a loss scale every pass is reduced
    passes = (updating.gradient_accumulation_steps if updating is optimizer else None) or 1
    return passes, int(updating._iterations) % passes if passes > 1 else 0  # `iterations` counts updates
