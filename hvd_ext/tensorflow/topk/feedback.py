"""The error feedback of one list of top-k gradients: densities, skipped steps, and the state for checkpoints.

Densities and the number of steps are equal on all ranks, because ranks with different densities would run different
plans. Residuals and velocities differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hvd_ext.errors import HvdExtError
from hvd_ext.job import consensus
from hvd_ext.job.log import logger
from hvd_ext.options import Sum
from hvd_ext.state import Arrays, Everyone
from hvd_ext.tensorflow import ops
from hvd_ext.tensorflow.gradients.carried import any_saved
from hvd_ext.tensorflow.skipping import FiniteSteps
from hvd_ext.tensorflow.topk import residuals
from hvd_ext.tensorflow.topk.auto_density import AutoDensity

if TYPE_CHECKING:
    from hvd_ext.tensorflow.gradients.channel import Channel
    from hvd_ext.tensorflow.gradients.reducer import GradientSet

# the names of the values that are saved beside the pieces of tensors; the name of a piece has a slash
_RANKS, _STEPS, _FLUSHING, _WHOLE = "ranks", "steps", "flushing", "whole"


class Feedback:
    """The error feedback of one list of gradients, over all its channels.

    Args:
        gradients: the list, with an open channel; all ranks make this together.
    """

    def __init__(self, gradients: GradientSet) -> None:
        options, self._label, self._name = gradients.options, gradients.label, gradients.name
        assert options.codec is not None
        self._options, self._job = options, gradients.job
        self._momentum, self._keys = gradients.momentum, gradients.keys
        self._counters = gradients.counters
        self._finite = FiniteSteps(gradients)
        self._schedule, self._until = options.codec.schedule, options.codec.until
        with tf.init_scope(), tf.device("CPU:0"):
            self._flushing: dict[Channel, tf.Variable] = {}
            self._auto: AutoDensity | None = None
            if options.codec.density == "auto":
                self._auto = AutoDensity(self._label, self._name, self._job, options.process_set)
                self._counters |= self._auto.variables

    @property
    def steps(self) -> int:
        """The number of update steps so far, without the skipped ones."""
        return int(self._finite.applied.numpy())

    def flush(self) -> None:
        """Make the next step dense."""
        for flushing in self._flushing.values():
            flushing.assign(True)

    def opened(self, channel: Channel) -> None:
        """Add a channel. Traced functions keep using their channel, so each channel is flushed on its own."""
        with tf.init_scope(), tf.device("CPU:0"):
            start = any(bool(flushing.numpy()) for flushing in self._flushing.values())
            self._flushing[channel] = tf.Variable(start, trainable=False, name="hvd_ext_topk_flushing")
        self._counters[f"flushing {len(self._flushing)}"] = self._flushing[channel]

    def density(self, channel: Channel) -> tf.Tensor:
        """Return the density of the next step, a float64 scalar."""
        with tf.device("CPU:0"):
            firsts = tf.constant(self._schedule.firsts, tf.int64)
            place = tf.reduce_sum(tf.cast(self._finite.applied.read_value() >= firsts, tf.int32)) - 1
            densities = tf.constant(self._schedule.densities, tf.float64)
            scheduled = tf.gather(densities, place)
            if self._auto is not None:
                last = tf.equal(place, len(self._schedule.firsts) - 1)
                scheduled = tf.where(last, self._auto.density(), scheduled)
            sends_all = self._flushing[channel].read_value()
            if self._until is not None:  # the last step before it, and until all residuals are sent
                sends_all = tf.logical_or(sends_all, self._finite.applied.read_value() >= self._until - 1)
            return tf.where(sends_all, tf.constant(1.0, tf.float64), scheduled)

    def ended(self, channel: Channel, reduced: Sequence[Any], rates: Sequence[Any]) -> tuple[list[Any], tf.Tensor]:
        """End a step: its residuals and velocities are kept if all gradients are finite, and dropped otherwise.

        Args:
            rates: for each gradient the learning rate that it was multiplied by; 1 if there was none.

        Returns:
            The same gradients, which are not ready before the step has ended; and whether all of them are finite, equal
            on all ranks.
        """
        tensors = [gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient for gradient in reduced]
        ok = FiniteSteps.are_finite(reduced)
        flushing = self._flushing[channel]
        ended = [channel.end_step(ok)] if channel.selects else []
        after = [operation for operation in ended if operation is not None]
        with tf.control_dependencies(after), tf.device("CPU:0"):
            flushed = flushing.assign(tf.logical_and(flushing.read_value(), tf.logical_not(ok)), read_value=False)
            if self._auto is not None:
                self._auto.seen(tensors, rates, ok)
            self._finite.count(ok, [flushed])
        return ops.together(list(reduced), after), ok

    def save(self, channels: Sequence[Channel]) -> Arrays:
        """Copy this rank's state, between two steps, from the open channels of the list, the newest first."""
        arrays: Arrays = {}
        for channel in channels:
            for key, array in residuals.read(channel, self._job.engine).items():
                arrays[key] = arrays[key] + array if key in arrays else array
        return {
            **arrays,
            _RANKS: np.array(self._job.engine.size),
            _STEPS: np.array(self.steps),
            _FLUSHING: np.array(any(bool(flushing.numpy()) for flushing in self._flushing.values())),
            **({_WHOLE: np.array(True)} if channels and all(channel.is_whole for channel in channels) else {}),
            **({} if self._auto is None else self._auto.save()),
            **({} if self._momentum is None else self._momentum.save(self._keys)),
        }

    def was_whole(self, local: Arrays | None, of_ranks: Everyone) -> bool | None:
        """Tell whether saved gradients were whole and shall be so here; None: not known. All ranks call it."""
        saved = any_saved(local, of_ranks)
        answers = consensus.exchange(
            self._job.engine,
            f"{self._name}: whole gradients",
            lambda: None if saved is None else [_WHOLE in saved, int(saved[_STEPS])],
        )
        known = next((answer for answer in answers if answer is not None), None)
        return None if known is None else known[0] and known[1] >= (self._until or 0)

    def load(self, channel: Channel, local: Arrays | None, of_ranks: Everyone) -> None:
        """Restore the state that `save` returned in an earlier job of any shape; all ranks call it, between two steps.

        If the job has the same shape, every rank gets its own state back. Otherwise the residuals that the ranks had of
        an element are added up, and the first rank that now keeps this element gets the sum. With op=Average the sum is
        multiplied by the ratio of the new number of ranks to the old one, so that the pending update stays the same.

        Args:
            of_ranks: returns the state of each rank of the earlier job; called only if the shape is another one.
        """
        engine, name = self._job.engine, f"{self._name}: residuals and velocities"
        pieces = residuals.pieces(channel, engine)
        kept = {} if local is None else {key: array for key, array in local.items() if "/" in key}
        saved_ranks = None if local is None else int(local[_RANKS])
        same = saved_ranks == engine.size and {piece.where for piece in pieces} == {
            residuals.parsed(key, array).where for key, array in kept.items()
        }
        answers = consensus.exchange(
            engine, name, lambda: {"same": same, "wanted": [piece.where for piece in pieces], "own": local is not None}
        )
        if all(answer["same"] for answer in answers):
            assert local is not None
            residuals.write(channel, engine, kept)
            self._go_on(local, pieces)
            return
        first, trouble, arrays = None, "", {}
        try:
            masks = residuals.claims([[tuple(where) for where in answer["wanted"]] for answer in answers], engine.rank)
            states = iter(of_ranks())
            first = next(states)
            scale = 1.0 if self._options.op == Sum else engine.size / int(first[_RANKS])
            arrays = residuals.regrouped(pieces, masks, _pieces_only(first, states), scale)
        except (HvdExtError, OSError, StopIteration, KeyError) as error:
            trouble = f"{type(error).__name__}: {error}"
        troubles = consensus.exchange(engine, name, lambda: trouble)
        lacking = next((rank for rank, trouble_of_rank in enumerate(troubles) if trouble_of_rank), None)
        if lacking is not None:
            if engine.rank == 0:
                logger.warning(
                    "%s: it was saved by a job of another shape, and rank %d cannot read the files of all ranks, so "
                    "its residuals and velocities are dropped: %s; save to a disk that all ranks share",
                    self._label,
                    engine.ranks[lacking],
                    troubles[lacking],
                )
            return
        assert first is not None
        residuals.write(channel, engine, arrays)
        self._go_on(first, pieces)
        if engine.rank == 0 and not channel.is_whole:
            logger.info("%s: residuals and velocities are redistributed over %d ranks", self._label, engine.size)

    def move(self, old: Channel, new: Channel) -> None:
        """Move the state from a channel to the one that replaces it; all ranks call it, between two steps."""
        engine, process_set = self._job.engine, self._options.process_set
        local, wanted = residuals.read(old, engine), residuals.pieces(new, engine)
        name = f"{self._name}: residuals and velocities"
        residuals.write(new, engine, residuals.redistributed(self._job, name, local, wanted, process_set))
        self.clear(old)

    def clear(self, channel: Channel) -> None:
        """Set the residuals and velocities of a channel to 0, once another channel has replaced it."""
        residuals.write(channel, self._job.engine, {})

    def _go_on(self, saved: Arrays, pieces: Sequence[residuals.Piece]) -> None:
        has = any(piece.which == residuals.VELOCITY for piece in pieces)
        if self._job.engine.rank == 0 and had_momentum(saved) and not has:
            tell_of_momentum(self._label, "with")
        self._finite.applied.assign(int(saved[_STEPS]))
        for flushing in self._flushing.values():
            flushing.assign(bool(saved[_FLUSHING]))
        if self._auto is not None:
            self._auto.load(saved)
        if self._momentum is not None:
            self._momentum.load(self._keys, saved)


def had_momentum(saved: Arrays) -> bool:
    """Whether a state from `Feedback.save` has velocities, the momentum that was taken over from an optimizer."""
    return any(key.startswith(residuals.VELOCITY) for key in saved)


def tell_of_momentum(label: str, how: str) -> None:
    """Warn that switching momentum_correction loses the momentum; `how` was "with" or "without" it."""
    logger.warning("%s: trained %s momentum_correction until now: momentum restarts from zero", label, how)


def _pieces_only(first: Arrays, others: Iterable[Arrays]) -> Iterable[Arrays]:
    for state in (first, *others):
        yield {key: array for key, array in state.items() if "/" in key}
