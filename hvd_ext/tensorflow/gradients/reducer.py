"""The reduction of a list of gradients over the ranks, for the optimizers of Keras 3 and Keras 2 and for tapes.

Channels are opened when they are first needed. Most optimizers need one. An optimizer or tape that is used for several
parts of a model in turn has one channel for each list of variables.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from hvd_ext.compression.momentum import Momentum
from hvd_ext.errors import InvalidError
from hvd_ext.job import process_sets
from hvd_ext.job.log import logger
from hvd_ext.job.runtime import Runtime
from hvd_ext.options.gradients import GradientOptions
from hvd_ext.state import Arrays, Everyone
from hvd_ext.tensorflow import devices, ops
from hvd_ext.tensorflow.gradients import kinds, policies
from hvd_ext.tensorflow.gradients.channel import Channel
from hvd_ext.tensorflow.gradients.identity import Identity
from hvd_ext.tensorflow.gradients.registration import GradientSet
from hvd_ext.tensorflow.gradients.same_start import SameStart, Weights
from hvd_ext.tensorflow.gradients.step import Slot, Step
from hvd_ext.tensorflow.layers import Checksums

Facts = Callable[[], dict[str, Any]]


class Reducer:
    """The reduction of one optimizer's or tape's gradients.

    Args:
        identity: tells the optimizer or tape from others; its label names it in messages and channels.
        options: how gradients are reduced.
        momentum: the optimizer's momentum, if the options ask for momentum correction.
        first_step: returns the number of update steps before the first step of this object.
        after_first: whether the weights may be broadcast after the first step, as a loop with a tape does.
        holds_again: whether there is a loss scale; with partial rounds, see `hvd_ext.engine.partial.Partial`.

    Attributes:
        label: the name of the optimizer or tape, such as "Adam".
        policy: the class of the policy that the options ask for.
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
    ) -> None:
        self.broadcast_follows = False
        self.layer_states: Callable[[], Checksums] = list
        self._holds_again = holds_again
        self._after_first = after_first
        self.label = identity.label
        self._identity = identity
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

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The channels opened so far."""
        return tuple(channel for every in self._sets.values() for channel in every.channels)

    @property
    def sets(self) -> tuple[GradientSet, ...]:
        """One set for each list of variables reduced so far, in the order of their first steps."""
        return tuple(self._sets.values())

    def keys_of(self, one: GradientSet) -> tuple[Any, ...]:
        """Return the keys of the variables of one of `sets`, in their order."""
        return next(keys for keys, every in self._sets.items() if every is one)

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

        Raises:
            InvalidError, MismatchError, NotInitializedError: as `reduce`.
        """
        devices.refuse_xla(self.label)
        if len(gradients) != len(variables):
            raise InvalidError(
                f"{self.label}: it takes one gradient or None for each variable; "
                f"got {len(gradients)} gradients and {len(variables)} variables"
            )
        job = process_sets.runtime_of(self.options.process_set)
        if job is None:
            pairs = zip(variables, gradients, strict=True)
            return Step(self.label, [Slot(variable, kinds.OUTSIDE, gradient, None) for variable, gradient in pairs])
        dense = dense or self.options.sparse_as_dense or self.policy.dense_only
        local = self.local_keys
        keys = [kinds.key(variable) for variable in variables]
        shared = [index for index, key in enumerate(keys) if key not in local]
        place_of = {index: place for place, index in enumerate(shared)}
        number, every = self._set(job, tuple(keys[index] for index in shared), [variables[index] for index in shared])

        def checked() -> dict[str, Any]:
            for index in shared:
                kinds.refuse(self.label, gradients[index], variables[index])
                self.policy.check(self.label, variables[index])
            return {**self.options.described(), **({} if facts is None else facts())}

        own = "".join(kinds.kind(gradients[index], dense) for index in shared)
        traced = not tf.executing_eagerly()
        unsure = None
        if every.start is not None and not every.start.done:
            given = variables if weights is None else weights
            pairs_given = [(kinds.name(variables[index]), given[index]) for index in shared]
            unsure = Weights.here([(name, weight) for name, weight in pairs_given if hasattr(weight, "assign")])
        with tf.init_scope():  # exchanges are eager, and `facts` may read Keras' learning rate
            channel, joint = every.agree(own, checked, traced=traced, communicates=communicates, weights=unsure)
            self._load(number, every)
        compared = None if every.start is None or unsure is None else every.start.again(unsure)
        divisor = job.engine.size if self.options.scale_local_gradients else 1
        slots = []
        for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            place = place_of.get(index)
            kind = kinds.LOCAL if place is None else joint[place]
            slots.append(Slot(variable, kind, kinds.ready(self.label, gradient, variable, kind, divisor), place))
        if self._flushing:
            every.policy.flush(self._flushing)
        self._flushing = 0
        return Step(self.label, slots, every, channel, compared, absent=absent)

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

    def _set(self, job: Runtime, keys: tuple[Any, ...], variables: Sequence[Any]) -> tuple[int, GradientSet]:
        """Return the set of these variables, and its place in `sets`."""
        every = self._sets.get(keys)
        if every is None or every.job is not job or not every.is_open:
            if every is not None and every.policy.loses_at_shutdown:
                logger.warning(
                    "%s: hvd_ext was shut down, and the residuals are lost; call hvd_ext.flush() before shutdown()",
                    self.label,
                )
            start = self._start(job)
            number = list(self._sets).index(keys) if keys in self._sets else len(self._sets)
            every = GradientSet(
                self._identity,
                self.options,
                job,
                variables,
                self.momentum,
                functools.partial(self._steps_before, number),
                start,
                holds_again=self._holds_again,
            )
            self._sets[keys] = every
        return list(self._sets).index(keys), every

    def _steps_before(self, number: int) -> int:
        """Give the number of steps before the first one of a list, by its place in `sets`."""
        saved = self.policy.steps_before(*self._restored[number]) if number in self._restored else None
        return self._first_step() if saved is None else saved

    def _start(self, job: Runtime) -> SameStart | None:
        if not self.options.check_start or job.engine.size == 1:
            return None
        if not tf.compat.v1.executing_eagerly_outside_functions():
            return None  # in a graph of TensorFlow 1, variables have values only in a session
        return SameStart(
            self.label,
            job,
            after_first=self._after_first,
            waits=lambda: self.broadcast_follows,
            states=lambda: self.layer_states(),  # a model may be compiled with the optimizer later
        )
