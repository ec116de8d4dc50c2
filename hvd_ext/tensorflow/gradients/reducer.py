"""The reduction of lists of gradients over the ranks, for the optimizers of Keras 3 and Keras 2 and for tapes.

A `GradientSet` is one list of variables with its channels; a `Reducer` has the lists of one optimizer or tape. Most
have one list. An optimizer or tape that is used for several parts of a model in turn has one for each part.

Ranks may have different gradients: a variable that a rank's loss does not use has no gradient on that rank. In eager
mode the ranks tell each other at every step which gradients they have. A traced function has the same gradients at
every step, so its ranks exchange their patterns only when they trace a pattern that is new to them; all ranks must then
reach a new pattern together. With partial rounds no rank may wait for the others, so the gradients are those of the
first step for good.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from hvd_ext.compression.momentum import Momentum
from hvd_ext.errors import InvalidError
from hvd_ext.job import banner, consensus, process_sets, runtime
from hvd_ext.job.log import logger
from hvd_ext.job.runtime import Runtime
from hvd_ext.options import is_file
from hvd_ext.options.gradients import GradientOptions
from hvd_ext.planning.layout import Groups
from hvd_ext.planning.tensors import Tensor
from hvd_ext.state import Arrays, Everyone
from hvd_ext.tensorflow import devices, ops
from hvd_ext.tensorflow.gradients import explanation, kinds, policies, registration, succession
from hvd_ext.tensorflow.gradients.channel import Channel
from hvd_ext.tensorflow.gradients.identity import Identity
from hvd_ext.tensorflow.gradients.replanning import Replanning
from hvd_ext.tensorflow.gradients.same_start import SameStart, Weights
from hvd_ext.tensorflow.gradients.step import Slot, Step
from hvd_ext.tensorflow.layers import Checksums

_LIST = "the list of variables"

Facts = Callable[[], dict[str, Any]]


class GradientSet:
    """One list of variables, on which the ranks of one runtime have agreed.

    Attributes:
        job: the runtime of the ranks that take part.
        channels: the channels opened so far. Another one is opened when a variable gets its first dense gradient.
        replannings: what plans the buckets of each channel again; none on one rank.
        name: the same on all ranks; unique in the job once the first channel is open.
        label: the name of the optimizer or tape.
        identity: tells the optimizer or tape from others.
        asked: the options of the optimizer or tape; `options` are those of this reduction, which differ from them with
            local steps.
        broadcast_follows: returns whether a callback will broadcast the weights after the next batch.
        facts: what the ranks have compared before the first step.
        is_of_optimizer: whether it is an optimizer's.
        keys: of the variables.
        policy: what the gradients go through besides the sum over the ranks.
        counters: variables that all ranks change alike in each step, by name; those of a rank that has joined are
            brought up to date afterwards.
        start: the comparison of the weights before the first update; None if there is none.

    Args:
        reducer: that of the optimizer or tape.
        job: the runtime of the ranks that take part.
        variables: the list, without local variables.
        first_step: returns the number of update steps before the first; the value of rank 0 counts.
        start: compares the weights before the first update; None to skip this comparison.
    """

    def __init__(
        self,
        reducer: Reducer,
        job: Runtime,
        variables: Sequence[Any],
        first_step: Callable[[], int] = lambda: 0,
        start: SameStart | None = None,
    ) -> None:
        self.start = start
        self.job = job
        self.channels: list[Channel] = []
        # whether the first channel, which communicates, gets successors in other worlds
        self.succeeds = reducer.policy.outlives and succession.is_needed()
        self.replannings: dict[Channel, Replanning] = {}
        self.asked, self.options = reducer.options, reducer.used
        self.momentum, self.first_step = reducer.momentum, first_step
        self.facts: dict[str, Any] = {}
        self.counters: dict[str, tf.Variable] = {}
        self.holds_again = reducer.holds_again
        self.broadcast_follows = lambda: reducer.broadcast_follows
        self.policy = reducer.policy(self)
        self._agrees_once = self.policy.agrees_once or reducer.agrees_once
        self.keys = [kinds.key(variable) for variable in variables]
        self.identity = reducer.identity
        self._described = reducer.identity.described()
        self.name = self.label = reducer.label
        self.is_of_optimizer = bool(reducer.identity.name)
        self._tensors = [
            Tensor(kinds.name(variable), tuple(variable.shape), kinds.dtype(variable).name) for variable in variables
        ]
        self._device = devices.of_buckets(variables, job)
        self._groups = _groups(self.options.groups, self.keys)
        self._agreement = job.agreement(registration.EXCHANGE)
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
        check: Callable[[], None],
        facts: Facts,
        *,
        communicates: bool = True,
        weights: Weights | None = None,
    ) -> tuple[Channel, str]:
        """Agree with the ranks on the gradients of an eager step, or of a function that is being traced.

        Args:
            own: this rank's kinds (`kinds.kind`), one letter for each variable.
            check: checks this rank's gradients, when the ranks exchange their kinds; an exception in it is raised on
                all ranks.
            facts: returns what must be the same on all ranks before the first step; an exception likewise.
            communicates: False if this eager call only accumulates gradients; then nothing is exchanged.
            weights: the weights that `start` compares.

        Returns:
            A channel for all dense gradients, and the combined kinds of all ranks.

        Raises:
            MismatchError: the ranks' variables, options or first weights differ.
            HvdExtError: what `check` or `facts` raised on some rank.
        """
        traced = not tf.executing_eagerly()
        # an agreement takes several exchanges, and another thread's must not come between them
        with self._agreement, tf.init_scope():  # exchanges are eager, and `facts` may read Keras' learning rate
            if not self.channels:

                def first() -> dict[str, Any]:
                    check()
                    self.facts = {_LIST: "new", **facts()}
                    return self.facts

                channel = self._open(own, first, self.start, weights)
                if self.options.local_steps is None:  # else each host would say it
                    banner.say(self.job, banner.optimizer_line(channel.name, channel.layout, self.options))
                found = channel.kinds
            elif self._agrees_once:
                return self.channels[0], self.policy.classify(self._agreed_for_good(own), self.channels[0])
            elif traced:
                found = self._traced.get(own) or self._exchanged(own, check)
            else:
                own = kinds.joint([own, self._since_update]) if self._since_update else own
                if not communicates:
                    self._since_update = own
                    joint = kinds.joint([own, self._last])
                    return self.channels[-1], self.policy.classify(joint, self.channels[-1])
                found = self._exchanged(own, check)
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
        """Restore what `save_layout` returned, after the first channel was opened; all ranks call it alike."""
        newest = self.replannings.get(self.channels[-1])
        if newest is not None:
            newest.load(own)

    def progress(self) -> dict[str, Any]:
        """Describe, for `catch_up`, what the ranks have agreed on and counted in the steps so far."""
        counters = {name: counter.numpy().tolist() for name, counter in self.counters.items()}
        return {"traced": self._traced, "counters": counters}

    def catch_up(self, progress: dict[str, Any]) -> None:
        """Continue after all ranks have joined; all ranks call it.

        Args:
            progress: that of a rank which has taken part in all steps.
        """
        self._traced |= progress["traced"]
        for name, counter in self.counters.items():
            if name in progress["counters"]:
                counter.assign(progress["counters"][name])
        for channel, replanning in self.replannings.items():
            if channel.is_open:
                replanning.resume()
        self.policy.resume()

    def close(self) -> None:
        """Close all channels."""
        for channel in (*self.channels, *self.policy.channels):
            channel.close()
        for reducer in self.policy.reducers:
            reducer.close()

    def _agreed_for_good(self, own: str) -> str:
        """Check this rank's kinds against those of the first step."""
        agreed = self.channels[0].kinds
        new = [place for place, kind in enumerate(own) if kind != kinds.NONE and agreed[place] != kind]
        if new:
            raise InvalidError(
                f"{self.label}: no rank had a gradient of {self._tensors[new[0]].name!r} in the first step; with "
                f"sync={self.options.sync!r} the ranks agree on their gradients once, because later steps do not wait "
                "for each other"
            )
        return agreed

    def _exchanged(self, own: str, check: Callable[[], None]) -> str:
        def mine() -> dict[str, Any]:
            check()
            return {"identity": self._described, "facts": {_LIST: f"registered as number {self._number}"}, "kinds": own}

        values, _ = consensus.exchange_in_step(self.job.engine, registration.EXCHANGE, mine)
        if any(value["facts"] != values[0]["facts"] for value in values):
            registration.check_facts(values, self.job.engine.ranks)
        return kinds.joint([value["kinds"] for value in values])

    def _channel(self, found: str) -> Channel:
        for channel in reversed(self.channels) if self.policy.newest_channel_only else self.channels:
            pairs = zip(channel.kinds, found, strict=True)
            if all(kind == kinds.DENSE for kind, wanted in pairs if wanted == kinds.DENSE):
                return channel
        opened = [channel.kinds for channel in self.channels]
        return self._open(
            kinds.joint([found, *opened]), lambda: {_LIST: f"number {self._number}, with more dense gradients"}
        )

    def _open(
        self,
        own: str,
        facts: Callable[[], dict[str, Any]],
        start: SameStart | None = None,
        weights: Weights | None = None,
    ) -> Channel:
        channel = registration.open_channel(
            self.label,
            self._tensors,
            self.options.for_channel(self.job.options),
            kinds=own,
            owner=self.job,
            groups=self._groups,
            facts=facts,
            start=start,
            weights=weights,
            identity=self.identity,
            device=self._device,
            **self.policy.plan(),
        )
        if not self.channels:
            # counted only now that it is open on all ranks: a channel that was refused must not count on any rank
            self._number = self.job.count("gradient set")
            self.name = f"{self.label}.{self._number}"
            if self.start is not None:
                self.start.name = self.name
            runtime.current().gradient_sets.add(self)
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
        """Plan the buckets of a new channel again at some steps; they are counted from those of the channel before."""
        before = None if len(self.channels) == 1 else self.replannings.get(self.channels[-2])
        self.replannings[channel] = Replanning(
            channel,
            self.job,
            name=f"{self.name}: buckets of channel {len(self.channels)}",
            process_set=self.options.process_set,
            done=0 if before is None else before.steps,
        )


class Reducer:
    """The reduction of one optimizer's or tape's gradients.

    Args:
        identity: tells the optimizer or tape from others; its label names it in messages and channels.
        options: how gradients are reduced.
        momentum: the optimizer's momentum, if the options ask for momentum correction.
        first_step: returns the number of update steps before the first step of this object.
        after_first: whether the weights may be broadcast after the first step, as a loop with a tape does.
        holds_again: whether there is a loss scale; with partial rounds, see `hvd_ext.engine.partial.Partial`.
        waits: returns whether a broadcast of the weights is still to come; None: `broadcast_follows` says so.
        agrees_once: whether the gradients of each list are the same in all steps, so that the ranks agree on them once.

    Attributes:
        label: the name of the optimizer or tape, such as "Adam".
        policy: the class of the policy that the options ask for.
        used: the options by which it reduces; with local steps not those that it was given.
        broadcast_follows: whether a callback will broadcast the weights after the next batch.
        layer_states: returns the checksums of the states that the model's layers have besides their variables.
    """

    def __init__(
        self,
        identity: Identity,
        options: GradientOptions,
        momentum: Momentum | None = None,
        first_step: Callable[[], int] = lambda: 0,
        *,
        after_first: bool = False,
        holds_again: bool = False,
        waits: Callable[[], bool] | None = None,
        agrees_once: bool = False,
    ) -> None:
        self.agrees_once = agrees_once
        self.broadcast_follows = False
        self._waits = waits or (lambda: self.broadcast_follows)
        self.layer_states: Callable[[], Checksums] = list
        self.holds_again = holds_again
        self._after_first = after_first
        self.label = identity.label
        self.identity = identity
        self.options = options
        self.policy = policies.chosen(options)
        self.momentum = momentum
        self._first_step = first_step
        self._restored: dict[int, tuple[Arrays | None, Everyone]] = {}
        self._factors: list[float] = []  # by which velocities in `_restored` are still to be multiplied, in turn
        self._layouts: dict[int, Arrays] = {}  # from restore_layouts, of lists that have had no step yet
        self._flushing = 0  # see `flush`, before there is a list
        self._local: list[Callable[[], Iterable[Any]]] = []
        self._sets: dict[tuple[Any, ...], GradientSet] = {}
        self._job: Runtime | None = None  # see `_members`
        self.used = options
        self._divisor = 1  # of the gradients of local variables: the number of all ranks, as in an average over them

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The channels opened so far."""
        return tuple(channel for every in self._sets.values() for channel in every.channels)

    @property
    def sets(self) -> tuple[GradientSet, ...]:
        """One set for each list of variables reduced so far, in the order of their first steps."""
        return tuple(self._sets.values())

    def restore(self, states: dict[int, tuple[Arrays | None, Everyone]]) -> None:
        """Restore what each list of variables has saved, by its place in `sets`; all ranks call it alike.

        A list that has had no step yet is restored at its first step; see `Policy.load`.
        """
        self._restored, self._factors = dict(states), []
        for place, one in enumerate(self.sets):
            self._load(place, one)

    @property
    def pending(self) -> dict[int, tuple[Arrays | None, Everyone]]:
        """The states from `restore` for the lists that have had no step since, by place."""
        return dict(self._restored)

    def save_layouts(self) -> dict[int, Arrays]:
        """Copy how each list of variables is reduced, by its place in `sets`; those from `restore_layouts` too."""
        return {
            **self._layouts,
            **{place: saved for place, one in enumerate(self.sets) if (saved := one.save_layout())},
        }

    def restore_layouts(self, layouts: dict[int, Arrays]) -> None:
        """Reduce as `save_layouts` says, from the next step on; all ranks call it alike."""
        self._layouts = dict(layouts)
        for place, one in enumerate(self.sets):
            self._load(place, one)

    def save_first_layout(self) -> Arrays:
        """Copy how a tape's gradients are reduced; it has only one list."""
        return self.save_layouts().get(0, {})

    def load_first_layout(self, own: Arrays) -> None:
        """Reduce as `save_first_layout` says."""
        if own:
            self.restore_layouts({0: own})

    def save_first(self) -> Arrays:
        """Copy this rank's residuals of a tape, which has only one list."""
        return self.sets[0].policy.save() if self._sets else {}

    def load_first(self, own: Arrays | None, everyone: Everyone) -> None:
        """Restore what `save_first` returned; see `Policy.load`."""
        self.restore({0: (own, everyone)})

    def flush(self, ahead: int = 1) -> None:
        """Make a step of each list send what the ranks have kept: a dense one with `TopK`, where all call it, or a full
        one with partial rounds.

        Args:
            ahead: with partial rounds: the next step is 1, the one after it 2, and so on.
        """
        self._flushing = 0 if self._sets else ahead
        for one in self.sets:
            one.policy.flush(ahead)

    def scale_momentum(self, factor: float) -> None:
        """Multiply the velocities of momentum correction, between two steps; all ranks call it alike."""
        self._factors.append(factor)
        for one in self.sets:
            one.policy.scale_momentum(factor)

    def register_local_var(self, variable: Any) -> None:
        """Make a variable local: its gradient is not reduced, only scaled (`scale_local_gradients`)."""
        self.register_local_source(lambda: (variable,))

    @property
    def local_keys(self) -> frozenset[Any]:
        """The keys of the local variables."""
        return frozenset(kinds.key(variable) for source in self._local for variable in source())

    def register_local_source(self, source: Callable[[], Iterable[Any]]) -> None:
        """Make variables local that may not exist yet.

        Args:
            source: returns the variables, for example the weights of a layer; called at every step.
        """
        self._local.append(source)

    @ops.plain
    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], facts: Facts | None = None) -> list[Any]:
        """Reduce gradients over the ranks; eager, or while a function is traced. All ranks call it.

        Args:
            gradients: this rank's gradients: dense tensors, `tf.IndexedSlices` or None.
            variables: the variables that they belong to, in an order that is the same on all ranks.
            facts: returns further values that must be the same on all ranks; compared when a channel is opened.

        Returns:
            The sums or averages in their variables' dtypes, with equal bits on all ranks: `tf.IndexedSlices` without
            repeated rows if no rank has a dense gradient, None if no rank has any. The gradient of a local variable is
            this rank's own, scaled. On a rank outside of the process set all gradients are returned unchanged.

        Raises:
            InvalidError: the gradients cannot be reduced; the message says why and what to do.
            MismatchError: the ranks' options or variables differ.
            NotInitializedError: before `init()`.
        """
        return self.begin(gradients, variables, facts).reduce_all()

    def begin(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        facts: Facts | None = None,
        *,
        dense: bool = False,
        communicates: bool = True,
        weights: Sequence[Any] | None = None,
        absent: bool = False,
        refuse: Callable[[], None] = lambda: None,
    ) -> Step:
        """Begin a step, whose gradients may be reduced later.

        Args:
            gradients: this rank's gradients.
            variables: the variables that they belong to.
            facts: returns further values that must be the same on all ranks; compared when a channel is opened.
            dense: make sparse gradients dense.
            communicates: False if this eager call only accumulates its gradients; the last agreement then holds.
            weights: the real sources, if `variables` are only their descriptions; tensors among them are not compared.
            absent: take a result that is there already, and give no gradients of this rank; eager only.
            refuse: raises an error that all ranks raise, whenever the ranks exchange which gradients they have.

        Raises:
            InvalidError, MismatchError, NotInitializedError: as `reduce`.
        """
        ops.refuse_xla(self.label)
        if len(gradients) != len(variables):
            raise InvalidError(
                f"{self.label}: it takes one gradient or None for each variable; "
                f"got {len(gradients)} gradients and {len(variables)} variables"
            )
        job = self._members()
        if job is None:
            pairs = zip(variables, gradients, strict=True)
            return Step(self.label, [Slot(variable, kinds.OUTSIDE, gradient, None) for variable, gradient in pairs])
        dense = dense or self.options.sparse_as_dense or self.policy.dense_only
        local = self.local_keys
        keys = [kinds.key(variable) for variable in variables]
        shared = [index for index, key in enumerate(keys) if key not in local]
        place_of = {index: place for place, index in enumerate(shared)}
        number, every = self._set(job, tuple(keys[index] for index in shared), [variables[index] for index in shared])

        def check() -> None:
            for index in shared:
                kinds.refuse(self.label, gradients[index], variables[index])
                self.policy.check(self.label, variables[index])
            refuse()

        def compared() -> dict[str, Any]:
            return {**self.options.described(), **({} if facts is None else facts())}

        own = "".join(kinds.kind(gradients[index], dense) for index in shared)
        unsure = None
        if every.start is not None and not every.start.done:
            given = variables if weights is None else weights
            pairs_given = [(kinds.name(variables[index]), given[index]) for index in shared]
            unsure = Weights.here([(name, weight) for name, weight in pairs_given if hasattr(weight, "assign")])
        channel, joint = every.agree(own, check, compared, communicates=communicates, weights=unsure)
        if every.succeeds and channel is every.channels[0]:
            succession.note(self, channel, [variables[index] for index in shared], compared)
        if self._layouts or self._restored:
            with tf.init_scope():
                self._load(number, every)
        comparison = None if every.start is None or unsure is None else every.start.again(unsure)
        slots = []
        for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            place = place_of.get(index)
            kind = kinds.LOCAL if place is None else joint[place]
            slots.append(Slot(variable, kind, kinds.ready(self.label, gradient, variable, kind, self._divisor), place))
        if self._flushing:
            with tf.init_scope():
                every.policy.flush(self._flushing)
        self._flushing = 0
        return Step(self.label, slots, every, channel, comparison, absent=absent)

    def register_again(self, channel: Channel, variables: Sequence[Any], facts: Facts) -> Channel:
        """Register a list of gradients in the next world of a supervised job, with the gradients that a graph has.

        All ranks call it, or make their first step with these variables.

        Args:
            channel: that of the graph, whose world has ended.
            variables: of the list.
            facts: as for `reduce`.

        Returns:
            The channel that takes its place.

        Raises:
            InvalidError, MismatchError, NotInitializedError: as `reduce`.
        """
        job = self._members()
        if job is None:
            raise InvalidError(f"{self.label}: this rank is outside of the optimizer's process set in this world")
        _, every = self._set(job, tuple(kinds.key(variable) for variable in variables), variables)
        weights = Weights.here([(kinds.name(one), one) for one in variables if hasattr(one, "assign")])
        found, _ = every.agree(channel.kinds, lambda: None, facts, weights=None if every.start is None else weights)
        return found

    def close(self) -> None:
        """Free the channels' buffers. A second call does nothing."""
        sets, self._sets = self._sets, {}
        for every in sets.values():
            every.close()

    def _load(self, number: int, every: GradientSet) -> None:
        """Restore a list's layout and state, once the list has a channel; one of before `shutdown` gets another."""
        if not every.channels or not every.is_open:
            return
        if number in self._layouts:
            every.load_layout(self._layouts.pop(number))
        if number in self._restored and self.policy.keeps:
            every.policy.load(*self._restored.pop(number))
            for factor in self._factors:
                every.policy.scale_momentum(factor)

    def _members(self) -> Runtime | None:
        """Return the runtime of the process set; None if this rank is outside of it."""
        if self._job is None or not self._job.running:
            members = process_sets.runtime_of(self.options.process_set)
            if members is not None and self.options.scale_local_gradients:
                self._divisor = members.engine.size
            if self.options.local_steps is not None and members is not None:
                self.used = self.options.within(self._group(members))
            self._job = process_sets.runtime_of(self.used.process_set)
        return self._job

    def _group(self, members: Runtime) -> Any:
        """Agree on local steps, before a communicator of some of the ranks is made; returns their process set."""
        local = self.options.local_steps
        assert local is not None
        with members.agreement(registration.EXCHANGE):

            def own() -> dict[str, Any]:
                facts = {_LIST: "new", "local_steps, within": local.within}
                return {"identity": self.identity.described(), "facts": facts}

            values = consensus.exchange(members.engine, registration.EXCHANGE, own)
            registration.check_facts(values, members.engine.ranks)
            return process_sets.group(self.options.process_set, local.within)

    def _set(self, job: Runtime, keys: tuple[Any, ...], variables: Sequence[Any]) -> tuple[int, GradientSet]:
        """Return the set of these variables, and its place in `sets`."""
        every = self._sets.get(keys)
        if every is None or every.job is not job or not every.is_open:
            if every is not None and every.policy.lost_at_shutdown:
                logger.warning("%s: hvd_ext was shut down, and %s", self.label, every.policy.lost_at_shutdown)
            start = self._start(job)
            number = list(self._sets).index(keys) if keys in self._sets else len(self._sets)
            every = GradientSet(self, job, variables, functools.partial(self._steps_before, number), start)
            self._sets[keys] = every
        return list(self._sets).index(keys), every

    def _steps_before(self, number: int) -> int:
        """Give the number of steps before the first one of a list, by its place in `sets`."""
        saved = self.policy.steps_before(*self._restored[number]) if number in self._restored else None
        return self._first_step() if saved is None else saved

    def _start(self, job: Runtime) -> SameStart | None:
        if not self.options.check_start or job.engine.size == 1 or self.options.local_steps is not None:
            return None  # outer steps compare the weights of all hosts
        if not tf.compat.v1.executing_eagerly_outside_functions():
            return None  # in a graph of TensorFlow 1, variables have values only in a session
        return SameStart(
            self.label,
            job,
            after_first=self._after_first,
            waits=self._waits,
            states=lambda: self.layer_states(),  # a model may be compiled with the optimizer later
        )


@dataclasses.dataclass(eq=False)
class Distribution:
    """The reduction of an optimizer's gradients. The optimizer inside of a loss-scale optimizer shares the outer one's.

    Attributes:
        step: the step under way; None between two steps.

    Args:
        outer: refers to the wrapped optimizer.
        local_layers: the layers whose gradients are not reduced.
    """

    reducer: Reducer
    outer: weakref.ref[Any]
    local_layers: tuple[Any, ...] = ()
    step: Step | None = dataclasses.field(default=None, init=False)

    @contextlib.contextmanager
    def within(self, step: Step) -> Iterator[Step]:
        """Make a step the one under way: Keras' methods between `apply` and the update take no argument for it."""
        before, self.step = self.step, step
        try:
            yield step
        finally:
            self.step = before


def distribution_of(optimizer: Any) -> Distribution | None:
    """Return what an optimizer has of ours; None for a plain one."""
    distribution = getattr(optimizer, "_hvd_ext", None)
    return distribution if isinstance(distribution, Distribution) else None


def reducer_of(optimizer: Any) -> Reducer | None:
    """Return what reduces the gradients of an optimizer; None for a plain one."""
    distribution = distribution_of(optimizer)
    return None if distribution is None else distribution.reducer


def _groups(groups: int | Sequence[Sequence[Any]] | None, keys: Sequence[Any]) -> Groups:
    if groups is None or isinstance(groups, int):
        return groups
    place = {key: index for index, key in enumerate(keys)}
    wanted = [[place.get(kinds.key(variable)) for variable in group] for group in groups]
    return [[index for index in group if index is not None] for group in wanted]
