"""What a policy is; by itself it reduces gradients whole, in the step that they belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvd_ext.state import Arrays, Everyone

if TYPE_CHECKING:
    from hvd_ext.tensorflow.gradients.channel import Channel
    from hvd_ext.tensorflow.gradients.registration import GradientSet
    from hvd_ext.tensorflow.gradients.step import Step


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
            kinds: the combined kinds of all ranks, one letter for each gradient (`registration.joint`).
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

    @property
    def loses_at_shutdown(self) -> bool:
        """Whether a shutdown would lose gradients, of which rank 0 warns."""
        return False
