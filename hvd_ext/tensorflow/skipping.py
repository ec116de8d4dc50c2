"""The end of a training that changes nothing any more: an error after so many skipped steps in a row."""

from __future__ import annotations

import tensorflow as tf

from hvd_ext.errors import HvdExtError
from hvd_ext.tensorflow import ops

LIMIT = 100


class Skipping:
    """Counts the steps in a row that were skipped. All ranks skip a step or none does, so all raise the same error."""

    def __init__(self, label: str) -> None:
        self._words = (
            f"{label}: all ranks have skipped the last {LIMIT} steps, because a gradient was not finite in each of "
            "them, and the weights do not change any more; look for NaN or infinity in the weights, in the data and in "
            "the loss, or lower the learning rate"
        )
        with tf.init_scope(), tf.device("CPU:0"):
            self._steps = tf.Variable(0, dtype=tf.int64, trainable=False, name="hvd_ext_skipped_in_a_row")

    @ops.plain
    def count(self, applied: tf.Tensor, searching: tf.Tensor | bool = False) -> tf.Operation | None:
        """Count a step; eagerly or in a graph.

        Args:
            applied: a boolean scalar, equal on all ranks: whether the step was applied.
            searching: a boolean scalar, equal on all ranks: whether skipped steps still change a loss scale.

        Raises:
            HvdExtError: `LIMIT` steps in a row were skipped, and nothing is searching. A running function raises
                `tf.errors.InvalidArgumentError` with the same message.
        """
        with tf.device("CPU:0"):
            steps = tf.where(applied, tf.constant(0, tf.int64), self._steps.read_value() + 1)
            self._steps.assign(steps)
            goes_on = tf.logical_or(steps < LIMIT, searching)
            if not tf.executing_eagerly():
                with tf.control_dependencies([steps]):
                    return tf.debugging.Assert(goes_on, [self._words])
        if not bool(goes_on):
            raise HvdExtError(self._words)
        return None
