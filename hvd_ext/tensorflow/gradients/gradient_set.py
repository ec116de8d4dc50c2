"""One list of variables whose gradients are reduced together: its channels, and what the ranks have of its gradients.

Ranks may have different gradients: a variable that a rank's loss does not use has none there. Eagerly the ranks tell
each other at every step what they have. A traced function has the same gradients at every step, so its ranks tell each
other once, when a rank's own pattern is new; all ranks must then come to a new pattern together.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

from hvd_ext.job import banner, consensus, runtime
from hvd_ext.options.gradients import GradientOptions
from hvd_ext.planning.sparse_planner import SparseChosen
from hvd_ext.tensorflow.gradients import kinds, registration
from hvd_ext.tensorflow.gradients.channel import Channel, GradientSpec
from hvd_ext.tensorflow.gradients.same_start import SameStart, Weights
from hvd_ext.tensorflow.topk import residuals
from hvd_ext.tensorflow.topk.feedback import Arrays, Everyone, Feedback
from hvd_ext.tensorflow.topk.in_part import InPart

_LOG = logging.getLogger("hvd_ext")
_LIST = "the list of variables"


class GradientSet:
    """The variables of one list, agreed with the ranks of one runtime.

    Attributes:
        job: the runtime of the ranks that take part.
        channels: opened so far: one, and another when a variable gets a dense gradient that had none before.
        name: the same on all ranks; once it is open, unlike that of any other set of the job.
        feedback: of the steps of which a part is sent; None before the first, and where all is sent.
        restored: what `load` was given before the first step.
        start: the comparison of the weights before the first update; None where nobody asks for it.

    Args:
        label: whose gradients they are, for messages.
        options: how they become one.
        job: the runtime of the ranks that take part.
        variables: the list, without local variables.
        in_part: how a part of the gradients is sent; None: they are sent whole.
        first_step: gives the number of update steps before the first; rank 0's counts.
        start: compares the weights before the first update; None where nobody asks for that.
    """

    def __init__(
        self,
        label: str,
        options: GradientOptions,
        job: runtime.Runtime,
        variables: Sequence[Any],
        in_part: InPart | None = None,
        first_step: Callable[[], int] = lambda: 0,
        start: SameStart | None = None,
    ) -> None:
        self.start = start
        self.job = job
        self.channels: list[Channel] = []
        self.name = label
        self.feedback: Feedback | None = None
        self.restored: tuple[Arrays | None, Everyone] | None = None
        self._label = label
        self._options = options
        self._in_part = in_part
        self._first_step = first_step
        self._specs = [
            GradientSpec(kinds.name(variable), tuple(variable.shape), kinds.dtype(variable).name)
            for variable in variables
        ]
        self._groups = _groups(options.groups, [kinds.key(variable) for variable in variables])
        self._traced: dict[str, str] = {}  # own kinds -> the ranks' kinds
        self._number = -1
        self._last = ""
        self._since_update = ""

    @property
    def is_open(self) -> bool:
        """Whether it can reduce; before its first channel it can not be used by a step."""
        return all(channel.is_open for channel in self.channels)

    def agree(
        self,
        own: str,
        checked: Callable[[], dict[str, Any]],
        *,
        traced: bool,
        communicates: bool = True,
        weights: Weights | None = None,
    ) -> tuple[Channel, str]:
        """Agree with the ranks on the gradients of a step.

        Args:
            own: this rank's kinds (`kinds.kind`), one letter for each variable.
            checked: gives what must be the same on all ranks, or raises what all shall hear; asked when a channel is
                opened.
            traced: a function is being traced.
            communicates: False: gradients are only added up in this eager call, nothing is asked.
            weights: what `start` compares.

        Returns:
            A channel for all dense gradients, and the ranks' kinds.

        Raises:
            MismatchError: the ranks' variables, options or first weights differ.
            HvdExtError: what `checked` raised on some rank.
        """
        if not self.channels:
            channel = self._open(own, lambda: {_LIST: "new", **checked()}, self.start, weights)
            # counted when it is open on all ranks: one that was refused is not counted by anybody
            self._number = self.job.count("gradient set")
            self.name = f"{self._label}.{self._number}"
            banner.say(self.job, banner.optimizer_line(channel, self._in_part and self._in_part.options))
            if self.start is not None:
                self.start.name = self.name
            found = "".join(spec.kind for spec in channel.specs)
        elif traced:
            found = self._traced.get(own) or self._exchanged(own, checked)
        else:
            own = registration.joint([own, self._since_update]) if self._since_update else own
            if not communicates:
                self._since_update = own
                return self.channels[-1], self._with_waiting(registration.joint([own, self._last]), self.channels[-1])
            found = self._exchanged(own, checked)
        if traced:
            self._traced[own] = found
        else:
            self._since_update = "" if communicates else own
        self._last = found
        channel = self._channel(found)
        return channel, self._with_waiting(found, channel)

    def _with_waiting(self, found: str, channel: Channel) -> str:
        """Take zeros for the gradients that nobody has now: what waits for them travels and is applied."""
        buckets = zip(channel.buckets, channel.sparse, strict=True)
        kept = {index for bucket, spec in buckets if spec is not None for index in bucket}
        return "".join(kinds.DENSE if index in kept else kind for index, kind in enumerate(found))

    def save(self) -> Arrays:
        """Copy what sparse steps have left on this rank; nothing before the first step."""
        if self.feedback is None:
            return {}
        return self.feedback.save([channel for channel in reversed(self.channels) if channel.is_open])

    def scale_momentum(self, factor: float) -> None:
        """Multiply the momentum that this rank has taken over, between two steps; all ranks call it alike."""
        for channel in self.channels:
            if channel.is_open:
                residuals.scale_velocities(channel, self.job.engine, factor)

    def load(self, own: Arrays | None, everyone: Everyone) -> None:
        """Go on from what `save` gave: now, or when the first channel is opened; all ranks call it alike.

        Args:
            own: as `Feedback.load` takes it.
            everyone: as there.
        """
        if self.feedback is None:
            self.restored = own, everyone
        else:
            for channel in self.channels[:-1]:
                self.feedback.clear(channel)
            self.feedback.load(self.channels[-1], own, everyone)

    def close(self) -> None:
        """Close its channels."""
        for channel in self.channels:
            channel.close()

    def _exchanged(self, own: str, checked: Callable[[], dict[str, Any]]) -> str:
        def mine() -> dict[str, Any]:
            checked()
            return {"name": self._label, "facts": {_LIST: f"registered as number {self._number}"}, "kinds": own}

        values = consensus.exchange(self.job.engine, registration.EXCHANGE, mine)
        registration.check_facts(values, self.job.engine.ranks)
        return registration.joint([value["kinds"] for value in values])

    def _channel(self, joint: str) -> Channel:
        # what waits on the ranks is with the newest
        for channel in self.channels if self._in_part is None else reversed(self.channels):
            if all(spec.kind == kinds.DENSE for spec, kind in zip(channel.specs, joint, strict=True) if kind == "d"):
                return channel
        opened = ["".join(spec.kind for spec in channel.specs) for channel in self.channels]
        return self._open(
            registration.joint([joint, *opened]), lambda: {_LIST: f"number {self._number}, with more dense gradients"}
        )

    def _open(
        self,
        own: str,
        facts: Callable[[], dict[str, Any]],
        start: SameStart | None = None,
        weights: Weights | None = None,
    ) -> Channel:
        specs = [
            dataclasses.replace(spec, present=kind != kinds.NONE, sparse=kind == kinds.SPARSE)
            for spec, kind in zip(self._specs, own, strict=True)
        ]
        options = self._options.for_channel(self.job.options)
        channel = registration.open(
            self._label,
            specs,
            options,
            owner=self.job,
            groups=self._groups,
            in_part=self._in_part,
            facts=facts,
            start=start,
            weights=weights,
        )
        if self._in_part is not None:
            self._keep(channel)
            self._tell_of_one_host(channel)
        self.channels.append(channel)
        return channel

    def _keep(self, channel: Channel) -> None:
        """Give a channel that was opened what waits on the ranks."""
        if self.feedback is not None:
            self.feedback.opened(channel)
            self.feedback.move(self.channels[-1], channel)
            return
        steps = consensus.exchange(self.job.engine, f"{self._label}: first step", self._first_step)
        self.feedback = Feedback(self._label, self._options, self.job, steps[0])
        self.feedback.opened(channel)
        restored, self.restored = self.restored, None
        if restored is not None:
            self.feedback.load(channel, *restored)

    def _tell_of_one_host(self, channel: Channel) -> None:
        """Say once, on the first rank, that `TopK` has nothing to leave out."""
        chosen = [choice for choice in channel.choices if isinstance(choice, SparseChosen)]
        if self.job.engine.rank or not chosen or any(choice.selects for choice in chosen):
            return
        if self.job.count("top-k without a selection") == 0:
            _LOG.warning(
                "%s: TopK changes nothing in this job: gradients are selected where they leave a host, and there is "
                "one host (%d %s); they travel whole, as without TopK",
                self._label,
                self.job.engine.size,
                "rank" if self.job.engine.size == 1 else "ranks",
            )


def _groups(groups: int | Sequence[Sequence[Any]] | None, keys: Sequence[Any]) -> registration.Groups:
    if groups is None or isinstance(groups, int):
        return groups
    place = {key: index for index, key in enumerate(keys)}
    wanted = [[place.get(kinds.key(variable)) for variable in group] for group in groups]
    return [[index for index in group if index is not None] for group in wanted]
