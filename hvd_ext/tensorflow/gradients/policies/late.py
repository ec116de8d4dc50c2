"""`sync=` other than "full": partial rounds, which do not wait for all ranks; late gradients enter a later round."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvd_ext.engine.partial import Partial
from hvd_ext.state import Arrays, Everyone
from hvd_ext.tensorflow.gradients import carried, kinds
from hvd_ext.tensorflow.gradients.carried import Held
from hvd_ext.tensorflow.gradients.quorum import AutoQuorum
from hvd_ext.tensorflow.gradients.step import Policy

if TYPE_CHECKING:
    from hvd_ext.tensorflow.gradients.channel import Channel
    from hvd_ext.tensorflow.gradients.reducer import GradientSet
    from hvd_ext.tensorflow.gradients.step import Step


class Late(Policy):
    """Each step takes the result of its round, whether or not this rank's gradients are in it."""

    feature = "partial rounds"
    keeps = "held"
    changes_nothing_alone = False
    dense_only = True
    agrees_once = True

    def __init__(self, gradients: GradientSet) -> None:
        super().__init__(gradients)
        self._held: Held | None = None

    @classmethod
    def steps_before(cls, own: Arrays | None, everyone: Everyone) -> int | None:
        """Give the number of rounds: the optimizer does not count steps that it skips."""
        return carried.rounds(own, everyone)

    @classmethod
    def check(cls, label: str, variable: Any) -> None:
        """Refuse a variable of a layer whose forward pass waits for all ranks."""
        kinds.refuse_meeting(label, variable)

    def plan(self) -> dict[str, Any]:
        """Say what makes the rounds partial."""
        options, before = self.gradients.options, self.gradients.first_step()
        if options.sync == "auto":  # begins with all ranks
            options = dataclasses.replace(options, sync="quorum", quorum=self.gradients.job.engine.size)
        return {"partial": Partial(options, before=before, holds_again=self.gradients.holds_again)}

    def opened(self, channel: Channel, before: Channel | None) -> None:
        """Hold no gradients; with sync="auto" rank 0 chooses the quorum."""
        options, job = self.gradients.options, self.gradients.job
        auto = AutoQuorum(channel, job) if options.sync == "auto" and job.engine.rank == 0 else None
        self._held = Held(channel, options, job, auto)

    def reduce(self, step: Step, gradients: Sequence[tf.Tensor | None]) -> list[tf.Tensor | None]:
        """Reduce the gradients; an absent step takes the result of its round, which is complete."""
        return step.channel.reduce(None) if step.absent else super().reduce(step, gradients)

    def behind(self) -> int:
        """Give the number of complete rounds whose steps this rank has not begun."""
        (channel,) = self.gradients.channels
        return self.gradients.job.engine.progress(channel.handle).behind

    def save(self) -> Arrays:
        """Copy the gradients that this rank holds, and the number of rounds."""
        return {} if self._held is None or not self.gradients.is_open else self._held.save()

    def load(self, own: Arrays | None, everyone: Everyone) -> None:
        """Hold the saved gradients again."""
        assert self._held is not None
        self._held.load(own, everyone)

    def flush(self, ahead: int) -> None:
        """Make a round wait for the gradients of all ranks."""
        if self.gradients.channels and self.gradients.is_open:
            self.gradients.job.engine.flush(self.gradients.channels[0].handle, ahead)


POLICY = Late
