"""Registration: the ranks agree on a list of gradients once, and then reduce them without negotiation.

`open_channel` opens a channel on all ranks together. The ranks compare names, shapes, dtypes, options and plans at that
moment. A difference raises the same `MismatchError` on all ranks and leaves nothing behind.

With partial rounds no rank may wait for the others, so the gradients are those of the first step for good.

A `GradientSet` is one list of variables with its channels. Ranks may have different gradients: a variable that a rank's
loss does not use has no gradient on that rank. In eager mode the ranks tell each other at every step which gradients
they have. A traced function has the same gradients at every step, so its ranks exchange their patterns only when they
trace a pattern that is new to them; all ranks must then reach a new pattern together.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvd_ext.compression import Codec
from hvd_ext.compression.momentum import Momentum
from hvd_ext.engine.partial import Partial
from hvd_ext.errors import InvalidError
from hvd_ext.job import banner, consensus, runtime
from hvd_ext.options import Options, is_file
from hvd_ext.options.gradients import GradientOptions
from hvd_ext.options.reduction import compared
from hvd_ext.planning.layout import Groups, Layout, layout
from hvd_ext.planning.step_times import StepTimes
from hvd_ext.planning.tensors import DTYPES, Tensor
from hvd_ext.state import Arrays
from hvd_ext.tensorflow import ops
from hvd_ext.tensorflow.gradients import explanation, identity as identities, kinds as gradient_kinds, policies
from hvd_ext.tensorflow.gradients.channel import Channel
from hvd_ext.tensorflow.gradients.identity import Identity
from hvd_ext.tensorflow.gradients.replanning import Replanning
from hvd_ext.tensorflow.gradients.same_start import SameStart, Weights
from hvd_ext.topology.tree import Tree

# All channels share one name, so that ranks that open different channels meet, and learn what differs.
EXCHANGE = "agreement on gradients"

_LIST = "the list of variables"
_DENSE = gradient_kinds.DENSE


@ops.plain
def open_channel(
    name: str,
    tensors: Sequence[Tensor],
    options: Options | None = None,
    *,
    kinds: str | None = None,
    owner: runtime.Runtime | None = None,
    groups: Groups = None,
    codec: Codec | None = None,
    sparse_algorithm: str = "hitopk",
    momentum: Momentum | None = None,
    facts: Callable[[], dict[str, Any]] | None = None,
    start: SameStart | None = None,
    weights: Weights | None = None,
    partial: Partial | None = None,
    delay: int = 0,
    identity: Identity | None = None,
) -> Channel:
    """Open a channel; all ranks call it, with equal arguments except for `kinds`.

    It runs eagerly, also while a function is traced.

    Args:
        name: the channel's name in messages, such as "Adam"; several channels may share a name.
        tensors: the gradients, in the same order on all ranks.
        options: algorithm, bucket_nbytes, op and compression; None takes the options of `owner`.
        kinds: this rank's kind of each gradient, one letter each (`gradients.kinds.kind`); None if all are dense.
        owner: the runtime of the ranks that take part; None for all ranks.
        groups: as `planning.layout.layout` takes them, with places in `tensors`.
        codec: how gradients are made smaller between hosts; None to send them whole.
        sparse_algorithm: the algorithm of the buckets with top-k gradients.
        momentum: the momentum correction that gradients go through before the selection.
        facts: returns further values that must be the same on all ranks, by name; an exception in it is raised on all
            ranks.
        start: compares the weights before the first update; None to skip this comparison.
        weights: the weights that `start` compares.
        partial: what makes its rounds partial, with the first rank's number of steps before; None if steps wait for
            all ranks.
        delay: how many steps before its own a step's results are of.
        identity: tells the optimizer or tape from others; None: the name does.

    Returns:
        The open channel.

    Raises:
        MismatchError: the ranks disagree; the message names the tensor or option and both ranks' values. It is
            raised on all ranks, and the next collective works.
        InvalidError: a dtype or shape on some rank cannot be reduced; raised on all ranks.
        PlanError: the algorithm cannot run on the topology.
        NotInitializedError: before `init()`.
    """
    owner = runtime.current() if owner is None else owner
    options = owner.options if options is None else options
    own = _DENSE * len(tensors) if kinds is None else kinds
    described_identity = (Identity(name) if identity is None else identity).described()
    where = f"channel {name!r}"

    def mine() -> dict[str, Any]:
        given = facts() if facts is not None else {}
        if codec is not None:
            given["momentum taken over"] = None if momentum is None else [momentum.value, momentum.nesterov]
        sums = None if start is None or weights is None else start.described(weights)
        described = _described(where, tensors, options, groups)
        before = None if partial is None else partial.before
        return {
            "identity": described_identity,
            "facts": given,
            "weights": sums,
            "before": before,
            **described,
            "kinds": own,
        }

    values = consensus.exchange(owner.engine, EXCHANGE, mine)
    check_facts(values, owner.engine.ranks)
    consensus.check_same(where, [value["options"] for value in values], owner.engine.ranks)
    consensus.check_tensors(where, [value["tensors"] for value in values], owner.engine.ranks)
    if partial is not None:
        partial = dataclasses.replace(partial, before=values[0]["before"])
    if identity is not None:
        identities.check_numbers(owner, values, owner.engine.ranks)
    if start is not None and weights is not None:
        start.registered([value["weights"] for value in values])
    agreed = joint([value["kinds"] for value in values])
    made: list[Layout] = []

    places = [place for place, kind in enumerate(agreed) if kind == _DENSE]

    def lay_out(times: StepTimes | None, whole: bool = False) -> Layout:
        forced = is_file(options.buckets) and not whole  # a file says how gradients are selected too
        made = layout(
            owner.tree,
            tensors,
            options.op,
            algorithm=options.algorithm,
            bucket_nbytes=options.bucket_nbytes,
            buckets="auto" if is_file(options.buckets) else options.buckets,
            times=times,
            wire=options.compression.value or None,
            groups=groups,
            places=places,
            codec=None if whole else codec,
            sparse_algorithm=sparse_algorithm,
            momentum=None if whole else momentum,
        )
        return _forced(options.buckets, owner.tree, made, options.op) if forced else made

    until = codec is not None and codec.until is not None

    def described() -> dict[str, Any]:
        made.append(lay_out(None))
        later = lay_out(None, whole=True).described() if until else {}
        return {**made[0].described(), **{f"{name}, whole": values for name, values in later.items()}}

    layouts = consensus.exchange(owner.engine, f"{EXCHANGE}, plans", described)
    consensus.check_same(where, layouts, owner.engine.ranks)
    kept = [values[0]["options"], str(codec), sparse_algorithm, str(momentum)]
    handle = owner.open(name, made[0], partial)
    settings = json.dumps(kept, sort_keys=True)
    return Channel(name, agreed, made[0], owner, handle, lay_out, settings, partial, delay, until=until)


def check_facts(values: Sequence[dict[str, Any]], ranks: Sequence[int]) -> None:
    """Compare the facts of all ranks.

    Args:
        values: what each rank sent: the "identity" of its optimizer or tape, and its "facts".
        ranks: the numbers of these ranks in the job.

    Raises:
        MismatchError: the names or a fact differ.
    """
    identities.check_names([value["identity"] for value in values], ranks)
    consensus.check_same(values[0]["identity"]["label"], [value["facts"] for value in values], ranks)


def joint(ranks: Sequence[str]) -> str:
    """Combine the ranks' kinds of each gradient.

    Args:
        ranks: for each rank, one letter per gradient, from `kinds.kind`.

    Returns:
        For each gradient "-" if no rank has it, "s" if every rank that has it has it sparse, else "d".
    """
    return "".join("d" if "d" in kinds else "s" if "s" in kinds else "-" for kinds in zip(*ranks, strict=True))


def _forced(path: str, tree: Tree, usual: Layout, op: int) -> Layout:
    """Read a layout from a file; `usual` is the one that the options ask for otherwise."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidError(f"buckets ({path}): must be a layout's file: {error}") from error
    tensors, source = usual.tensors, f"buckets ({path})"
    found = Layout.from_json(_renamed(values, tensors), tree, tensors, op, places=usual.sent_tensors, source=source)
    there, here = found.forms, usual.forms
    for place in usual.sent_tensors:
        if there[place] != here[place]:
            raise InvalidError(
                f"{source}: {tensors[place].name!r} is sent in another form than the options ask for; give the "
                "compression and the momentum_correction with which the file was written, or write it again"
            )
    return found


def _renamed(values: Any, tensors: Sequence[Tensor]) -> Any:
    """Give the tensors of a layout's file the names that they have here, if they are the same tensors."""
    try:
        there = list(values["tensors"])
        if len(there) != len(tensors) or not all(map(consensus.alike, there, [tensor.name for tensor in tensors])):
            return values
        name_of = {name: tensor.name for name, tensor in zip(there, tensors, strict=True)}
        buckets = [{**one, "tensors": [name_of[name] for name in one["tensors"]]} for one in values["buckets"]]
        return {**values, "tensors": {name_of[name]: values["tensors"][name] for name in there}, "buckets": buckets}
    except (KeyError, TypeError, AttributeError):
        return values  # whoever reads it says what is wrong


def _described(where: str, tensors: Sequence[Tensor], options: Options, groups: Groups) -> dict[str, Any]:
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise InvalidError(
                f"{where}, {tensor.name!r}: gradients of dtype {tensor.dtype} cannot be reduced; "
                f"the dtypes are {', '.join(DTYPES)}"
            )
        if not all(isinstance(dimension, int) and dimension >= 0 for dimension in tensor.shape):
            raise InvalidError(f"{where}, {tensor.name!r}: the shape {tensor.shape} must be known")
    of_channel = {name: getattr(options, name) for name in compared("channel")}
    return {
        "options": {
            **{name: value.name if isinstance(value, enum.Enum) else value for name, value in of_channel.items()},
            "groups": groups if isinstance(groups, int) or groups is None else [list(group) for group in groups],
        },
        "tensors": [[tensor.name, tensor.text] for tensor in tensors],
    }


class GradientSet:
    """One list of variables, on which the ranks of one runtime have agreed.

    Attributes:
        job: the runtime of the ranks that take part.
        channels: the channels opened so far. Another one is opened when a variable gets its first dense gradient.
        replannings: what plans the buckets of each channel again; none on one rank.
        name: the same on all ranks; unique in the job once the first channel is open.
        label: the name of the optimizer or tape.
        is_of_optimizer: whether it is an optimizer's.
        keys: of the variables.
        policy: what the gradients go through besides the sum over the ranks.
        start: the comparison of the weights before the first update; None if there is none.

    Args:
        identity: the optimizer or tape.
        options: how the gradients are reduced.
        job: the runtime of the ranks that take part.
        variables: the list, without local variables.
        momentum: the momentum correction that gradients go through before the selection; None for none.
        first_step: returns the number of update steps before the first; the value of rank 0 counts.
        start: compares the weights before the first update; None to skip this comparison.
        holds_again: whether there is a loss scale; with partial rounds, see `hvd_ext.engine.partial.Partial`.
    """

    def __init__(
        self,
        identity: Identity,
        options: GradientOptions,
        job: runtime.Runtime,
        variables: Sequence[Any],
        momentum: Momentum | None = None,
        first_step: Callable[[], int] = lambda: 0,
        start: SameStart | None = None,
        *,
        holds_again: bool = False,
    ) -> None:
        self.start = start
        self.job = job
        self.channels: list[Channel] = []
        self.replannings: dict[Channel, Replanning] = {}
        self.name = self.label = identity.label
        self.is_of_optimizer = bool(identity.name)
        self.options, self.momentum, self.first_step, self.holds_again = options, momentum, first_step, holds_again
        self.policy = policies.chosen(options)(self)
        self._identity = identity
        self._tensors = [
            Tensor(gradient_kinds.name(variable), tuple(variable.shape), gradient_kinds.dtype(variable).name)
            for variable in variables
        ]
        self.keys = [gradient_kinds.key(variable) for variable in variables]
        self._groups = _groups(options.groups, self.keys)
        self._traced: dict[str, str] = {}  # own kinds -> the ranks' kinds
        self._number = -1
        self._last = ""
        self._since_update = ""

    @property
    def is_open(self) -> bool:
        """Whether all its channels are open; also True before the first channel."""
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
            checked: checks this rank's gradients and returns the facts that must be the same on all ranks; an
                exception in it is raised on all ranks. Called when the ranks exchange their kinds.
            traced: whether a function is being traced.
            communicates: False if this eager call only accumulates gradients; then nothing is exchanged.
            weights: the weights that `start` compares.

        Returns:
            A channel for all dense gradients, and the combined kinds of all ranks.

        Raises:
            MismatchError: the ranks' variables, options or first weights differ.
            HvdExtError: what `checked` raised on some rank.
        """
        # an agreement takes several exchanges, and another thread's must not come between them
        with self.job.agreement(EXCHANGE):
            return self._agreed(own, checked, traced, communicates, weights)

    def _agreed(
        self,
        own: str,
        checked: Callable[[], dict[str, Any]],
        traced: bool,
        communicates: bool,
        weights: Weights | None,
    ) -> tuple[Channel, str]:
        if not self.channels:
            channel = self._open(own, lambda: {_LIST: "new", **checked()}, self.start, weights)
            banner.say(self.job, banner.optimizer_line(channel.name, channel.layout, self.options))
            found = channel.kinds
        elif self.policy.agrees_once:
            return self.channels[0], self._agreed_for_good(own)
        elif traced:
            found = self._traced.get(own) or self._exchanged(own, checked)
        else:
            own = joint([own, self._since_update]) if self._since_update else own
            if not communicates:
                self._since_update = own
                return self.channels[-1], self.policy.classify(joint([own, self._last]), self.channels[-1])
            found = self._exchanged(own, checked)
        if traced:
            self._traced[own] = found
        else:
            self._since_update = "" if communicates else own
        self._last = found
        channel = self._channel(found)
        return channel, self.policy.classify(found, channel)

    def save_layout(self) -> Arrays:
        """Copy the layout of the newest channel, and its number of steps; an empty dict without a plan."""
        newest = self.replannings.get(self.channels[-1]) if self.channels else None
        return {} if newest is None or not self.channels[-1].is_open else newest.save()

    def load_layout(self, own: Arrays) -> None:
        """Go on with what `save_layout` returned, after the first channel was opened; all ranks call it alike."""
        newest = self.replannings.get(self.channels[-1])
        if newest is not None:
            newest.load(own)

    def close(self) -> None:
        """Close all channels."""
        for channel in self.channels:
            channel.close()

    def _agreed_for_good(self, own: str) -> str:
        """Check this rank's kinds against those of the first step."""
        agreed = self.channels[0].kinds
        new = [place for place, kind in enumerate(own) if kind != gradient_kinds.NONE and agreed[place] != kind]
        if new:
            raise InvalidError(
                f"{self.label}: no rank had a gradient of {self._tensors[new[0]].name!r} in the first step; with "
                f"sync={self.options.sync!r} the ranks agree on their gradients once, because later steps do not wait "
                "for each other"
            )
        return agreed

    def _exchanged(self, own: str, checked: Callable[[], dict[str, Any]]) -> str:
        def mine() -> dict[str, Any]:
            checked()
            facts = {_LIST: f"registered as number {self._number}"}
            return {"identity": self._identity.described(), "facts": facts, "kinds": own}

        values = consensus.exchange(self.job.engine, EXCHANGE, mine)
        check_facts(values, self.job.engine.ranks)
        return joint([value["kinds"] for value in values])

    def _channel(self, found: str) -> Channel:
        for channel in reversed(self.channels) if self.policy.newest_channel_only else self.channels:
            if all(kind == _DENSE for kind, wanted in zip(channel.kinds, found, strict=True) if wanted == _DENSE):
                return channel
        opened = [channel.kinds for channel in self.channels]
        return self._open(joint([found, *opened]), lambda: {_LIST: f"number {self._number}, with more dense gradients"})

    def _open(
        self,
        own: str,
        facts: Callable[[], dict[str, Any]],
        start: SameStart | None = None,
        weights: Weights | None = None,
    ) -> Channel:
        channel = open_channel(
            self.label,
            self._tensors,
            self.options.for_channel(self.job.options),
            kinds=own,
            owner=self.job,
            groups=self._groups,
            facts=facts,
            start=start,
            weights=weights,
            identity=self._identity,
            **self.policy.plan(),
        )
        if not self.channels:
            # counted only now that it is open on all ranks: a channel that was refused must not count on any rank
            self._number = self.job.count("gradient set")
            self.name = f"{self.label}.{self._number}"
            if self.start is not None:
                self.start.name = self.name
        before = self.channels[-1] if self.channels else None
        self.channels.append(channel)
        options = self.options.for_channel(self.job.options)
        planned = self.job.engine.size > 1 and channel.layout.buckets and not is_file(options.buckets)
        if planned and channel.partial is None:  # partial rounds begin when all their gradients are there
            self._replan(channel)
        self.policy.opened(channel, before)
        explanation.say(self.job, channel.name, channel.layout, None)
        return channel

    def _replan(self, channel: Channel) -> None:
        """Plan the buckets of a new channel again at some steps; the channel goes on counting the steps of the last."""
        before = None if len(self.channels) == 1 else self.replannings.get(self.channels[-2])
        self.replannings[channel] = Replanning(
            channel,
            self.job,
            name=f"{self.name}: buckets of channel {len(self.channels)}",
            process_set=self.options.process_set,
            done=0 if before is None else before.steps,
        )


def _groups(groups: int | Sequence[Sequence[Any]] | None, keys: Sequence[Any]) -> Groups:
    if groups is None or isinstance(groups, int):
        return groups
    place = {key: index for index, key in enumerate(keys)}
    wanted = [[place.get(gradient_kinds.key(variable)) for variable in group] for group in groups]
    return [[index for index in group if index is not None] for group in wanted]
