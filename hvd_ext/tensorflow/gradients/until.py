"""`TopK(until=...)`: the switch of a channel to whole gradients, before the step that the option names.

The step before it is dense, so that all residuals are sent and applied. The switch is one of layouts between two steps,
as when buckets are planned again: a traced graph knows channels and tensors and no buckets, and stays as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_ext.errors import HvdExtError
from hvd_ext.job import banner, consensus
from hvd_ext.job.log import logger
from hvd_ext.tensorflow.gradients import explanation
from hvd_ext.tensorflow.topk import residuals

if TYPE_CHECKING:
    from hvd_ext.planning.layout import Layout
    from hvd_ext.tensorflow.gradients.channel import Channel
    from hvd_ext.tensorflow.gradients.reducer import GradientSet
    from hvd_ext.tensorflow.topk.feedback import Feedback


class Until:
    """The switch of one channel.

    Args:
        channel: the newest channel of its list, which selects.
        gradients: the list.
    """

    def __init__(self, channel: Channel, feedback: Feedback, gradients: GradientSet) -> None:
        codec = gradients.options.codec
        assert codec is not None
        assert codec.until is not None
        self._channel, self._feedback, self._gradients, self._job = channel, feedback, gradients, gradients.job
        # of the exchanges
        self._name = f"{gradients.name}: channel {len(gradients.channels)}"
        self._until = codec.until
        self._alone = True

    def begin(self, whole: bool) -> None:
        """Send whole gradients from the next step on, or from `until` on; all ranks call it alike, between two steps.

        What the channel keeps is lost.

        Args:
            whole: whether from the next step on, because an earlier job had switched already.
        """
        channel = self._channel
        if whole != channel.is_whole:
            channel.switch(channel.lay_out(None, whole=whole), channel.steps + 1)
        if not whole:
            self._look_at(0)

    def resume(self) -> None:
        """Continue after all ranks have joined, between two steps; all ranks call it."""
        if not self._channel.is_whole:
            self._look_at(0)

    def not_alone(self) -> None:
        """Look before every step from now on: another channel of the list counts steps too."""
        self._alone = False
        if not self._channel.is_whole:
            self._look_at(0)

    def _look_at(self, number: int) -> None:
        """Look before this step of the channel, or before its next one."""
        self._job.engine.at_step(self._channel.handle, number, self._look, "until")

    def _look(self, number: int) -> None:
        """Switch before a step of the channel begins, if it is time; if that fails, the training ends."""
        channel = self._channel
        if channel.is_whole:  # since it was told to look
            return
        try:
            left = self._until - self._feedback.steps
            if left > 0 or not self._switched(number):
                self._look_at(number + (max(1, left) if self._alone else 1))
        except Exception as error:
            logger.error("%s: it could not change to whole gradients, and is closed: %s", channel.name, error)
            channel.close()  # the ranks may no longer agree

    def _switched(self, number: int) -> bool:
        """Switch, unless residuals are left on some rank, which the coming step sends then."""
        channel, job = self._channel, self._job
        replanning, momentum = self._gradients.replannings.get(channel), self._gradients.momentum
        times = replanning.reviews[-1].times if replanning is not None and replanning.reviews else None
        made: list[Layout] = []

        def planned() -> list[object]:
            kept = residuals.read(channel, job.engine)
            waits = any(np.any(array) for key, array in kept.items() if key.startswith(residuals.RESIDUAL))
            made.append(channel.lay_out(times, whole=True))
            return [waits, f"{made[0].digest:016x}"]

        answers, joined = consensus.exchange_in_step(job.engine, f"{self._name}, whole gradients", planned)
        if joined or any(waits for waits, _ in answers):
            return False
        if any(digest != answers[0][1] for _, digest in answers):
            raise HvdExtError("the ranks came to different plans")
        (layout,) = made
        velocities = {} if momentum is None else self._velocities()
        channel.switch(layout, number)
        if momentum is not None:
            momentum.give_back(velocities)
        banner.say(job, f"{channel.name}: gradients are sent whole from update step {self._feedback.steps} on")
        explanation.say(job, channel.name, layout, None)
        return True

    def _velocities(self) -> dict[Any, np.ndarray]:
        """Add up the ranks' velocities of each tensor, on the scale of reduced gradients."""
        options, channel = self._gradients.options, self._channel
        velocities = residuals.summed(
            channel,
            self._job,
            f"{self._name}, velocities",
            residuals.VELOCITY,
            channel.with_momentum,
            op=options.op,
            factor=options.gradient_predivide_factor,
            process_set=options.process_set,
        )
        return {self._gradients.keys[place]: velocity for place, velocity in velocities.items()}
