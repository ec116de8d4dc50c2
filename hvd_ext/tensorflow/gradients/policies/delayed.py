"""`delay=1`: a step applies the results of the step before it, so that computation hides communication."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hvd_ext.errors import HvdExtError
from hvd_ext.job.log import logger
from hvd_ext.state import Arrays, Everyone
from hvd_ext.tensorflow.collectives.objects import broadcast_object
from hvd_ext.tensorflow.gradients import carried
from hvd_ext.tensorflow.gradients.step import Policy

if TYPE_CHECKING:
    from hvd_ext.tensorflow.gradients.channel import Channel
    from hvd_ext.tensorflow.gradients.reducer import GradientSet
    from hvd_ext.tensorflow.gradients.step import Step


class Delayed(Policy):
    """A step returns the results of the step before it; the first one returns none."""

    feature = "delay"
    joins = False
    outlives = False
    keeps = "delayed"
    changes_nothing_alone = False
    may_skip = True
    dense_only = True

    def __init__(self, gradients: GradientSet) -> None:
        super().__init__(gradients)
        # whether there is a result that no step has returned yet; None before the first channel, and in a session
        self._has_result: tf.Variable | None = None

    def plan(self) -> dict[str, Any]:
        """Return the delay."""
        return {"delay": self.gradients.options.delay}

    def opened(self, channel: Channel, before: Channel | None) -> None:
        """Begin without a result."""
        self._has_result = None
        if tf.compat.v1.executing_eagerly_outside_functions():  # a session's variables would need an initializer
            with tf.init_scope(), tf.device("CPU:0"):
                self._has_result = tf.Variable(False, trainable=False, name="hvd_ext_delayed")
        self._set_result(
            [np.zeros(tensor.shape, carried.numpy_dtype(tensor)) for tensor in channel.layout.engine_tensors]
        )

    def begin(self, step: Step) -> None:
        """Find whether there is a result; the next step has this step's."""
        if self._has_result is None:
            step.applies = tf.constant(True)
            return
        with tf.device("CPU:0"):
            step.applies = tf.identity(self._has_result.read_value())
            with tf.control_dependencies([step.applies] if not tf.executing_eagerly() else []):
                self._has_result.assign(not step.absent, read_value=False)

    def reduce(self, step: Step, gradients: Sequence[tf.Tensor | None]) -> list[tf.Tensor | None]:
        """Reduce the gradients, and return the results of the step before; an absent step only returns these."""
        if not step.absent:
            return super().reduce(step, gradients)
        arrays = self._collected()
        self._set_result([np.zeros_like(array) for array in arrays])
        layout = self._channel.layout
        results: list[tf.Tensor | None] = [None] * len(layout.tensors)
        for place, array in zip(layout.sent_tensors, arrays, strict=True):
            results[place] = tf.constant(array)
        return results

    def behind(self) -> int:
        """Return 1 if there is a result."""
        return int(self._has_result is not None and bool(self._has_result.numpy()))

    def save(self) -> Arrays:
        """Copy the result of the last step."""
        if not self.behind() or not self.gradients.is_open:
            return {}
        arrays = self._collected()
        self._set_result(arrays)
        saved = {carried.RANKS: np.array(self.gradients.job.engine.size)}
        for number, (tensor, array) in enumerate(zip(self._channel.layout.engine_tensors, arrays, strict=True)):
            saved |= carried.named(number, tensor, array)
        return saved

    def load(self, own: Arrays | None, everyone: Everyone) -> None:
        """Return the saved result in the next step; of another number of ranks, that of the first rank."""
        arrays, engine = own, self.gradients.job.engine
        if own is None or int(own.get(carried.RANKS, 0)) != engine.size:
            saved, name = None, self._channel.name
            if engine.rank == 0:
                try:
                    saved = next(iter(everyone()), None)
                except (HvdExtError, OSError) as error:
                    logger.warning("%s: the result that was late is dropped: %s", name, error)
            process_set = self.gradients.options.process_set
            arrays = broadcast_object(saved, engine.ranks[0], name=f"{name}: late result", process_set=process_set)
        if arrays and self._has_result is not None:
            self._set_result(carried.by_number(self._channel, arrays).values())
            self._has_result.assign(True)

    @property
    def _channel(self) -> Channel:
        return self.gradients.channels[-1]

    def _collected(self) -> list[np.ndarray]:
        channel, engine = self._channel, self.gradients.job.engine
        arrays = [carried.empty(tensor) for tensor in channel.layout.engine_tensors]
        newest = engine.progress(channel.handle).step  # it may still be under way
        engine.collect(channel.handle, newest, arrays)
        return arrays

    def _set_result(self, arrays: Iterable[np.ndarray]) -> None:
        for number, array in enumerate(arrays):
            self.gradients.job.engine.give_result(self._channel.handle, number, array)


POLICY = Delayed
