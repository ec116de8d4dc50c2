"""`sync=` other than "full": partial rounds, which do not wait for all ranks; late gradients enter a later round."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hvd_ext.engine.partial import Partial
from hvd_ext.errors import HvdExtError
from hvd_ext.job.log import logger
from hvd_ext.options import Sum
from hvd_ext.state import Arrays, Everyone
from hvd_ext.tensorflow.gradients import carried, kinds
from hvd_ext.tensorflow.gradients.quorum import AutoQuorum
from hvd_ext.tensorflow.gradients.step import Policy

if TYPE_CHECKING:
    from hvd_ext.tensorflow.gradients.channel import Channel
    from hvd_ext.tensorflow.gradients.reducer import GradientSet
    from hvd_ext.tensorflow.gradients.step import Step

# the names of what is saved beside the tensors
_ROUNDS, _QUORUM = "rounds", "quorum"


class Late(Policy):
    """Each step takes the result of its round, whether or not this rank's gradients are in it."""

    feature = "partial rounds"
    joins = False
    outlives = False
    keeps = "held"
    changes_nothing_alone = False
    dense_only = True
    flushes = True
    agrees_once = True

    def __init__(self, gradients: GradientSet) -> None:
        super().__init__(gradients)
        self._auto: AutoQuorum | None = None  # on rank 0 with sync="auto"

    @classmethod
    def steps_before(cls, own: Arrays | None, everyone: Everyone) -> int | None:
        """Give the number of rounds: the optimizer does not count steps that it skips."""
        saved = carried.any_saved(own, everyone)
        return int(saved[_ROUNDS]) if saved and _ROUNDS in saved else None

    @classmethod
    def check(cls, label: str, variable: Any) -> None:
        """Refuse a variable of a layer whose forward pass waits for all ranks."""
        kinds.refuse_meeting(label, variable, cls.feature)

    def plan(self) -> dict[str, Any]:
        """Say what makes the rounds partial."""
        options, before = self.gradients.options, self.gradients.first_step()
        if options.sync == "auto":  # begins with all ranks
            options = dataclasses.replace(options, sync="quorum", quorum=self.gradients.job.engine.size)
        return {"partial": Partial(options, before=before, holds_again=self.gradients.holds_again)}

    def opened(self, channel: Channel, before: Channel | None) -> None:
        """Hold no gradients; with sync="auto" rank 0 chooses the quorum."""
        options, job = self.gradients.options, self.gradients.job
        self._auto = AutoQuorum(channel, job) if options.sync == "auto" and job.engine.rank == 0 else None

    def reduce(self, step: Step, gradients: Sequence[tf.Tensor | None]) -> list[tf.Tensor | None]:
        """Reduce the gradients; an absent step takes the result of its round, which is complete."""
        return step.channel.reduce(None) if step.absent else super().reduce(step, gradients)

    def behind(self) -> int:
        """Give the number of complete rounds whose steps this rank has not begun."""
        (channel,) = self.gradients.channels
        return self.gradients.job.engine.progress(channel.handle).behind

    def save(self) -> Arrays:
        """Copy the gradients that this rank holds, the number of rounds, and the quorum that was chosen."""
        if not self.gradients.channels or not self.gradients.is_open:
            return {}
        (channel,), engine = self.gradients.channels, self.gradients.job.engine
        assert channel.partial is not None
        state: Arrays = {
            carried.RANKS: np.array(engine.size),
            _ROUNDS: np.array(channel.partial.before + engine.progress(channel.handle).step),
        }
        if self._auto is not None:
            state[_QUORUM] = np.array(self._auto.quorum)
        if engine.holds(channel.handle):
            for number, tensor in enumerate(channel.layout.engine_tensors):
                array = carried.empty(tensor)
                engine.read_held(channel.handle, number, array)
                state |= carried.named(number, tensor, array)
        return state

    def load(self, own: Arrays | None, everyone: Everyone) -> None:
        """Hold the saved gradients again.

        With another number of ranks, rank 0 holds the sum over the ranks; with op=Average times the ratio of the new
        number to the old one, so that the pending update stays the same.
        """
        (channel,), engine = self.gradients.channels, self.gradients.job.engine
        if own is not None and int(own[carried.RANKS]) == engine.size:
            self._write(carried.by_number(channel, own))
            if self._auto is not None and _QUORUM in own:
                self._auto.set(int(own[_QUORUM]))
        elif engine.rank == 0:
            try:
                self._write(self._sums(everyone()))
            except (HvdExtError, OSError, KeyError) as error:
                logger.warning(
                    "%s: it was saved by a job of another number of ranks, and rank 0 cannot read the files of all of "
                    "them, so the gradients that were held are dropped: %s: %s; save to a disk that all ranks share",
                    channel.name,
                    type(error).__name__,
                    error,
                )

    def flush(self, ahead: int) -> None:
        """Make a round wait for the gradients of all ranks."""
        if self.gradients.channels and self.gradients.is_open:
            self.gradients.job.engine.flush(self.gradients.channels[0].handle, ahead)

    def _sums(self, states: Iterable[Arrays]) -> dict[int, np.ndarray]:
        (channel,) = self.gradients.channels
        totals: dict[int, np.ndarray] = {}
        scale = 1.0
        for state in states:
            if self.gradients.options.op != Sum:
                scale = self.gradients.job.engine.size / int(state[carried.RANKS])
            for number, values in carried.by_number(channel, state).items():
                totals[number] = totals.get(number, 0) + values.astype(np.float64)
        tensors = channel.layout.engine_tensors
        return {
            number: (total * scale).astype(carried.numpy_dtype(tensors[number])) for number, total in totals.items()
        }

    def _write(self, arrays: dict[int, np.ndarray]) -> None:
        (channel,) = self.gradients.channels
        for number, array in arrays.items():
            self.gradients.job.engine.write_held(channel.handle, number, array)


POLICY = Late
