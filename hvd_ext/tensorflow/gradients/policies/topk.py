"""`compression=TopK(...)`: the largest elements of a gradient are sent, and the others enter later steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvd_ext.job.log import logger
from hvd_ext.state import Arrays, Everyone
from hvd_ext.tensorflow.gradients import kinds as gradient_kinds
from hvd_ext.tensorflow.gradients.step import RESIDUALS_LOST, Policy
from hvd_ext.tensorflow.gradients.until import Until
from hvd_ext.tensorflow.topk import correction, residuals
from hvd_ext.tensorflow.topk.feedback import Feedback

if TYPE_CHECKING:
    from hvd_ext.planning.layout import Layout
    from hvd_ext.tensorflow.gradients.channel import Channel
    from hvd_ext.tensorflow.gradients.reducer import GradientSet
    from hvd_ext.tensorflow.gradients.step import Step


class TopKGradients(Policy):
    """Selection with error feedback and momentum correction; with `until`, only up to a step."""

    feature = "top-k"
    outlives = False
    keeps = "top-k"
    changes_nothing_alone = False
    may_skip = True
    flushes = True
    newest_channel_only = True  # it has the residuals

    def __init__(self, gradients: GradientSet) -> None:
        super().__init__(gradients)
        assert gradients.options.codec is not None
        self._codec = gradients.options.codec
        self._feedback: Feedback | None = None
        self._untils: dict[Channel, Until] = {}

    @property
    def feedback(self) -> Feedback:
        """The error feedback, once a channel is open."""
        assert self._feedback is not None
        return self._feedback

    def classify(self, kinds: str, channel: Channel) -> str:
        """Count gradients that no rank has now as dense zeros if they have residuals, which are still sent."""
        selected = channel.layout.selected
        return "".join(gradient_kinds.DENSE if place in selected else kind for place, kind in enumerate(kinds))

    def plan(self) -> dict[str, Any]:
        """Say how gradients are selected."""
        options = self.gradients.options
        return {
            "codec": self._codec,
            "sparse_algorithm": options.sparse_algorithm,
            "momentum": self.gradients.momentum,
        }

    def opened(self, channel: Channel, before: Channel | None) -> None:
        """Give a channel the residuals of the one before it, or begin the error feedback."""
        if self._feedback is not None:
            assert before is not None
            self._feedback.opened(channel)
            self._feedback.move(before, channel)
        else:
            self._feedback = Feedback(self.gradients)
            self._feedback.opened(channel)
        self._warn_single_host(channel.layout)
        if channel.whole is not None:
            self._switch_later(channel, before)

    def begin(self, step: Step) -> None:
        """Begin the engine's step with its density and momentum."""
        channel, momentum = step.channel, self.gradients.momentum
        if channel.selects:
            now = None if momentum is None else momentum.now()
            step.begun = channel.begin(self.feedback.density(channel), now)
        if channel.whole is not None:
            with tf.control_dependencies(step.begun or []), tf.device("CPU:0"):
                step.whole = channel.whole.read_value()

    def prepare(self, step: Step, gradients: Mapping[int, Any]) -> dict[int, Any]:
        """Clip the gradients, and multiply those that go through a momentum by their rates."""
        prepared, momentum, job = dict(gradients), self.gradients.momentum, self.gradients.job
        if self._codec.clip is not None:
            clipped = _clipped(list(prepared.values()), self._codec.clip / job.engine.size**0.5)
            prepared = dict(zip(prepared, clipped, strict=True))
        if momentum is not None:
            places = [place for place in sorted(step.channel.with_momentum) if place in prepared]
            variables, own = [step.variables[place] for place in places], [prepared[place] for place in places]
            options = self.gradients.options
            corrected = correction.corrected(momentum, variables, own, step.whole, options, job, step.name)
            step.kept = places, corrected
            prepared |= zip(places, corrected.gradients, strict=True)
        return prepared

    def finish(self, step: Step, gradients: dict[int, Any]) -> dict[int, Any]:
        """Keep residuals and velocities if all gradients are finite; else the step is not applied."""
        places, corrected = step.kept or ((), None)
        rates = {} if corrected is None else dict(zip(places, corrected.rates, strict=True))
        each = [rates.get(place, 1.0) for place in gradients]
        ended, step.applies = self.feedback.ended(step.channel, list(gradients.values()), each)
        if corrected is not None:
            corrected.end(step.applies)
        return dict(zip(gradients, ended, strict=True))

    def save(self) -> Arrays:
        """Copy this rank's residuals and velocities."""
        if self._feedback is None:
            return {}
        return self._feedback.save([channel for channel in reversed(self.gradients.channels) if channel.is_open])

    def load(self, own: Arrays | None, everyone: Everyone) -> None:
        """Restore residuals and velocities, and whether gradients are sent whole."""
        whole = self.feedback.was_whole(own, everyone) if self._untils else None
        for until in self._untils.values() if whole is not None else ():
            until.begin(whole)
        for channel in self.gradients.channels[:-1]:
            self.feedback.clear(channel)
        self.feedback.load(self.gradients.channels[-1], own, everyone)

    def flush(self, ahead: int) -> None:
        """Make the next step dense; all ranks call it."""
        if self._feedback is not None:
            self._feedback.flush()

    def scale_momentum(self, factor: float) -> None:
        """Multiply this rank's velocities."""
        for channel in self.gradients.channels:
            if channel.is_open:
                residuals.scale_velocities(channel, self.gradients.job.engine, factor)

    def resume(self) -> None:
        """Look before the next step whether gradients are sent whole from now on."""
        for until in self._untils.values():
            until.resume()

    @property
    def lost_at_shutdown(self) -> str:
        """Say that residuals may wait on the ranks."""
        waits = self._feedback is not None and any(channel.layout.selected for channel in self.gradients.channels)
        return RESIDUALS_LOST if waits else ""

    def _switch_later(self, channel: Channel, before: Channel | None) -> None:
        """Have a new channel send whole gradients from `until` on, or at once if nothing waits for it."""
        until = self._codec.until
        assert until is not None
        made = self._untils[channel] = Until(channel, self.feedback, self.gradients)
        made.begin(whole=before.is_whole if before is not None else self.feedback.steps >= until)
        for one in self._untils.values() if len(self._untils) > 1 else ():
            one.not_alone()

    def _warn_single_host(self, laid_out: Layout) -> None:
        """Warn once, on the first rank, that a codec has no effect on one host."""
        job, label, codec = self.gradients.job, self.gradients.label, type(self._codec).__name__
        choices = [bucket.choice for bucket in laid_out.buckets if bucket.selection is not None]
        if job.engine.rank or not choices or any(choice and choice.selects for choice in choices):
            return
        if job.count("top-k without a selection") == 0:
            logger.warning(
                "%s: %s changes nothing in this job: gradients are selected where they leave a host, and there is "
                "one host (%d %s); they are sent whole, as without %s",
                label,
                codec,
                job.engine.size,
                "rank" if job.engine.size == 1 else "ranks",
                codec,
            )


def _clipped(gradients: Sequence[Any], limit: float) -> list[Any]:
    """Scale gradients so that their joint norm, in float32, is at most the limit; repeated rows are not added first."""
    values = [one.values if isinstance(one, tf.IndexedSlices) else one for one in gradients]
    squares = [tf.reduce_sum(tf.square(tf.cast(one, tf.float32))) for one in values]
    norm = tf.sqrt(tf.add_n(squares)) if squares else tf.constant(0.0)
    # if the norm is not finite, all gradients become NaN, so that all ranks skip the step
    factor = tf.where(tf.math.is_finite(norm), tf.where(norm > limit, limit / norm, 1.0), float("nan"))
    scaled = [one * tf.cast(factor, one.dtype) for one in values]
    return [
        tf.IndexedSlices(value, one.indices, one.dense_shape) if isinstance(one, tf.IndexedSlices) else value
        for one, value in zip(gradients, scaled, strict=True)
    ]


POLICY = TopKGradients
