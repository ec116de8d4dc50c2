"""Rank, size and similar facts as ops, which read them when the graph runs, not when it is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import tensorflow as tf

from hvd_ext.errors import HvdExtError
from hvd_ext.job import process, process_sets
from hvd_ext.job.process_sets import ProcessSet
from hvd_ext.tensorflow.ops import plain

# The codes that Horovod returns when it cannot tell whether a rank is in a process set.
NOT_INITIALIZED = -1
UNKNOWN_SET = -2


@plain
def rank_op(name: str | None = None) -> tf.Tensor:
    """Return this process's rank, read when the graph runs.

    Args:
        name: the op's name.

    Returns:
        An int32 scalar.

    Raises:
        NotInitializedError: before `init()`; a running graph raises TensorFlow's error with the same message.
    """
    return _scalar(process.rank, name)


@plain
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return this rank's place among the ranks of its host, read when the graph runs; see `rank_op`.

    Args:
        name: the op's name.
    """
    return _scalar(process.local_rank, name)


@plain
def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return the number of ranks on this host, read when the graph runs; see `rank_op`.

    Args:
        name: the op's name.
    """
    return _scalar(process.local_size, name)


@plain
def size_op(process_set_id: int | ProcessSet = 0, name: str | None = None) -> tf.Tensor:
    """Return the number of ranks of the job or of a process set, read when the graph runs.

    Args:
        process_set_id: a process set that was added, or its id; 0 for all ranks.
        name: the op's name.

    Returns:
        An int32 scalar.

    Raises:
        NotInitializedError: before `init()`; a running graph raises TensorFlow's error with the same message.
        InvalidError: there is no such set; a running graph raises TensorFlow's error with the same message.
    """
    return _scalar(lambda: process_sets.find(_identity(process_set_id)).size(), name)


@plain
def process_set_included_op(process_set_id: int | ProcessSet = 0, name: str | None = None) -> tf.Tensor:
    """Return whether this rank is in a process set, read when the graph runs.

    Args:
        process_set_id: a process set that was added, or its id; 0 for all ranks.
        name: the op's name.

    Returns:
        An int32 scalar, 1 or 0. As in Horovod it is -1 before `init()`, and -2 if there is no such set.
    """

    def included() -> int:
        if not process.is_initialized():
            return NOT_INITIALIZED
        try:
            return int(process_sets.find(_identity(process_set_id)).included())
        except HvdExtError:
            return UNKNOWN_SET

    return _scalar(included, name)


def _identity(process_set_id: int | ProcessSet) -> int | None:
    return process_set_id.process_set_id if isinstance(process_set_id, ProcessSet) else process_set_id


def _scalar(find: Callable[[], int | None], name: str | None) -> tf.Tensor:
    if tf.executing_eagerly():
        return tf.constant(find(), tf.int32, name=name)
    result = tf.numpy_function(lambda: np.int32(cast(int, find())), [], tf.int32, name=name)
    result.set_shape([])
    return result
