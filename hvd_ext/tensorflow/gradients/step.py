"""A step: one reduction of a list of gradients, from the agreement of the ranks to the reduced gradients."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvd_ext.errors import HvdExtError
from hvd_ext.tensorflow import devices, ops
from hvd_ext.tensorflow.collectives import sparse
from hvd_ext.tensorflow.gradients import kinds

if TYPE_CHECKING:
    from hvd_ext.tensorflow.gradients.channel import Channel
    from hvd_ext.tensorflow.gradients.registration import GradientSet


@dataclasses.dataclass
class Slot:
    """One variable of a step, and its gradient.

    Args:
        variable: the model's variable.
        kind: the kind that the ranks have agreed on (`kinds`).
        gradient: the gradient before the reduction; None if no rank has one.
        place: the variable's place in the list that the ranks have agreed on; None for a local variable, and on a rank
            outside of the process set.
    """

    variable: Any
    kind: str
    gradient: Any
    place: int | None


class Step:
    """A step of a list of gradients; `Reducer.begin` makes it, and `reduce` reduces it, once.

    Attributes:
        label: the optimizer or tape, for messages.
        slots: one for each variable, in the order of the variables.
        absent: whether it takes a result that is there already, and has no gradients of this rank.
        begun: in a graph, the operation that has begun the step in the engine; None if `Channel.reduce` begins it.
        applies: whether the reduced gradients are to be applied, a boolean tensor that is equal on all ranks; None:
            they are.
        whole: with `TopK(until=...)`, whether it sends whole gradients, once it is reduced; else None.
        kept: what the policy keeps from `prepare` to `finish`.

    Args:
        label: see above.
        slots: see above.
        gradients: the list, on which the ranks have agreed; None if this rank does not take part.
        channel: that reduces the dense gradients; None if this rank does not take part.
        compared: in a graph, the comparison of the weights that must run before the reduction; None if there is none.
        absent: see above.
    """

    def __init__(
        self,
        label: str,
        slots: Sequence[Slot],
        gradients: GradientSet | None = None,
        channel: Channel | None = None,
        compared: tf.Operation | None = None,
        *,
        absent: bool = False,
    ) -> None:
        self.label, self.slots, self.absent = label, tuple(slots), absent
        self.begun: list[tf.Operation] | None = None
        self.applies: tf.Tensor | None = None
        self.whole: tf.Tensor | None = None
        self.kept: Any = None
        self._list, self._channel, self._compared = gradients, channel, compared
        self._is_reduced = False

    @property
    def gradients(self) -> list[Any]:
        """The gradients for `reduce`, with None where no rank has one, in their variables' dtypes.

        A gradient that only other ranks have is a tensor of zeros or slices without rows.
        """
        return [slot.gradient for slot in self.slots]

    @property
    def present(self) -> list[Slot]:
        """The slots that have a gradient."""
        return [slot for slot in self.slots if slot.gradient is not None]

    @property
    def channel(self) -> Channel:
        """The channel of the dense gradients."""
        assert self._channel is not None
        return self._channel

    @property
    def name(self) -> str:
        """The name for calls of the step's own: equal on all ranks, unique for each list."""
        return "" if self._list is None else self._list.name

    @property
    def is_reduced(self) -> bool:
        """Whether its gradients are reduced, or it has none."""
        return self._is_reduced or not self.present

    @property
    def local(self) -> list[bool]:
        """For each gradient that is not None, whether it is that of a local variable."""
        return [slot.kind == kinds.LOCAL for slot in self.present]

    @functools.cached_property
    def variables(self) -> dict[int, Any]:
        """The variables with a gradient, by their places in the list."""
        return {slot.place: slot.variable for slot in self.present if slot.place is not None}

    @functools.cached_property
    def through_momentum(self) -> frozenset[Any]:
        """The keys of the variables whose gradients go through momentum correction, unless they are sent whole."""
        places = frozenset() if self._channel is None else self._channel.with_momentum
        return frozenset(kinds.key(slot.variable) for slot in self.slots if slot.place in places)

    def reduce_all(self, after: tf.Variable | None = None) -> list[Any]:
        """Reduce `gradients` as they are.

        Args:
            after: as for `reduce`.

        Returns:
            The sums or averages; None where no rank has a gradient.
        """
        reduced = iter(self.reduce([slot.gradient for slot in self.present], after))
        return [None if slot.gradient is None else next(reduced) for slot in self.slots]

    def reduce(self, gradients: Sequence[Any], after: tf.Variable | None = None) -> list[Any]:
        """Reduce gradients over the ranks.

        Args:
            gradients: `gradients` without the None ones, perhaps scaled; Keras drops those of None.
            after: an integer variable that orders the steps of a graph: the reduction of a step begins after that of
                the step before has ended, even if nothing else connects them (a loop, constant gradients).

        Returns:
            The sums or averages. In a graph none of them is ready before all are, so that a failed step changes no
            variable.

        Raises:
            HvdExtError: some of the gradients were dropped.
        """
        if len(gradients) != len(self.present):
            raise HvdExtError(
                f"{self.label}: {len(self.present)} gradients were registered, but {len(gradients)} reached the "
                "reduction; an apply that adds or drops gradients cannot be used"
            )
        self._is_reduced = True
        if self._list is None or self._stays(self._list):
            return list(gradients)
        if tf.executing_eagerly():
            return self._reduced(self._list, gradients)
        first = [one for one in (self._compared, None if after is None else after.read_value()) if one is not None]
        with tf.control_dependencies(first):
            reduced = self._reduced(self._list, gradients)
        together = ops.together(reduced)
        if after is not None:
            with tf.control_dependencies(tf.nest.flatten(together[:1], expand_composites=True)):
                after.assign_add(tf.zeros((), after.dtype), read_value=False)
        return together

    def _stays(self, gradients: GradientSet) -> bool:
        """Tell whether the gradients stay on the GPU of a job with one rank, where reducing them changes nothing."""
        if gradients.job.engine.size > 1 or not gradients.policy.changes_nothing_alone:
            return False
        slices = any(slot.kind == kinds.SPARSE for slot in self.present)
        converted = any(bucket.wire for bucket in self.channel.layout.buckets)
        return not slices and not converted and devices.on_gpu(slot.variable for slot in self.present)

    def _reduced(self, gradients: GradientSet, given: Sequence[Any]) -> list[Any]:
        policy, factor = gradients.policy, gradients.options.gradient_predivide_factor
        places = [slot.place for slot in self.present]
        kind_of = {slot.place: slot.kind for slot in self.present}
        policy.begin(self)
        mine = {place: one for place, one in zip(places, given, strict=True) if place is not None}
        results = policy.prepare(self, mine)
        dense = [
            kinds.scaled(results[place], 1 / factor) if kind_of.get(place) == kinds.DENSE else None
            for place in range(len(self.channel.layout.tensors))
        ]
        for place, reduced in enumerate(policy.reduce(self, dense)):
            if dense[place] is not None:
                results[place] = kinds.scaled(reduced, factor)
        results |= self._rows(gradients, results)
        results = policy.finish(self, results)
        return [one if place is None else results[place] for place, one in zip(places, given, strict=True)]

    def _rows(self, gradients: GradientSet, given: Mapping[int, Any]) -> dict[int, Any]:
        """Reduce the sparse gradients, by their places."""
        reduced = {}
        for slot in self.present:
            if slot.kind != kinds.SPARSE or slot.place is None:
                continue
            self.channel.rows_nbytes[slot.place] = sparse.most_nbytes(given[slot.place])
            reduced[slot.place] = sparse.reduce(
                gradients.job,
                f"{self.name}, rows {slot.place}",  # not the variable's name, which may differ between ranks
                given[slot.place],
                gradients.options,
                shape=tuple(slot.variable.shape),
                dtype=kinds.dtype(slot.variable),
            )
        return reduced
