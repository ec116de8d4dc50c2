"""What the ranks compare of an optimizer: its settings before the first step, its weights after every so many steps."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_ext.job import consensus, process_sets
from hvd_ext.keras.optimizers.comparable import comparable
from hvd_ext.tensorflow import ops
from hvd_ext.tensorflow.gradients import kinds
from hvd_ext.tensorflow.gradients.reducer import Reducer
from hvd_ext.tensorflow.gradients.same_start import checksums, refuse
from hvd_ext.tensorflow.gradients.step import Step

# The steps of each reducer, for `same_weights`. The optimizers' own iterations cannot stand for them: the check must
# find ranks that have counted differently, so these must come to it after the same step.
_applied: weakref.WeakKeyDictionary[Reducer, tf.Variable] = weakref.WeakKeyDictionary()


def settings(optimizer: Any) -> dict[str, Any]:
    """Give what decides an update of an optimizer of Keras and lives in Python, where no broadcast reaches it.

    Returns:
        Plain values by name, which must be equal on all ranks.
    """
    values: dict[str, Any] = {}
    inner = getattr(optimizer, "inner_optimizer", None)
    for owner, part in (("the optimizer's", optimizer), ("the inner optimizer's", inner)):
        if part is not None:
            values |= {f"{owner} class": part.__class__.__name__, **comparable(part, owner)}
    return values


def count_again(reducer: Reducer) -> None:
    """Count the steps between two comparisons from the next trace on afresh, as a rank that is new does."""
    _applied.pop(reducer, None)


def same_weights(
    reducer: Reducer, step: Step, iterations: tf.Variable, variables: Sequence[Any], passes: int = 1
) -> None:
    """Compare checksums of the weights over the ranks after every `check_every` steps; all ranks call it in each.

    Args:
        reducer: its options have check_every; its local variables are left out.
        step: the step after whose update they are compared.
        iterations: of the optimizer; they are compared too, except with local steps, where a host may skip a step.
        passes: the number of calls that make a step.

    Raises:
        MismatchError: naming the first variable that differs, on all ranks. In a graph:
            `tf.errors.InvalidArgumentError` with these words.
    """
    interval, job = reducer.options.check_every, process_sets.runtime_of(reducer.options.process_set)
    if not interval or job is None:
        return
    local = reducer.local_keys
    shared = [variable for variable in variables if kinds.key(variable) not in local]
    counted = [iterations] if reducer.options.local_steps is None else []
    names = ["iterations"][: len(counted)] + [kinds.name(variable) for variable in shared]
    if reducer not in _applied:
        with tf.init_scope(), tf.device("CPU:0"):
            _applied[reducer] = tf.Variable(0, dtype=tf.int64, trainable=False, name="hvd_ext_applied")
    applied = _applied[reducer]
    step.counts("check_every", applied)

    def values() -> list[tf.Tensor]:
        return [*map(tf.convert_to_tensor, counted), *step.shared(shared)]

    @ops.plain
    def compare(*tensors: tf.Tensor) -> bool:
        sums = checksums(tensors)
        answers, _ = consensus.exchange_in_step(job.engine, f"{step.name}: the same weights", lambda: sums)
        advice = "broadcast all variables before the first step, and change weights alike on all ranks"
        refuse(reducer.label, names, answers, job.engine.ranks, advice)
        return True

    def compared() -> None:
        # the values are read in the graph, after the step's updates; a read inside of `compare` might come before them
        tf.py_function(compare, values(), tf.bool)

    if tf.executing_eagerly():
        if int(applied.assign_add(1)) % (interval * passes) == 0:
            compare(*values())
        return
    due = tf.equal(applied.assign_add(1, read_value=True) % (interval * passes), 0)
    ops.in_order(lambda: ops.only_if(due, compared))
