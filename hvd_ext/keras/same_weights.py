"""A check that all ranks have the same weights, bit for bit, after every so many steps."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_ext import agreement, process_sets
from hvd_ext.errors import MismatchError
from hvd_ext.tensorflow import kinds, ops
from hvd_ext.tensorflow.reducer import Reducer


def check(reducer: Reducer, iterations: tf.Variable, variables: Sequence[Any]) -> None:
    """Compare checksums of the weights over the ranks, where it is time; eager, or in a graph. All ranks call it.

    A checksum (CRC-32) is taken of each variable; of weights that differ, one pair in 2**32 goes unnoticed.

    Args:
        reducer: its options say after how many steps; its local variables are left out.
        iterations: of the optimizer, counted after the step.
        variables: the weights.

    Raises:
        MismatchError: naming the first variable that differs, on all ranks. In a graph:
            `tf.errors.InvalidArgumentError` with these words.
    """
    every, job = reducer.options.check_every, process_sets.runtime_of(reducer.options.process_set)
    if not every or job is None:
        return
    shared = [variable for variable in variables if kinds.key(variable) not in reducer.local_keys]
    names = [kinds.name(variable) for variable in shared]

    @ops.plain
    def compare(*values: tf.Tensor) -> bool:
        sums = [zlib.crc32(np.atleast_1d(value.numpy()).reshape(-1).view(np.uint8).data) for value in values]
        answers = agreement.exchange(job.engine, f"{reducer.label}: the same weights", lambda: sums)
        for rank, answer in zip(job.engine.ranks, answers, strict=True):
            for name, mine, first in zip(names, answer, answers[0], strict=True):
                if mine != first:
                    raise MismatchError(
                        f"{reducer.label}: weight {name!r} must have the same bits on all ranks; rank {rank} has the "
                        f"checksum {mine:08x}, rank {job.engine.ranks[0]} has {first:08x}; broadcast all variables "
                        "before the first step, and change weights alike on all ranks"
                    )
        return True

    def compared() -> tf.Tensor:
        # reads in the graph come after the step's updates; a read inside of the function need not
        values = [tf.convert_to_tensor(variable) for variable in shared]
        return tf.py_function(compare, values, tf.bool)

    if tf.executing_eagerly():
        if int(iterations) % every == 0:
            compare(*[tf.convert_to_tensor(variable) for variable in shared])
        return
    due = tf.equal(iterations.read_value() % every, 0)
    tf.cond(due, compared, lambda: tf.constant(True))
