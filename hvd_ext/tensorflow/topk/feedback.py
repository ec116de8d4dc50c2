"""What the ranks share about the steps of one list of gradients of which a part is sent.

The density of the next step, which steps count, and what waits on the ranks between steps. All of it is equal on all
ranks, except for what waits; ranks with different densities would run different plans.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hvd_ext.compression import density
from hvd_ext.errors import HvdExtError
from hvd_ext.job import consensus
from hvd_ext.options import Sum
from hvd_ext.options.gradients import GradientOptions
from hvd_ext.tensorflow import ops
from hvd_ext.tensorflow.topk import residuals
from hvd_ext.tensorflow.topk.auto_density import AutoDensity

if TYPE_CHECKING:
    from hvd_ext.job.runtime import Runtime
    from hvd_ext.tensorflow.gradients.channel import Channel

_LOG = logging.getLogger("hvd_ext")

Arrays = dict[str, np.ndarray]
Everyone = Callable[[], Iterable[Arrays]]

# what is saved beside the pieces of tensors; none of these names can be a piece's
_RANKS, _STEPS, _FLUSHING = "ranks", "steps", "flushing"


class Feedback:
    """The steps of one list of gradients.

    Args:
        label: whose gradients they are, for messages.
        options: with a `TopK`.
        job: the runtime of the ranks that take part.
        first_step: how many update steps there have been; the same on all ranks.
    """

    def __init__(self, label: str, options: GradientOptions, job: Runtime, first_step: int) -> None:
        assert options.topk is not None
        self._label, self._options, self._job = label, options, job
        self._schedule = density.schedule(options.topk)
        with tf.init_scope(), tf.device("CPU:0"):
            self._steps = tf.Variable(first_step, dtype=tf.int64, trainable=False, name="hvd_ext_topk_steps")
            self._flushing: dict[Channel, tf.Variable] = {}
            self._skipped = tf.Variable(0, dtype=tf.int64, trainable=False, name="hvd_ext_topk_skipped")
            self._auto = AutoDensity(label, job, options.process_set) if options.topk.density == "auto" else None

    @property
    def steps(self) -> int:
        """How many update steps there have been; those that were skipped are not counted."""
        return int(self._steps.numpy())

    @property
    def skipped(self) -> int:
        """How many steps were skipped since this began."""
        return int(self._skipped.numpy())

    def flush(self) -> None:
        """Make the next step dense."""
        for flushing in self._flushing.values():
            flushing.assign(True)

    def opened(self, channel: Channel) -> None:
        """Take note of a channel: traced functions go on with theirs, and each must be flushed."""
        with tf.init_scope(), tf.device("CPU:0"):
            start = any(bool(one.numpy()) for one in self._flushing.values())
            self._flushing[channel] = tf.Variable(start, trainable=False, name="hvd_ext_topk_flushing")

    def density(self, channel: Channel) -> tf.Tensor:
        """Give the density of the next step: float64."""
        with tf.device("CPU:0"):
            firsts = tf.constant(self._schedule.firsts, tf.int64)
            place = tf.reduce_sum(tf.cast(self._steps.read_value() >= firsts, tf.int32)) - 1
            densities = tf.constant(self._schedule.densities, tf.float64)
            scheduled = tf.gather(densities, place)
            if self._auto is not None:
                last = tf.equal(place, len(self._schedule.firsts) - 1)
                scheduled = tf.where(last, self._auto.density(), scheduled)
            return tf.where(self._flushing[channel].read_value(), tf.constant(1.0, tf.float64), scheduled)

    def ended(self, channel: Channel, reduced: Sequence[Any], rates: Sequence[Any]) -> tuple[list[Any], tf.Tensor]:
        """End a step: what waits becomes what it left, if it is finite, or stays what it was.

        Args:
            channel: that has reduced it.
            reduced: all gradients of the step that were reduced, dense ones and slices.
            rates: the learning rate in each of them; 1 where there is none.

        Returns:
            The same gradients, not ready before the step has ended; and whether all of them are finite, equal on all
            ranks.
        """
        tensors = [one.values if isinstance(one, tf.IndexedSlices) else one for one in reduced]
        finite = [tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors]
        ok = tf.reduce_all(tf.stack(finite)) if finite else tf.constant(True)
        flushing = self._flushing[channel]
        ended = [channel.end_step(ok)] if channel.selects else []
        after = [one for one in ended if one is not None]
        with tf.control_dependencies(after), tf.device("CPU:0"):
            counted = [
                self._steps.assign_add(tf.cast(ok, tf.int64), read_value=False),
                self._skipped.assign_add(tf.cast(tf.logical_not(ok), tf.int64), read_value=False),
                flushing.assign(tf.logical_and(flushing.read_value(), tf.logical_not(ok)), read_value=False),
            ]
            if self._auto is not None:
                self._auto.seen(tensors, rates, ok)
            with tf.control_dependencies([one for one in counted if one is not None]):
                self._tell(ok)
        with tf.control_dependencies(after):
            return [tf.nest.map_structure(tf.identity, one, expand_composites=True) for one in reduced], ok

    def save(self, channels: Sequence[Channel]) -> Arrays:
        """Copy what waits on this rank, between two steps.

        Args:
            channels: of the list, open ones; later ones before.

        Returns:
            Arrays by name.
        """
        arrays: Arrays = {}
        for channel in channels:
            for key, array in residuals.read(channel, self._job.engine).items():
                arrays[key] = arrays[key] + array if key in arrays else array
        return {
            **arrays,
            _RANKS: np.array(self._job.engine.size),
            _STEPS: np.array(self.steps),
            _FLUSHING: np.array(any(bool(one.numpy()) for one in self._flushing.values())),
            **({} if self._auto is None else self._auto.save()),
        }

    def load(self, channel: Channel, own: Arrays | None, everyone: Everyone) -> None:
        """Go on from what `save` gave in an earlier job of any shape; all ranks call it, between two steps.

        On the same shape every rank gets its own again. On another shape the sum of what the ranks had of an element
        goes to the first rank that keeps it now; with op=Average it is multiplied by the ratio of the numbers of ranks,
        so that the update which waits is the same.

        Args:
            channel: an open one.
            own: what this rank saved; None where there was no such rank.
            everyone: gives what each rank of the earlier job saved; read only on another shape.

        Raises:
            HvdExtError: another rank failed.
        """
        engine, name = self._job.engine, f"{self._label}: what sparse steps have left"
        pieces = residuals.pieces(channel, engine)
        kept = {} if own is None else {key: array for key, array in own.items() if "/" in key}
        saved_ranks = None if own is None else int(own[_RANKS])
        same = saved_ranks == engine.size and {piece.where for piece in pieces} == {
            residuals.parsed(key, array).where for key, array in kept.items()
        }
        answers = consensus.exchange(
            engine, name, lambda: {"same": same, "wanted": [piece.where for piece in pieces], "own": own is not None}
        )
        if all(answer["same"] for answer in answers):
            assert own is not None
            residuals.write(channel, engine, kept)
            self._go_on(own, pieces)
            return
        first, trouble, arrays = None, "", {}
        try:
            masks = residuals.claims([[tuple(one) for one in answer["wanted"]] for answer in answers], engine.rank)
            states = iter(everyone())
            first = next(states)
            scale = 1.0 if self._options.op == Sum else engine.size / int(first[_RANKS])
            arrays = residuals.regrouped(pieces, masks, _pieces_only(first, states), scale)
        except (HvdExtError, OSError, StopIteration, KeyError) as error:
            trouble = f"{type(error).__name__}: {error}"
        troubles = consensus.exchange(engine, name, lambda: trouble)
        lacking = next((rank for rank, one in enumerate(troubles) if one), None)
        if lacking is not None:
            if engine.rank == 0:
                _LOG.warning(
                    "%s: it was saved on another shape of the job, and rank %d cannot read the files of all ranks, so "
                    "that it is dropped: %s; a disk that all ranks share keeps it",
                    self._label,
                    engine.ranks[lacking],
                    troubles[lacking],
                )
            return
        assert first is not None
        residuals.write(channel, engine, arrays)
        self._go_on(first, pieces)
        if engine.rank == 0:
            _LOG.info("%s: what sparse steps have left is distributed anew over %d ranks", self._label, engine.size)

    def move(self, old: Channel, new: Channel) -> None:
        """Take over what waits from a channel that another replaces; all ranks call it, between two steps."""
        from hvd_ext.tensorflow.collectives.objects import allgather_object

        own = self.save([old])
        name = f"{self._label}: to another channel"
        everyone = allgather_object(own, name=name, process_set=self._options.process_set)
        self.load(new, None, lambda: everyone)
        self.clear(old)

    def clear(self, channel: Channel) -> None:
        """Let nothing wait in a channel that is not used any more, or only by a function that was traced with it."""
        residuals.write(channel, self._job.engine, {})

    def _go_on(self, saved: Arrays, pieces: Sequence[residuals.Piece]) -> None:
        has = any(piece.which == residuals.VELOCITY for piece in pieces)
        if self._job.engine.rank == 0 and had_momentum(saved) and not has:
            tell_of_momentum(self._label, "with")
        self._steps.assign(int(saved[_STEPS]))
        for flushing in self._flushing.values():
            flushing.assign(bool(saved[_FLUSHING]))
        if self._auto is not None:
            self._auto.load(saved)

    def _tell(self, ok: tf.Tensor) -> None:
        if self._job.engine.rank != 0:
            return
        if not tf.executing_eagerly():
            tf.cond(ok, lambda: tf.constant(True), lambda: tf.py_function(self._log_skipped, [], tf.bool))
        elif not bool(ok):
            self._log_skipped()

    @ops.plain
    def _log_skipped(self) -> bool:
        count = self.skipped
        if str(count).strip("0") == "1":  # 1, 10, 100, ...
            _LOG.warning(
                "%s: a gradient of step %d is not finite: all ranks have left the step out, and what waits is as it "
                "was; %d steps so far",
                self._label,
                self.steps,
                count,
            )
        return True


def had_momentum(saved: Arrays) -> bool:
    """Tell whether what `Feedback.save` gave has a momentum that was taken over from an optimizer."""
    return any(key.startswith(residuals.VELOCITY) for key in saved)


def tell_of_momentum(label: str, how: str) -> None:
    """Warn that a momentum ends, because momentum_correction was switched on or off; one rank calls it.

    Args:
        label: whose momentum it is.
        how: "with" or "without", as the training was that had the momentum.
    """
    _LOG.warning("%s: trained %s momentum_correction until now: momentum begins anew", label, how)


def _pieces_only(first: Arrays, others: Iterable[Arrays]) -> Iterable[Arrays]:
    for state in (first, *others):
        yield {key: array for key, array in state.items() if "/" in key}
