"""Steps that all ranks skip, because a gradient is not finite: they are counted; many in a row are an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvd_ext.errors import HvdExtError
from hvd_ext.job import consensus
from hvd_ext.job.log import logger
from hvd_ext.tensorflow import ops

if TYPE_CHECKING:
    from hvd_ext.tensorflow.gradients.reducer import GradientSet

LIMIT = 100


class Skipping:
    """Counts the steps in a row that were skipped. All ranks skip a step or none does, so all raise the same error.

    Attributes:
        steps: a variable: the number of them.
    """

    def __init__(self, label: str) -> None:
        self._words = (
            f"{label}: all ranks have skipped the last {LIMIT} steps, because a gradient was not finite in each of "
            "them, and the weights do not change any more; look for NaN or infinity in the weights, in the data and in "
            "the loss, or lower the learning rate"
        )
        with tf.init_scope(), tf.device("CPU:0"):
            self.steps = tf.Variable(0, dtype=tf.int64, trainable=False, name="hvd_ext_skipped_in_a_row")

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
            steps = tf.where(applied, tf.constant(0, tf.int64), self.steps.read_value() + 1)
            self.steps.assign(steps)
            goes_on = tf.logical_or(steps < LIMIT, searching)
            if not tf.executing_eagerly():
                with tf.control_dependencies([steps]):
                    return tf.debugging.Assert(goes_on, [self._words])
        if not bool(goes_on):
            raise HvdExtError(self._words)
        return None


class FiniteSteps:
    """The steps of a list of gradients with error feedback: those that are applied, and those that are skipped.

    Args:
        gradients: the list; all ranks make this together.
    """

    def __init__(self, gradients: GradientSet) -> None:
        engine = gradients.job.engine
        first = consensus.exchange(engine, f"{gradients.name}: first step", gradients.first_step)[0]
        self._label, self._tells = gradients.label, engine.rank == 0
        # many skipped steps in a row are an error; but a loss scale may still be searching, and a tape skips nothing
        ends = gradients.is_of_optimizer and not gradients.holds_again
        self._skipping = Skipping(self._label) if ends else None
        with tf.init_scope(), tf.device("CPU:0"):
            self.applied = tf.Variable(first, dtype=tf.int64, trainable=False, name="hvd_ext_applied_steps")
            self._skipped = tf.Variable(0, dtype=tf.int64, trainable=False, name="hvd_ext_skipped_steps")
        gradients.counters |= {"applied": self.applied, "skipped": self._skipped}
        if self._skipping is not None:
            gradients.counters["skipped in a row"] = self._skipping.steps

    @staticmethod
    def are_finite(reduced: Sequence[Any]) -> tf.Tensor:
        """Say whether all reduced gradients are finite, equally on all ranks."""
        tensors = [gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient for gradient in reduced]
        finite = [tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors]
        return tf.reduce_all(tf.stack(finite)) if finite else tf.constant(True)

    def count(self, ok: tf.Tensor, more: Sequence[tf.Operation | None] = ()) -> None:
        """Count a step, which is applied if `ok`; in a graph a warning follows `more`."""
        with tf.device("CPU:0"):
            counted = [
                *more,
                self.applied.assign_add(tf.cast(ok, tf.int64), read_value=False),
                self._skipped.assign_add(tf.cast(tf.logical_not(ok), tf.int64), read_value=False),
                None if self._skipping is None else self._skipping.count(ok),
            ]
            with tf.control_dependencies([operation for operation in counted if operation is not None]):
                self._warn(ok)

    def _warn(self, ok: tf.Tensor) -> None:
        if not self._tells:
            return
        if not tf.executing_eagerly():
            tf.cond(ok, lambda: tf.constant(True), lambda: tf.py_function(self._log, [], tf.bool))
        elif not bool(ok):
            self._log()

    @ops.plain
    def _log(self) -> bool:
        skipped = int(self._skipped.numpy())
        if str(skipped).strip("0") == "1":  # 1, 10, 100, ...
            logger.warning(
                "%s: a gradient of step %d is not finite: all ranks have skipped the step, and the residuals are "
                "unchanged; %d steps so far",
                self._label,
                int(self.applied.numpy()),
                skipped,
            )
        return True
