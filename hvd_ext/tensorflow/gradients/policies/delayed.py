"""`delay=1`: a step applies the results of the step before it, so that computation hides communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvd_ext.state import Arrays, Everyone
from hvd_ext.tensorflow.gradients.carried import Delayed as Result
from hvd_ext.tensorflow.gradients.step import Policy

if TYPE_CHECKING:
    from hvd_ext.tensorflow.gradients.channel import Channel
    from hvd_ext.tensorflow.gradients.reducer import GradientSet
    from hvd_ext.tensorflow.gradients.step import Step


class Delayed(Policy):
    """A step returns the results of the step before it; the first one returns none."""

    feature = "delay"
    keeps = "delayed"
    changes_nothing_alone = False
    may_skip = True
    dense_only = True

    def __init__(self, gradients: GradientSet) -> None:
        super().__init__(gradients)
        self._result: Result | None = None

    def plan(self) -> dict[str, Any]:
        """Return the delay."""
        return {"delay": self.gradients.options.delay}

    def opened(self, channel: Channel, before: Channel | None) -> None:
        """Begin without a result."""
        self._result = Result(channel, self.gradients.job, self.gradients.options.process_set)

    def begin(self, step: Step) -> None:
        """Find whether there is a result; the next step has this step's."""
        assert self._result is not None
        step.applies = self._result.next_step(gives=not step.absent)

    def reduce(self, step: Step, gradients: Sequence[tf.Tensor | None]) -> list[tf.Tensor | None]:
        """Reduce the gradients, and return the results of the step before; an absent step only returns these."""
        assert self._result is not None
        return self._result.take() if step.absent else super().reduce(step, gradients)

    def behind(self) -> int:
        """Return 1 if there is a result."""
        return int(self._result is not None and self._result.is_there)

    def save(self) -> Arrays:
        """Copy the result of the last step."""
        return {} if self._result is None or not self.gradients.is_open else self._result.save()

    def load(self, own: Arrays | None, everyone: Everyone) -> None:
        """Return the saved result in the next step."""
        assert self._result is not None
        self._result.load(own, everyone)


POLICY = Delayed
