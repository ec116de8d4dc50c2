"""How a list of gradients is reduced over the ranks: optimizers and tapes of Keras 3, Keras 2 and TensorFlow use it.

Channels are opened when they are first needed. Most optimizers have one; an optimizer or tape that is used for several
parts of a model in turn has one for each list of variables.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from hvd_ext.errors import HvdExtError, InvalidError
from hvd_ext.job import process_sets
from hvd_ext.job.runtime import Runtime
from hvd_ext.options.gradients import GradientOptions
from hvd_ext.tensorflow import ops
from hvd_ext.tensorflow.gradients import kinds
from hvd_ext.tensorflow.gradients.channel import Channel
from hvd_ext.tensorflow.gradients.gradient_set import GradientSet
from hvd_ext.tensorflow.gradients.same_start import SameStart, Weights
from hvd_ext.tensorflow.gradients.step import Step
from hvd_ext.tensorflow.topk.feedback import Arrays, Everyone
from hvd_ext.tensorflow.topk.in_part import InPart, Momentum

Facts = Callable[[], dict[str, Any]]
_LOG = logging.getLogger("hvd_ext")


class Reducer:
    """The reduction of one optimizer's or tape's gradients.

    Args:
        label: its name in messages and of its channels, such as "Adam".
        options: how gradients become one.
        momentum: taken over from the optimizer, where the options ask for that.
        first_step: gives the number of update steps that there were before the first.
        after_first: the weights may be broadcast after the first step, as a loop with a tape does.

    Attributes:
        broadcast_follows: a callback will broadcast the weights after the batch that comes.
    """

    def __init__(
        self,
        label: str,
        options: GradientOptions,
        momentum: Momentum | None = None,
        first_step: Callable[[], int] = lambda: 0,
        *,
        after_first: bool = False,
    ) -> None:
        self.broadcast_follows = False
        self._after_first = after_first
        self.label = label
        self.options = options
        self.momentum = momentum
        self._in_part = None if options.topk is None else InPart(options.topk, options.sparse_algorithm, momentum)
        self._first_step = first_step
        self._restored: dict[int, tuple[Arrays | None, Everyone]] = {}
        self._flushing = False
        self._local: list[Callable[[], Iterable[Any]]] = []
        self._sets: dict[tuple[Any, ...], GradientSet] = {}
        self._under_way: Step | None = None

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The channels opened so far."""
        return tuple(channel for every in self._sets.values() for channel in every.channels)

    @property
    def sets(self) -> tuple[GradientSet, ...]:
        """The lists of variables whose gradients were reduced so far, in the order of their first steps."""
        return tuple(self._sets.values())

    def restore(self, states: dict[int, tuple[Arrays | None, Everyone]]) -> None:
        """Go on from what was saved of each list, by its place in `sets`; all ranks call it alike.

        Now, or at the list's first step: see `GradientSet.load`.
        """
        self._restored = dict(states)
        for place, one in enumerate(self.sets):
            if place in self._restored:
                one.load(*self._restored.pop(place))

    @property
    def pending(self) -> dict[int, tuple[Arrays | None, Everyone]]:
        """What `restore` was given for lists that have had no step since, by their places."""
        return {**self._restored, **{place: one.restored for place, one in enumerate(self.sets) if one.restored}}

    def save_first(self) -> Arrays:
        """Copy what waits on this rank of a tape's only list."""
        return self.sets[0].save() if self._sets else {}

    def load_first(self, own: Arrays | None, everyone: Everyone) -> None:
        """Go on from what `save_first` gave; see `GradientSet.load`."""
        self.restore({0: (own, everyone)})

    def flush(self) -> None:
        """Make the next step of each list dense; all ranks call it alike."""
        self._flushing = not self._sets
        for one in self.sets:
            if one.feedback is not None:
                one.feedback.flush()

    def scale_momentum(self, factor: float) -> None:
        """Multiply the momentum that was taken over, where there is one, between two steps; all ranks call it alike."""
        for one in self.sets:
            one.scale_momentum(factor)

    def register_local_var(self, variable: Any) -> None:
        """Keep the gradient of a variable of this rank or of all: it is only divided (`scale_local_gradients`)."""
        self.register_local_source(lambda: (variable,))

    @property
    def local_keys(self) -> frozenset[Any]:
        """The keys of the variables whose gradients stay on their rank."""
        return frozenset(kinds.key(variable) for source in self._local for variable in source())

    def register_local_source(self, source: Callable[[], Iterable[Any]]) -> None:
        """Keep the gradients of variables on their rank that need not be there yet.

        Args:
            source: gives the variables, asked at every step; for example the weights of a layer.
        """
        self._local.append(source)

    @ops.plain
    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], facts: Facts | None = None) -> list[Any]:
        """Reduce gradients over the ranks; eager, or while a function is traced. All ranks call it.

        Args:
            gradients: this rank's gradients: dense tensors, `tf.IndexedSlices` or None.
            variables: the variables that they belong to, in an order that is the same on all ranks.
            facts: gives what else must be the same on all ranks; asked when a channel is opened.

        Returns:
            The sums or averages in their variables' dtypes, with equal bits on all ranks: slices without repeated rows
            where no rank has a dense gradient; None where no rank has one. Of local variables this rank's own, divided;
            outside of the process set all are this rank's own, as they were.

        Raises:
            InvalidError: the gradients cannot be reduced; the message says why and what to do.
            MismatchError: the ranks' options or variables differ.
            NotInitializedError: before `init()`.
        """
        with self.step(gradients, variables, facts) as ready:
            reduced = iter(self.reduce_step([gradient for gradient in ready if gradient is not None]))
            return [None if gradient is None else next(reduced) for gradient in ready]

    @contextlib.contextmanager
    def step(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        facts: Facts | None = None,
        *,
        dense: bool = False,
        communicates: bool = True,
        weights: Sequence[Any] | None = None,
    ) -> Iterator[list[Any]]:
        """Begin a step whose gradients are reduced later, by `reduce_step`; for Keras, which drops those that are None.

        Args:
            gradients: this rank's gradients.
            variables: the variables that they belong to.
            facts: gives what else must be the same on all ranks; asked when a channel is opened.
            dense: sparse gradients are made dense.
            communicates: False: nothing will be reduced in this eager call, which only adds its gradients up; what was
                agreed last holds.
            weights: the variables themselves, where `variables` only stand for them; tensors, which are none, too.

        Yields:
            The gradients to hand to `reduce_step` (without those that are None): in their variables' dtypes, zeros or
            empty slices where only other ranks have one.

        Raises:
            InvalidError, MismatchError, NotInitializedError: as `reduce`.
        """
        if not tf.executing_eagerly():
            kinds.refuse_xla(self.label)
        if len(gradients) != len(variables):
            raise InvalidError(
                f"{self.label}: it takes one gradient or None for each variable; "
                f"got {len(gradients)} gradients and {len(variables)} variables"
            )
        job = process_sets.runtime_of(self.options.process_set)
        if job is None:
            begun = Step(None, None, None, kinds.OUTSIDE * len(variables), (), list(gradients), variables, "")
        else:
            dense = dense or self.options.sparse_as_dense
            begun = self._begun(job, gradients, variables, facts, dense, communicates, weights)
        outer, self._under_way = self._under_way, begun
        try:
            yield begun.ready
        finally:
            self._under_way = outer

    @property
    def was_reduced(self) -> bool:
        """Whether the step under way has reduced its gradients, or has none to reduce."""
        step = self._under_way
        return step is None or step.reduced or not step.present

    @property
    def local_now(self) -> list[bool]:
        """Which of the gradients that `step` gave, without those that were None, are local."""
        step = self._under_way
        return [] if step is None else [step.kinds[index] == kinds.LOCAL for index in step.present]

    @property
    def finite(self) -> tf.Tensor:
        """Whether all that the step under way has reduced is finite, equal on all ranks; known where a part is sent."""
        step = self._under_way
        return tf.constant(True) if step is None or step.finite is None else step.finite

    @property
    def through_momentum(self) -> frozenset[Any]:
        """The keys of the variables whose gradients have gone through a momentum in the step under way."""
        step = self._under_way
        if step is None or step.channel is None:
            return frozenset()
        return frozenset(kinds.key(step.variables[step.shared[index]]) for index in step.channel.with_momentum)

    def reduce_step(self, gradients: Sequence[Any], after: tf.Variable | None = None) -> list[Any]:
        """Reduce the gradients of the step under way.

        Args:
            gradients: what `step` gave, without those that were None.
            after: a whole number that orders the steps of a graph: one step's reduction begins after the one before
                has ended, also where nothing else connects them (a loop, constant gradients).

        Returns:
            The sums or averages. None of them is ready before all are, so that a failed step changes no variable.

        Raises:
            HvdExtError: outside of a step, or some of the gradients were dropped.
        """
        step = self._under_way
        if step is None:
            raise HvdExtError(f"{self.label}: its gradients were asked for outside of a step; call apply or reduce")
        if len(gradients) != len(step.present):
            raise HvdExtError(
                f"{self.label}: {len(step.present)} gradients were registered, but {len(gradients)} reached the "
                "reduction; an apply that adds or drops gradients cannot be used"
            )
        step.reduced = True
        if step.channel is None:
            return list(gradients)
        first = [] if step.compared is None else [step.compared]
        if tf.executing_eagerly():
            with tf.control_dependencies(first):
                return step.reduced_now(gradients, self.options, self._in_part)
        with tf.control_dependencies([*first, *([] if after is None else [after.read_value()])]):
            reduced = step.reduced_now(gradients, self.options, self._in_part)
        with tf.control_dependencies(tf.nest.flatten(reduced, expand_composites=True)):
            if after is not None:
                after.assign_add(tf.zeros((), after.dtype), read_value=False)
            return [tf.nest.map_structure(tf.identity, result, expand_composites=True) for result in reduced]

    def close(self) -> None:
        """Give the channels' buffers back. Again: nothing."""
        sets, self._sets = self._sets, {}
        for every in sets.values():
            every.close()

    def _begun(
        self,
        job: Runtime,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        facts: Facts | None,
        dense: bool,
        communicates: bool,
        weights: Sequence[Any] | None,
    ) -> Step:
        local = self.local_keys
        keys = [kinds.key(variable) for variable in variables]
        shared = tuple(index for index, key in enumerate(keys) if key not in local)
        every = self._set(job, tuple(keys[index] for index in shared), [variables[index] for index in shared])

        def checked() -> dict[str, Any]:
            for index in shared:
                kinds.refuse(self.label, gradients[index], variables[index])
            return {**self.options.described(), **({} if facts is None else facts())}

        own = "".join(kinds.kind(gradients[index], dense) for index in shared)
        traced = not tf.executing_eagerly()
        unsure = None
        if every.start is not None and not every.start.done:
            given = variables if weights is None else weights
            pairs = [(kinds.name(variables[index]), given[index]) for index in shared]
            unsure = Weights.here([(name, weight) for name, weight in pairs if hasattr(weight, "assign")])
        with tf.init_scope():  # exchanges are eager, and Keras reads the learning rate for the facts
            channel, joint = every.agree(own, checked, traced=traced, communicates=communicates, weights=unsure)
        compared = None if every.start is None or unsure is None else every.start.again(unsure)
        agreed = [kinds.LOCAL] * len(variables)
        for index, kind in zip(shared, joint, strict=True):
            agreed[index] = kind
        divisor = job.engine.size if self.options.scale_local_gradients else 1
        ready = [
            kinds.ready(self.label, gradient, variable, kind, divisor)
            for gradient, variable, kind in zip(gradients, variables, agreed, strict=True)
        ]
        if self._flushing and every.feedback is not None:
            every.feedback.flush()
        self._flushing = False
        return Step(
            job, channel, every.feedback, "".join(agreed), shared, ready, variables, every.name, compared=compared
        )

    def _set(self, job: Runtime, keys: tuple[Any, ...], variables: Sequence[Any]) -> GradientSet:
        every = self._sets.get(keys)
        if every is None or every.job is not job or not every.is_open:
            if every is not None and every.feedback is not None:
                _LOG.warning("%s: hvd_ext was shut down: what TopK had not sent yet is lost; flush first", self.label)
            place = len(self._sets) if every is None else list(self._sets).index(keys)
            start = self._start(job)
            every = GradientSet(self.label, self.options, job, variables, self._in_part, self._first_step, start)
            if place in self._restored:
                every.load(*self._restored.pop(place))
            self._sets[keys] = every
        return every

    def _start(self, job: Runtime) -> SameStart | None:
        if not self.options.check_start or job.engine.size == 1:
            return None
        if not tf.compat.v1.executing_eagerly_outside_functions():
            return None  # a graph of TensorFlow 1 has values in its sessions only
        return SameStart(self.label, job, after_first=self._after_first, waits=lambda: self.broadcast_follows)
