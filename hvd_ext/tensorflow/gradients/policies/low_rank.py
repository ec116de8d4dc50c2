"""`compression=LowRank(...)`: a gradient is sent as a product of two thin matrices, and the rest enters later steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hvd_ext.errors import HvdExtError
from hvd_ext.job.log import logger
from hvd_ext.options import Sum
from hvd_ext.planning.tensors import Tensor
from hvd_ext.state import Arrays, Everyone
from hvd_ext.tensorflow import ops
from hvd_ext.tensorflow.collectives.objects import broadcast_object
from hvd_ext.tensorflow.gradients import carried, kinds as gradient_kinds, registration
from hvd_ext.tensorflow.gradients.step import RESIDUALS_LOST, Policy
from hvd_ext.tensorflow.skipping import FiniteSteps

if TYPE_CHECKING:
    from hvd_ext.tensorflow.gradients.channel import Channel
    from hvd_ext.tensorflow.gradients.reducer import GradientSet
    from hvd_ext.tensorflow.gradients.step import Step

# the names of what is saved
_STEPS, _FLUSHING, _RESIDUAL, _RIGHT = "steps", "flushing", "residual", "right"

Dense = list[tf.Tensor | None]


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A gradient that is factorised, and what is kept of it between steps.

    Attributes:
        residual: this rank's, float32 [rows, columns].
        right: the second factor of the last step, float32 [columns, rank], equal on all ranks.
    """

    rows: int
    columns: int
    rank: int
    residual: tf.Variable
    right: tf.Variable


class LowRankGradients(Policy):
    """PowerSGD with error feedback.

    A step of thin matrices goes through two channels of its own: the first has the left factors and what is sent whole,
    the second the right factors. A whole step goes through the channel of the list.
    """

    feature = "low rank"
    joins = False
    outlives = False
    keeps = "low-rank"
    changes_nothing_alone = False
    may_skip = True
    flushes = True
    newest_channel_only = True  # which has all matrices

    def __init__(self, gradients: GradientSet) -> None:
        super().__init__(gradients)
        assert gradients.options.low_rank is not None
        self._options = gradients.options.low_rank
        self._matrices: dict[int, Matrix] = {}
        self._channels: dict[Channel, tuple[Channel, Channel]] = {}
        self._finite: FiniteSteps | None = None
        with tf.init_scope(), tf.device("CPU:0"):
            self._flushing = tf.Variable(False, trainable=False, name="hvd_ext_low_rank_flushing")

    def classify(self, kinds: str, channel: Channel) -> str:
        """Count gradients that no rank has now as dense zeros if they have residuals, which are still sent."""
        factorised = self._matrices if channel in self._channels else {}
        return "".join(gradient_kinds.DENSE if place in factorised else kind for place, kind in enumerate(kinds))

    def opened(self, channel: Channel, before: Channel | None) -> None:
        """Open the channels of the factors; on one host all gradients are sent whole."""
        if self._finite is None:
            self._finite = FiniteSteps(self.gradients)
        tensors = channel.layout.tensors
        shapes = {
            place: self._options.factors(tensors[place].shape, tensors[place].dtype)
            for place in channel.layout.sent_tensors
        }
        sizes = {place: size for place, size in shapes.items() if size is not None}
        job, label = self.gradients.job, self.gradients.label
        if len(job.tree.hosts()) == 1 or not sizes:
            if not job.engine.rank and job.count("low rank without effect") == 0:
                why = "no gradient gets smaller by it" if len(job.tree.hosts()) > 1 else "there is one host"
                logger.warning("%s: LowRank changes nothing in this job: %s; all gradients are sent whole", label, why)
            return
        for place, size in sizes.items():
            if place not in self._matrices:
                self._matrices[place] = self._matrix(place, *size)
        left = [
            Tensor(tensor.name, (sizes[place][0], sizes[place][2]), tensor.dtype) if place in sizes else tensor
            for place, tensor in enumerate(tensors)
        ]
        right = [Tensor(tensors[place].name, (size[1], size[2]), "float32") for place, size in sizes.items()]
        options = self.gradients.options.for_channel(job.options)
        kinds = "".join(
            gradient_kinds.DENSE if place in channel.layout.sent_tensors else gradient_kinds.NONE
            for place in range(len(tensors))
        )
        self._channels[channel] = (
            registration.open_channel(f"{label}, left factors", left, options, kinds=kinds, owner=job),
            registration.open_channel(f"{label}, right factors", right, options, owner=job),
        )

    def reduce(self, step: Step, gradients: Sequence[tf.Tensor | None]) -> Dense:
        """Reduce the factors of matrices, or whole gradients with their residuals."""
        if step.channel not in self._channels:
            return super().reduce(step, gradients)
        assert self._finite is not None
        compensated = [
            gradient + tf.reshape(self._matrices[place].residual.read_value(), tf.shape(gradient))
            if gradient is not None and place in self._matrices
            else gradient
            for place, gradient in enumerate(gradients)
        ]
        whole = tf.logical_or(self._finite.applied.read_value() < self._options.start, self._flushing.read_value())
        if tf.executing_eagerly():
            reduced, kept = (self._whole if bool(whole) else self._factorised)(step.channel, compensated)
        else:
            places = [place for place, gradient in enumerate(compensated) if gradient is not None]

            def branch(way: Any) -> Any:
                results, state = way(step.channel, compensated)
                return [results[place] for place in places], list(state.values())

            factorised = [place for place in places if place in self._matrices]
            results, state = tf.cond(whole, lambda: branch(self._whole), lambda: branch(self._factorised))
            reduced = [None] * len(compensated)
            for place, result in zip(places, results, strict=True):
                reduced[place] = tf.ensure_shape(result, compensated[place].shape)  # type: ignore[union-attr]
            kept = dict(zip(factorised, state, strict=True))
        step.kept = kept
        return reduced

    def finish(self, step: Step, gradients: dict[int, Any]) -> dict[int, Any]:
        """Keep residuals and factors if all gradients are finite; else the step is not applied."""
        assert self._finite is not None
        step.applies = ok = FiniteSteps.are_finite(list(gradients.values()))
        done: list[tf.Operation | None] = []
        for place, (residual, right) in (step.kept or {}).items():
            matrix = self._matrices[place]
            for variable, value in ((matrix.residual, residual), (matrix.right, right)):
                done.append(variable.assign(tf.where(ok, value, variable.read_value()), read_value=False))
        with tf.device("CPU:0"):
            flushing = tf.logical_and(self._flushing.read_value(), tf.logical_not(ok))
            done.append(self._flushing.assign(flushing, read_value=False))
        self._finite.count(ok, done)
        after = [operation for operation in done if operation is not None]
        return dict(zip(gradients, ops.together(list(gradients.values()), after), strict=True))

    def save(self) -> Arrays:
        """Copy this rank's residuals, and the factors of the last step."""
        if self._finite is None:
            return {}
        arrays: Arrays = {
            carried.RANKS: np.array(self.gradients.job.engine.size),
            _STEPS: np.array(int(self._finite.applied.numpy())),
            _FLUSHING: np.array(bool(self._flushing.numpy())),
        }
        for place, matrix in self._matrices.items():
            arrays[f"{_RESIDUAL}/{place}"] = matrix.residual.numpy()
            arrays[f"{_RIGHT}/{place}"] = matrix.right.numpy()
        return arrays

    def load(self, own: Arrays | None, everyone: Everyone) -> None:
        """Restore what `save` returned; in a job of another number of ranks, each gets an equal part of all residuals.

        With op=Average their mean, so that the pending update stays the same.
        """
        engine = self.gradients.job.engine
        same = own is not None and int(own[carried.RANKS]) == engine.size
        arrays = own if same else self._redistributed(everyone)
        if arrays is None or self._finite is None:
            return
        self._finite.applied.assign(int(arrays[_STEPS]))
        self._flushing.assign(bool(arrays[_FLUSHING]))
        for place, matrix in self._matrices.items():
            for name, variable in ((_RESIDUAL, matrix.residual), (_RIGHT, matrix.right)):
                saved = arrays.get(f"{name}/{place}")
                if saved is not None and saved.shape == tuple(variable.shape):
                    variable.assign(saved)

    def flush(self, ahead: int) -> None:
        """Send whole gradients and all residuals in the next step; all ranks call it."""
        self._flushing.assign(True)

    @property
    def channels(self) -> Sequence[Channel]:
        """Those of the left and right factors."""
        return [channel for pair in self._channels.values() for channel in pair]

    @property
    def lost_at_shutdown(self) -> str:
        """Say that residuals may wait on the ranks."""
        return RESIDUALS_LOST if self._channels else ""

    def _matrix(self, place: int, rows: int, columns: int, rank: int) -> Matrix:
        first = np.random.default_rng((self._options.seed, place)).standard_normal((columns, rank)).astype(np.float32)
        with tf.init_scope():
            residual = tf.Variable(tf.zeros((rows, columns)), trainable=False, name=f"hvd_ext_residual_{place}")
            right = tf.Variable(first, trainable=False, name=f"hvd_ext_right_{place}")
        return Matrix(rows, columns, rank, residual, right)

    def _whole(self, channel: Channel, compensated: Sequence[tf.Tensor | None]) -> tuple[Dense, dict[int, Any]]:
        kept = {
            place: (tf.zeros_like(self._matrices[place].residual), self._matrices[place].right.read_value())
            for place, gradient in enumerate(compensated)
            if gradient is not None and place in self._matrices
        }
        return channel.reduce(compensated), kept

    def _factorised(self, channel: Channel, compensated: Sequence[tf.Tensor | None]) -> tuple[Dense, dict[int, Any]]:
        left, right = self._channels[channel]
        matrices = {
            place: tf.reshape(gradient, (self._matrices[place].rows, self._matrices[place].columns))
            for place, gradient in enumerate(compensated)
            if gradient is not None and place in self._matrices
        }
        sent = list(compensated)
        for place, matrix in matrices.items():
            sent[place] = matrix @ self._matrices[place].right.read_value()
        reduced = left.reduce(sent)
        bases = {place: tf.linalg.qr(reduced[place]).q for place in matrices}
        parts = {place: tf.matmul(matrix, bases[place], transpose_a=True) for place, matrix in matrices.items()}
        rights = dict(zip(matrices, right.reduce(list(parts.values())), strict=True))
        kept = {}
        for place, matrix in matrices.items():
            product = tf.matmul(bases[place], rights[place], transpose_b=True)
            reduced[place] = tf.reshape(product, tf.shape(compensated[place]))
            kept[place] = (matrix - tf.matmul(bases[place], parts[place], transpose_b=True), rights[place])
        return reduced, kept

    def _redistributed(self, everyone: Everyone) -> Arrays | None:
        job, name = self.gradients.job, self.gradients.name
        joined: Arrays | None = None
        if job.engine.rank == 0:
            try:
                for arrays in everyone():
                    if joined is None:
                        joined = dict(arrays)
                        continue
                    for key in joined:
                        if key.startswith(_RESIDUAL):
                            joined[key] = joined[key] + arrays[key]
            except (HvdExtError, OSError, KeyError) as error:
                joined = None
                logger.warning("%s: residuals of a job of another shape are dropped: %s", name, error)
            if joined is not None:
                share = job.engine.size if self.gradients.options.op == Sum else int(joined[carried.RANKS])
                joined |= {key: joined[key] / share for key in joined if key.startswith(_RESIDUAL)}
        process_set = self.gradients.options.process_set
        return broadcast_object(joined, job.engine.ranks[0], name=f"{name}: residuals", process_set=process_set)


POLICY = LowRankGradients
