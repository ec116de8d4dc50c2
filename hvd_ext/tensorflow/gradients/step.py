"""A step: one reduction of a list of gradients, from the agreement of the ranks to the reduced gradients; and the base
class of what they go through besides the sum, which reduces them whole, in the step that they belong to.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvd_ext.errors import HvdExtError
from hvd_ext.job import membership
from hvd_ext.state import Arrays, Everyone
from hvd_ext.tensorflow import devices, ops
from hvd_ext.tensorflow.collectives import sparse
from hvd_ext.tensorflow.gradients import kinds

if TYPE_CHECKING:
    from hvd_ext.tensorflow.gradients.channel import Channel
    from hvd_ext.tensorflow.gradients.reducer import GradientSet, Reducer


RESIDUALS_LOST = "the residuals are lost; call hvd_ext.flush() before shutdown()"


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
    def began_equal(self) -> bool:
        """Whether all ranks have had the same weights once, as far as they compare them."""
        return self._list is None or self._list.start is None or self._list.start.done

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

    def updated(self, passes: int) -> None:
        """Continue after the optimizer's update; see `Policy.updated`."""
        if self._list is not None:
            self._list.policy.updated(self, passes)

    def counts(self, name: str, variable: tf.Variable) -> None:
        """Keep a variable, which all ranks change alike in each step, equal on ranks that join; see `GradientSet`."""
        if self._list is not None:
            self._list.counters[name] = variable

    def shared(self, variables: Sequence[Any]) -> list[tf.Tensor]:
        """Give what must be equal on all ranks after the step; see `Policy.shared`."""
        if self._list is None:
            return [tf.convert_to_tensor(variable) for variable in variables]
        return self._list.policy.shared(variables)

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
        if membership.session() is not None:  # other ranks may join, and the graph stays
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
            reduced[slot.place] = sparse.reduce(
                gradients.job,
                f"{self.name}, rows {slot.place}",  # not the variable's name, which may differ between ranks
                given[slot.place],
                gradients.options,
                shape=tuple(slot.variable.shape),
                dtype=kinds.dtype(slot.variable),
                count=self.channel.count_of_rows(slot.place, sparse.row_nbytes(given[slot.place])),
            )
        return reduced


class Policy:
    """The policy of one list of gradients.

    A step calls `begin`, `prepare`, `reduce` and `finish` in this order; what belongs to one step is kept in the step,
    because several functions may be traced at once.

    Attributes:
        gradients: the list.

    Args:
        gradients: the list.
    """

    # the key of `options.compatibility.FEATURES` by which options ask for it
    feature = ""
    # the name, in checkpoints, of what it keeps of a step's gradients; a later step applies it, whose loss scale may be
    # another. "": nothing
    keeps = ""
    # whether the results of a step are the sums of its own gradients, so that a single rank may leave them as they are
    changes_nothing_alone = True
    # whether some steps have no results to apply (`Step.applies`)
    may_skip = False
    # whether sparse gradients are made dense
    dense_only = False
    # whether the ranks agree on their gradients in the first step only, because later steps do not wait for all ranks
    agrees_once = False
    # whether what it keeps can be sent in a step of the user's choice (`flush`)
    flushes = False
    # whether a graph keeps nothing of it but the channel, so that the graph may go on in another world (`succession`)
    outlives = True
    # whether a rank may join: in place of its gradients the engine gives zeros, and nothing else is needed of it
    joins = True
    # whether a later channel of the list replaces the earlier ones
    newest_channel_only = False

    def __init__(self, gradients: GradientSet) -> None:
        self.gradients = gradients

    @classmethod
    def steps_before(cls, own: Arrays | None, everyone: Everyone) -> int | None:
        """Give the number of steps before a checkpoint, if the state that it has of this policy says so.

        Args:
            own: what this rank has saved; None if the earlier job had no such rank.
            everyone: returns what each rank of the earlier job has saved.
        """
        return None

    @classmethod
    def check(cls, label: str, variable: Any) -> None:
        """Refuse a variable whose gradient the policy cannot reduce.

        Args:
            label: the optimizer or tape, for messages.
            variable: the variable.

        Raises:
            InvalidError: it cannot be reduced.
        """

    def classify(self, kinds: str, channel: Channel) -> str:
        """Say which gradients a step reduces, and in which form.

        Args:
            kinds: the combined kinds of all ranks, one letter for each gradient (`kinds.joint`).
            channel: that reduces them.
        """
        return kinds

    def plan(self) -> dict[str, Any]:
        """Return the arguments of `registration.open_channel` that make a channel of this policy."""
        return {}

    def opened(self, channel: Channel, before: Channel | None) -> None:
        """Take over a channel that was opened on all ranks; all ranks call it.

        Args:
            channel: the newest channel of the list.
            before: the one before it, or None.
        """

    def begin(self, step: Step) -> None:
        """Begin a step, before its gradients are there."""

    def prepare(self, step: Step, gradients: Mapping[int, Any]) -> dict[int, Any]:
        """Change this rank's gradients before they are reduced.

        Args:
            step: the step.
            gradients: dense tensors or slices, by their places in the list.
        """
        return dict(gradients)

    def reduce(self, step: Step, gradients: Sequence[tf.Tensor | None]) -> list[tf.Tensor | None]:
        """Reduce dense gradients; see `Channel.reduce`.

        Args:
            step: the step.
            gradients: one or None for each tensor of the channel's layout; zeros in a step that is `absent`.
        """
        return step.channel.reduce(gradients, step.begun)

    def finish(self, step: Step, gradients: dict[int, Any]) -> dict[int, Any]:
        """End a step.

        Args:
            step: the step.
            gradients: the reduced gradients, by their places in the list.

        Returns:
            The gradients; in a graph they are not ready before the step has ended.
        """
        return gradients

    def behind(self) -> int:
        """Give the number of results that are there, although this rank has not begun their steps."""
        return 0

    def save(self) -> Arrays:
        """Copy what this rank keeps, between two steps; an empty dict if there is nothing."""
        return {}

    def load(self, own: Arrays | None, everyone: Everyone) -> None:
        """Restore what `save` returned, after the first channel was opened; all ranks call it alike.

        Args:
            own: what this rank has saved; None if the earlier job had no such rank.
            everyone: returns what each rank of the earlier job has saved.
        """

    def flush(self, ahead: int) -> None:
        """Make a step send what the ranks have kept.

        Args:
            ahead: 1: the next step, 2: the one after it, and so on; counts where not all ranks call it alike.
        """

    def scale_momentum(self, factor: float) -> None:
        """Multiply the velocities that this rank keeps, between two steps; all ranks call it alike."""

    def updated(self, step: Step, passes: int) -> None:
        """Continue after the optimizer's update; in a graph this follows the update.

        Args:
            step: the step.
            passes: the number of steps that make an update.
        """

    def shared(self, variables: Sequence[Any]) -> list[tf.Tensor]:
        """Give what must be equal on all ranks after a step: a value for each of some variables of the list."""
        return [tf.convert_to_tensor(variable) for variable in variables]

    def resume(self) -> None:
        """Continue after all ranks have joined; all ranks call it."""

    @property
    def channels(self) -> Sequence[Channel]:
        """The channels that the policy has opened besides those of the list."""
        return ()

    @property
    def reducers(self) -> Sequence[Reducer]:
        """What the policy reduces with besides the channels of the list."""
        return ()

    @property
    def lost_at_shutdown(self) -> str:
        """Say what a shutdown would lose, for a warning; "" for nothing."""
        return ""
