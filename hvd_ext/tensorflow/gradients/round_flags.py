"""Small numbers that ranks send along with their partial rounds, so that they agree without waiting for each other.

A round's numbers are the same on all ranks, and each rank reads them after the step that takes the round's result. So
all ranks see them after the same step.
"""

from __future__ import annotations

from typing import Any

from hvd_ext.tensorflow.gradients.reducer import GradientSet, Reducer, reducer_of

# who uses which bits
STOP_BIT, SIGNAL_BIT = 0, 1


class RoundFlags:
    """A number that this rank sends along with the rounds of an optimizer.

    Args:
        reducer: that of an optimizer whose steps do not wait for all ranks, trained on by all ranks alike.
        shift: the first of its bits; the flags of an optimizer have bits of their own, below the 31st.
        bits: the number of its bits.
    """

    def __init__(self, reducer: Reducer, shift: int, bits: int) -> None:
        self._reducer, self._shift, self._mask = reducer, shift, (1 << bits) - 1
        gradients = self._set
        self._seen = 0 if gradients is None else gradients.job.engine.progress(gradients.channels[0].handle).step

    def send(self, value: int) -> None:
        """Send a number along with this rank's part of all rounds that begin from now on; 0 for none."""
        gradients = self._set
        if gradients is not None:
            channel = gradients.channels[0]
            channel.flags = channel.flags & ~(self._mask << self._shift) | value << self._shift
            gradients.job.engine.set_flags(channel.handle, channel.flags)

    def received(self) -> int:
        """Return the first number that a rank has sent in the rounds of the steps since the last call; 0 if none has.

        All ranks call it after the same steps, and get the same answer.
        """
        gradients = self._set
        if gradients is None:
            return 0
        handle, first = gradients.channels[0].handle, self._seen + 1
        self._seen = gradients.job.engine.progress(handle).step
        if self._seen < first:
            return 0
        sent = gradients.job.engine.rounds(handle, first, self._seen - first + 1).flags
        values = sent.ravel() >> self._shift & self._mask
        return int(values[values > 0][0]) if values.any() else 0

    @property
    def _set(self) -> GradientSet | None:
        return next((gradients for gradients in self._reducer.sets if gradients.channels and gradients.is_open), None)


def partial_reducer(optimizers: Any) -> Reducer | None:
    """Return the reducer of the first optimizer whose steps do not wait for all ranks; None if there is none."""
    reducers = [reducer_of(optimizer) for optimizer in optimizers]
    return next((reducer for reducer in reducers if reducer is not None and reducer.options.partial), None)
