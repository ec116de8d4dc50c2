"""`density="auto"`: the change of the gradients' norm decides the density of each window of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hvd_ext.compression.density import Auto
from hvd_ext.job.log import logger
from hvd_ext.tensorflow import ops

if TYPE_CHECKING:
    from hvd_ext.job.runtime import Runtime

_NAMES = ("auto density", "auto norm", "auto sum", "auto steps")


class AutoDensity:
    """The gradients' norm over a window of steps, and the density from it; `name` begins its calls' names."""

    def __init__(self, label: str, name: str, job: Runtime, process_set: Any) -> None:
        self._label, self._name, self._job, self._process_set = label, name, job, process_set
        self._rule = Auto()
        starts = (self._rule.densities[0], -1.0, 0.0, 0.0)
        self._density, self._norm, self._sum, self._steps = self._variables = [
            tf.Variable(start, dtype=tf.float64, trainable=False, name="hvd_ext_topk_auto") for start in starts
        ]

    def density(self) -> tf.Tensor:
        """Return the density of the next step, a float64 scalar."""
        return self._density.read_value()

    def seen(self, reduced: Sequence[tf.Tensor], rates: Sequence[Any], ok: tf.Tensor) -> None:
        """Add a step to the window, and decide at the window's end.

        Args:
            rates: the learning rate that each gradient was multiplied by, which is divided out; a gradient with rate 0
                is left out.
            ok: whether all gradients are finite; otherwise the step is left out.
        """
        # TensorFlow's threads may add up in another order on each rank, so that the sums may differ in their last bits;
        # the decision therefore uses the average of the ranks' sums, which has equal bits on all ranks
        squares = [
            tf.math.divide_no_nan(tf.cast(tf.reduce_sum(tf.square(part)), tf.float64), tf.cast(rate, tf.float64) ** 2)
            for part, rate in zip(reduced, rates, strict=True)
        ]
        total = tf.add_n(squares) if squares else tf.constant(0.0, tf.float64)
        steps = self._steps.assign_add(tf.cast(ok, tf.float64))
        summed = self._sum.assign_add(tf.where(ok, total, 0.0))
        with tf.control_dependencies([steps, summed]):
            if tf.executing_eagerly():
                if float(steps) >= self._rule.window_steps:
                    self._decide()
                return
            full = self._steps.read_value() >= float(self._rule.window_steps)
            tf.cond(tf.logical_and(full, ok), self._decide, lambda: tf.constant(True))

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """The variables with the state, by name."""
        return dict(zip(_NAMES, self._variables, strict=True))

    def save(self) -> dict[str, np.ndarray]:
        """Return the state for a checkpoint."""
        return {name: variable.numpy() for name, variable in zip(_NAMES, self._variables, strict=True)}

    def load(self, saved: dict[str, np.ndarray]) -> None:
        """Restore what `save` returned; values that are missing stay as they are."""
        for name, variable in zip(_NAMES, self._variables, strict=True):
            if name in saved:
                variable.assign(saved[name])

    @ops.plain
    def _decide(self) -> tf.Tensor:
        from hvd_ext.tensorflow.collectives.single import allreduce

        rule, old, before = self._rule, self._norm.read_value(), self._density.read_value()
        name = f"{self._name}: density"
        mean = allreduce(self._sum.read_value(), name=name, process_set=self._process_set) / rule.window_steps
        new = tf.sqrt(mean)
        critical = tf.logical_or(old < 0, tf.abs(old - new) >= rule.change * old)
        chosen = tf.where(critical, *[tf.constant(density, tf.float64) for density in rule.densities])
        with tf.control_dependencies([old, before, chosen]):
            done = [self._density.assign(chosen), self._norm.assign(new), self._sum.assign(0), self._steps.assign(0)]
        with tf.control_dependencies(done):
            if self._job.engine.rank != 0:
                return tf.constant(True)
            if tf.executing_eagerly():
                return tf.constant(self._log(before, chosen, old, new))
            return tf.py_function(self._log, [before, chosen, old, new], tf.bool)

    def _log(self, before: tf.Tensor, chosen: tf.Tensor, old: tf.Tensor, new: tf.Tensor) -> bool:
        if float(before) != float(chosen):
            logger.info(
                "%s: density %g from now on, it was %g: the norm of the gradients over %d steps was %.3g, and %.3g "
                "before; a change of %g or more raises the density",
                self._label,
                float(chosen),
                float(before),
                self._rule.window_steps,
                float(new),
                float(old),
                self._rule.change,
            )
        return True
