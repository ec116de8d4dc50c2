"""Rank, size and so on as ops: what they give is found out when the graph runs, not when it is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import tensorflow as tf

from hvd_ext.errors import HvdExtError
from hvd_ext.job import process, process_sets
from hvd_ext.job.process_sets import ProcessSet
from hvd_ext.tensorflow.ops import plain

# What Horovod answers for a set where there is no answer.
NOT_INITIALIZED = -1
UNKNOWN_SET = -2


@plain
def rank_op(name: str | None = None) -> tf.Tensor:
    """Give this process's rank when the graph runs.

    Args:
        name: of the op.

    Returns:
        int32 scalar.

    Raises:
        NotInitializedError: before `init()`; in a running graph TensorFlow's error with the same words.
    """
    return _found(process.rank, name)


@plain
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Give this rank's place on its host when the graph runs.

    Args:
        name: of the op.

    Returns:
        int32 scalar.

    Raises:
        NotInitializedError: before `init()`; in a running graph TensorFlow's error with the same words.
    """
    return _found(process.local_rank, name)


@plain
def local_size_op(name: str | None = None) -> tf.Tensor:
    """Give the number of ranks on this host when the graph runs.

    Args:
        name: of the op.

    Returns:
        int32 scalar.

    Raises:
        NotInitializedError: before `init()`; in a running graph TensorFlow's error with the same words.
    """
    return _found(process.local_size, name)


@plain
def size_op(process_set_id: int | ProcessSet = 0, name: str | None = None) -> tf.Tensor:
    """Give the number of ranks, of the job or of a process set, when the graph runs.

    Args:
        process_set_id: of a set that was added, or the set; 0 for all ranks.
        name: of the op.

    Returns:
        int32 scalar.

    Raises:
        NotInitializedError: before `init()`; in a running graph TensorFlow's error with the same words.
        InvalidError: there is no such set; in a running graph TensorFlow's error with the same words.
    """
    return _found(lambda: process_sets.find(_identity(process_set_id)).size(), name)


@plain
def process_set_included_op(process_set_id: int | ProcessSet = 0, name: str | None = None) -> tf.Tensor:
    """Tell whether this rank is in a process set when the graph runs.

    Args:
        process_set_id: of a set that was added, or the set; 0 for all ranks.
        name: of the op.

    Returns:
        int32 scalar: 1 or 0; as in Horovod -1 before `init()`, and -2 where there is no such set.
    """

    def included() -> int:
        if not process.is_initialized():
            return NOT_INITIALIZED
        try:
            return int(process_sets.find(_identity(process_set_id)).included())
        except HvdExtError:
            return UNKNOWN_SET

    return _found(included, name)


def _identity(process_set_id: int | ProcessSet) -> int | None:
    return process_set_id.process_set_id if isinstance(process_set_id, ProcessSet) else process_set_id


def _found(find: Callable[[], int | None], name: str | None) -> tf.Tensor:
    if tf.executing_eagerly():
        return tf.constant(find(), tf.int32, name=name)
    result = tf.numpy_function(lambda: np.int32(cast(int, find())), [], tf.int32, name=name)
    result.set_shape([])
    return result
