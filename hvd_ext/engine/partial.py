"""The channels of an engine whose rounds do not wait for all ranks (`tf_ops/engine/rounds.h`).

A round is one allreduce of a whole step's gradients. A rank whose gradient is not there when a round begins gives what
it holds from earlier steps, or zeros. Step s of every rank takes the result of round s.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_ext.engine import native, spec
from hvd_ext.engine.channels import Channels, check_array
from hvd_ext.engine.native import call as _call
from hvd_ext.errors import InvalidError
from hvd_ext.options.reduction import ENGINE_TYPES
from hvd_ext.simulation.modes import MODES

if TYPE_CHECKING:
    from hvd_ext.options.gradients import GradientOptions


KEPT_ROUNDS = 10_000  # of which the engine keeps what is known (kRoundsKept of partial_gate.cc)


@dataclasses.dataclass(frozen=True)
class Partial:
    """What makes a channel's rounds partial; equal on all ranks.

    Args:
        options: the reduction's; its sync is one of `MODES`.
        seed: decides which ranks are drawn with "majority".
        before: rounds that the training had before this channel, so that it goes on with other draws.
        holds_again: a round whose sum is not finite is discarded, and its finite gradients are requeued.
    """

    options: GradientOptions
    seed: int = 0
    before: int = 0
    holds_again: bool = False

    def described(self, hosts: Sequence[int], plan: int, segment_nbytes: int) -> ctypes.Structure:
        """Give the engine's form.

        Args:
            hosts: the host of each rank.
            plan: the handle of a plan that sums the table of who takes part.
            segment_nbytes: the size of its segments.
        """
        options = {name: getattr(self.options, name) for name in ENGINE_TYPES}
        return spec.filled(
            spec.Partial,
            **{**options, "quorum": self.options.quorum or 1},
            sync=MODES.index(self.options.sync),
            holds_again=self.holds_again,
            before=self.before,
            seed=self.seed,
            plan=plan,
            segment_nbytes=segment_nbytes,
            hosts=native.int32s(hosts),
        )


class Rounds(NamedTuple):
    """Complete rounds, the oldest first.

    Attributes:
        numbers: of the rounds, int64 [rounds].
        begins_s: when they began on this rank, by a steady clock of this host, seconds [rounds].
        finished_s: when they were complete on this rank, by the same clock [rounds].
        waited_s: how long before that this rank asked for the result; 0 if it asked later [rounds].
        arrived: for each rank the newest step whose gradient is in the round, or in one before it, int64 [rounds,
            ranks]. A rank gave its gradient in time where this is the round's number.
        flags: what each rank sent along (`PartialChannels.set_flags`), int64 [rounds, ranks].
        announced_s: on rank 0 when it learned that the gradient of this step is there, by the same clock; 0: not yet,
            and on other ranks [rounds, ranks].
    """

    numbers: npt.NDArray[np.int64]
    begins_s: npt.NDArray[np.float64]
    finished_s: npt.NDArray[np.float64]
    waited_s: npt.NDArray[np.float64]
    arrived: npt.NDArray[np.int64]
    flags: npt.NDArray[np.int64]
    announced_s: npt.NDArray[np.float64]


class Progress(NamedTuple):
    """How far a rank is.

    Attributes:
        step: the newest step that this rank has begun.
        over: the newest round, or step of a channel that waits for all ranks, that is over.
    """

    step: int
    over: int

    @property
    def behind(self) -> int:
        """How many rounds are over whose steps this rank has not begun."""
        return max(0, self.over - self.step)


class PartialChannels(Channels):
    """The part of `hvd_ext.engine.engine.Engine` that is about partial channels; each takes a handle of such a one."""

    size: int

    def skip_step(self, channel: int) -> int:
        """Begin a step without a gradient of this rank, whose round is over; return its number, for `collect`.

        Raises:
            InvalidError: the round of this rank's next step is not over.
        """
        ticket = ctypes.c_int64()
        _call("hvd_ext_channel_skip_step", channel, ctypes.byref(ticket))
        return ticket.value

    def flush(self, channel: int, ahead: int = 1) -> None:
        """Make the round of this rank's gradient after the next `ahead` - 1 ones wait for those of all ranks."""
        _call("hvd_ext_channel_flush", channel, ahead)

    def leave(self, channel: int) -> None:
        """Give no gradients until all ranks have left: no round waits for this rank. Go on with `next_round`."""
        _call("hvd_ext_channel_leave", channel)

    def next_round(self, channel: int) -> bool:
        """Wait until the round of this rank's next step is over.

        Returns:
            False if all ranks have left and this rank has taken the results of all rounds; every rank gives gradients
            again afterwards.
        """
        more = ctypes.c_int32()
        _call("hvd_ext_channel_next_round", channel, ctypes.byref(more))
        return bool(more.value)

    def progress(self, channel: int) -> Progress:
        """Return how far this rank and the rounds are; of a channel that waits for all ranks, its steps."""
        step, over = ctypes.c_int64(), ctypes.c_int64()
        _call("hvd_ext_channel_progress", channel, ctypes.byref(step), ctypes.byref(over))
        return Progress(step.value, over.value)

    def set_quorum(self, channel: int, quorum: int) -> None:
        """Change the quorum of the rounds that are not open yet; it takes effect on rank 0.

        Raises:
            InvalidError: it is not in [1, size].
        """
        _call("hvd_ext_channel_set_quorum", channel, quorum)

    def set_flags(self, channel: int, flags: int) -> None:
        """Set bits, below 2^31, that travel with this rank's part of each round that begins from now on."""
        _call("hvd_ext_channel_set_flags", channel, flags)

    def rounds(self, channel: int, first: int = 1, most: int = KEPT_ROUNDS) -> Rounds:
        """Return what is known of rounds that are over.

        Args:
            channel: the channel.
            first: the number of the first round that is wanted; rounds older than the newest `KEPT_ROUNDS` are gone.
            most: the largest number of rounds.
        """
        numbers, arrived, flags = np.zeros(most, np.int64), *np.zeros((2, most, self.size), np.int64)
        begins_s, finished_s, waited_s = np.zeros((3, most))
        announced_s, count = np.zeros((most, self.size)), ctypes.c_int64()
        rounds = Rounds(numbers, begins_s, finished_s, waited_s, arrived, flags, announced_s)
        pointers = map(native.pointer, rounds)
        _call("hvd_ext_channel_rounds", channel, first, most, self.size, *pointers, ctypes.byref(count))
        return Rounds._make(array[: count.value] for array in rounds)

    def holds(self, channel: int) -> bool:
        """Whether this rank holds gradients that were in no round yet."""
        held = ctypes.c_int32()
        _call("hvd_ext_channel_held_read", channel, 0, None, ctypes.byref(held))
        return bool(held.value)

    def read_held(self, channel: int, tensor: int, out: npt.NDArray[np.generic]) -> None:
        """Copy what this rank holds of a tensor, between two steps.

        Args:
            channel: the channel.
            tensor: the tensor's number in the channel.
            out: a contiguous array of the tensor's size and dtype; zeros where nothing is held.

        Raises:
            InvalidError: there is no such tensor, or the array does not fit.
        """
        self._check_held(channel, tensor, out)
        held = ctypes.c_int32()
        _call("hvd_ext_channel_held_read", channel, tensor, ctypes.c_void_p(out.ctypes.data), ctypes.byref(held))

    def write_held(self, channel: int, tensor: int, values: npt.NDArray[np.generic]) -> None:
        """Set what this rank holds of a tensor, between two steps; what it holds of the others stays.

        Args:
            channel: the channel.
            tensor: the tensor's number in the channel.
            values: a contiguous array of the tensor's size and dtype.

        Raises:
            InvalidError: there is no such tensor, or the array does not fit.
        """
        self._check_held(channel, tensor, values)
        _call("hvd_ext_channel_held_write", channel, tensor, ctypes.c_void_p(values.ctypes.data))

    def _check_held(self, channel: int, tensor: int, array: npt.NDArray[np.generic]) -> None:
        opened = self.open_channels()[channel]
        tensors = opened.layout.engine_tensors
        if not 0 <= tensor < len(tensors):
            raise InvalidError(f"tensor ({tensor}) of {opened.name!r}: must be in [0, {len(tensors)})")
        check_array(f"held of {opened.name!r}", tensors[tensor], array)
