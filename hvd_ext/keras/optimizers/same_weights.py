"""A check that all ranks have the same weights, bit for bit, after every so many steps."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_ext.job import consensus, process_sets
from hvd_ext.tensorflow import ops
from hvd_ext.tensorflow.gradients import kinds
from hvd_ext.tensorflow.gradients.reducer import Reducer
from hvd_ext.tensorflow.gradients.same_start import checksums, refuse

# Counted by us: ranks whose optimizers have counted differently are what the check is to find, so they must meet in it.
_applied: weakref.WeakKeyDictionary[Reducer, tf.Variable] = weakref.WeakKeyDictionary()


def check(reducer: Reducer, iterations: tf.Variable, variables: Sequence[Any], passes: int = 1) -> None:
    """Compare checksums of the weights over the ranks, where it is time; eager, or in a graph. All ranks call it.

    Args:
        reducer: its options say after how many steps; its local variables are left out.
        iterations: of the optimizer; compared too.
        variables: the weights.
        passes: so many calls make a step.

    Raises:
        MismatchError: naming the first variable that differs, on all ranks. In a graph:
            `tf.errors.InvalidArgumentError` with these words.
    """
    every, job = reducer.options.check_every, process_sets.runtime_of(reducer.options.process_set)
    if not every or job is None:
        return
    shared = [variable for variable in variables if kinds.key(variable) not in reducer.local_keys]
    names = ["iterations", *(kinds.name(variable) for variable in shared)]
    if reducer not in _applied:
        with tf.init_scope(), tf.device("CPU:0"):
            _applied[reducer] = tf.Variable(0, dtype=tf.int64, trainable=False, name="hvd_ext_applied")
    applied = _applied[reducer]

    def values() -> list[tf.Tensor]:
        return [tf.convert_to_tensor(variable) for variable in (iterations, *shared)]

    @ops.plain
    def compare(*own: tf.Tensor) -> bool:
        sums = checksums(own)
        answers = consensus.exchange(job.engine, f"{reducer.label}: the same weights", lambda: sums)
        advice = "broadcast all variables before the first step, and change weights alike on all ranks"
        refuse(reducer.label, names, answers, job.engine.ranks, advice)
        return True

    def compared() -> tf.Tensor:
        # reads in the graph come after the step's updates; a read inside of the function need not
        return tf.py_function(compare, values(), tf.bool)

    if tf.executing_eagerly():
        if int(applied.assign_add(1)) % (every * passes) == 0:
            compare(*values())
        return
    due = tf.equal(applied.assign_add(1, read_value=True) % (every * passes), 0)
    tf.cond(due, compared, lambda: tf.constant(True))
