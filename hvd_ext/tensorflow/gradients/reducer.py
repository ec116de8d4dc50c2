"""The reduction of a list of gradients over the ranks, for the optimizers of Keras 3 and Keras 2 and for tapes.

Channels are opened when they are first needed. Most optimizers need one. An optimizer or tape that is used for several
parts of a model in turn has one channel for each list of variables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from hvd_ext.compression.momentum import Momentum
from hvd_ext.errors import HvdExtError, InvalidError
from hvd_ext.job import process_sets
from hvd_ext.job.runtime import Runtime
from hvd_ext.options.gradients import GradientOptions
from hvd_ext.tensorflow import devices, ops
from hvd_ext.tensorflow.collectives import sparse
from hvd_ext.tensorflow.gradients import carried, kinds
from hvd_ext.tensorflow.gradients.carried import Delayed
from hvd_ext.tensorflow.gradients.channel import Channel
from hvd_ext.tensorflow.gradients.identity import Identity
from hvd_ext.tensorflow.gradients.registration import GradientSet
from hvd_ext.tensorflow.gradients.same_start import SameStart, Weights
from hvd_ext.tensorflow.layers import Checksums
from hvd_ext.tensorflow.topk import correction
from hvd_ext.tensorflow.topk.feedback import Arrays, Everyone, Feedback

Facts = Callable[[], dict[str, Any]]
_LOG = logging.getLogger("hvd_ext")


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


@dataclasses.dataclass
class Step:
    """A step under way, with what the ranks have agreed on for it.

    Args:
        slots: one for each variable, in the order of the variables.
        job: the runtime of the ranks that take part; None if this rank does not take part.
        channel: the channel of the dense gradients; None if this rank does not take part.
        feedback: the error feedback with `TopK`, else None.
        delayed: with a delay, the result of the step before.
        name: the prefix of the calls that reduce sparse gradients.

    Attributes:
        reduced: whether the gradients were reduced.
        compared: in a graph, the comparison of the weights that must run before the reduction; None if there is none.
        applies: whether the reduced gradients are to be applied; None: they are.
        whole: with `TopK(until=...)`, whether it sends whole gradients, known once the step has begun; else None.
    """

    slots: list[Slot]
    job: Runtime | None = None
    channel: Channel | None = None
    feedback: Feedback | None = None
    delayed: Delayed | None = None
    name: str = ""
    reduced: bool = False
    compared: tf.Operation | None = None
    applies: tf.Tensor | None = None
    whole: tf.Tensor | None = None

    @property
    def present(self) -> list[Slot]:
        """The slots that have a gradient."""
        return [slot for slot in self.slots if slot.gradient is not None]

    @functools.cached_property
    def through_momentum(self) -> frozenset[Any]:
        """The keys of the variables whose gradients go through momentum correction, unless they are sent whole."""
        places = frozenset() if self.channel is None else self.channel.with_momentum
        return frozenset(kinds.key(slot.variable) for slot in self.slots if slot.place in places)


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
        self.momentum = momentum
        self._first_step = first_step
        self._restored: dict[int, tuple[Arrays | None, Everyone]] = {}
        self._factors: list[float] = []  # by which velocities in `_restored` are still to be multiplied, in turn
        self._layouts: dict[int, Arrays] = {}  # from restore_layouts, of lists that have had no step yet
        self._flushing = 0  # see `flush`, before there is a list
        self._without_gradient = False
        self._local: list[Callable[[], Iterable[Any]]] = []
        self._sets: dict[tuple[Any, ...], GradientSet] = {}
        self._under_way: Step | None = None

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

        A list that has had no step yet is restored at its first step; see `GradientSet.load`.
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
        return self.sets[0].save() if self._sets else {}

    def load_first(self, own: Arrays | None, everyone: Everyone) -> None:
        """Restore what `save_first` returned; see `GradientSet.load`."""
        self.restore({0: (own, everyone)})

    def flush(self, ahead: int = 1) -> None:
        """Make a step of each list send what the ranks have kept: a dense one with `TopK`, where all call it, or a full
        one with partial rounds.

        Args:
            ahead: with partial rounds: the next step is 1, the one after it 2, and so on.
        """
        self._flushing = 0 if self._sets else ahead
        for one in self.sets:
            one.flush(ahead)

    def scale_momentum(self, factor: float) -> None:
        """Multiply the velocities of momentum correction, between two steps; all ranks call it alike."""
        self._factors.append(factor)
        for one in self.sets:
            one.scale_momentum(factor)

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
        """Begin a step whose gradients are reduced later, by `reduce_step`; for Keras, which drops gradients of None.

        Args:
            gradients: this rank's gradients.
            variables: the variables that they belong to.
            facts: returns further values that must be the same on all ranks; compared when a channel is opened.
            dense: make sparse gradients dense.
            communicates: False if this eager call only accumulates its gradients; the last agreement then holds.
            weights: the real sources, if `variables` are only their descriptions; tensors among them are not compared.

        Yields:
            The gradients for `reduce_step`, which takes them without the None ones, in their variables' dtypes. A
            gradient that only other ranks have is a tensor of zeros or slices without rows.

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
            begun = Step([Slot(variable, kinds.OUTSIDE, gradient, None) for variable, gradient in pairs])
        else:
            dense = dense or self.options.sparse_as_dense or self.options.partial or self.options.delay > 0
            begun = self._begun(job, gradients, variables, facts, dense, communicates, weights)
        outer, self._under_way = self._under_way, begun
        try:
            yield [slot.gradient for slot in begun.slots]
        finally:
            self._under_way = outer

    @property
    def was_reduced(self) -> bool:
        """Whether the step under way has reduced its gradients, or has no gradients."""
        step = self._under_way
        return step is None or step.reduced or not step.present

    @property
    def step_name(self) -> str:
        """The name of the step under way, for calls of its own: equal on all ranks, unique for each list."""
        assert self._under_way is not None
        return self._under_way.name

    @property
    def local_now(self) -> list[bool]:
        """For each gradient of `step` that is not None, whether it is local."""
        step = self._under_way
        return [] if step is None else [slot.kind == kinds.LOCAL for slot in step.present]

    @property
    def may_skip(self) -> bool:
        """Whether a step's reduced gradients may have to be left out (`applies`)."""
        return self.options.topk is not None or self.options.delay > 0

    @property
    def applies(self) -> tf.Tensor:
        """Whether the step under way has reduced gradients to apply, equal on all ranks.

        False with `TopK` if they are not finite, and with a delay in the first step.
        """
        step = self._under_way
        return tf.constant(True) if step is None or step.applies is None else step.applies

    @property
    def through_momentum(self) -> frozenset[Any]:
        """The keys of the variables whose gradients go through momentum correction in the step under way.

        If the step is `whole`, they do not.
        """
        return frozenset() if self._under_way is None else self._under_way.through_momentum

    @property
    def whole(self) -> tf.Tensor | None:
        """With `TopK(until=...)`, whether the step under way has sent whole gradients; None: it has not."""
        return None if self._under_way is None else self._under_way.whole

    def reduce_step(self, gradients: Sequence[Any], after: tf.Variable | None = None) -> list[Any]:
        """Reduce the gradients of the step under way.

        Args:
            gradients: the gradients from `step`, without the None ones.
            after: an integer variable that orders the steps of a graph: the reduction of a step begins after that of
                the step before has ended, even if nothing else connects them (a loop, constant gradients).

        Returns:
            The sums or averages. In a graph none of them is ready before all are, so that a failed step changes no
            variable.

        Raises:
            HvdExtError: there is no step under way, or some of its gradients were dropped.
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
        if step.channel is None or self._stays(step):
            return list(gradients)
        if tf.executing_eagerly():
            return self._reduced(step, gradients)
        first = [one for one in (step.compared, None if after is None else after.read_value()) if one is not None]
        with tf.control_dependencies(first):
            reduced = self._reduced(step, gradients)
        together = ops.together(reduced)
        if after is not None:
            with tf.control_dependencies(tf.nest.flatten(together[:1], expand_composites=True)):
                after.assign_add(tf.zeros((), after.dtype), read_value=False)
        return together

    @contextlib.contextmanager
    def without_gradient(self) -> Iterator[None]:
        """Make eager steps take a result that is there already, and give no gradient of this rank."""
        self._without_gradient = True
        try:
            yield
        finally:
            self._without_gradient = False

    def close(self) -> None:
        """Free the channels' buffers. A second call does nothing."""
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
        shared = [index for index, key in enumerate(keys) if key not in local]
        place_of = {index: place for place, index in enumerate(shared)}
        number, every = self._set(job, tuple(keys[index] for index in shared), [variables[index] for index in shared])

        def checked() -> dict[str, Any]:
            for index in shared:
                kinds.refuse(self.label, gradients[index], variables[index])
                if self.options.partial:
                    kinds.refuse_meeting(self.label, variables[index])
            return {**self.options.described(), **({} if facts is None else facts())}

        own = "".join(kinds.kind(gradients[index], dense) for index in shared)
        traced = not tf.executing_eagerly()
        unsure = None
        if every.start is not None and not every.start.done:
            given = variables if weights is None else weights
            pairs = [(kinds.name(variables[index]), given[index]) for index in shared]
            unsure = Weights.here([(name, weight) for name, weight in pairs if hasattr(weight, "assign")])
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
            every.flush(self._flushing)
        self._flushing = 0
        delayed = every.carried if isinstance(every.carried, Delayed) else None
        return Step(slots, job, channel, every.feedback, delayed, every.name, compared=compared)

    def _stays(self, step: Step) -> bool:
        """Tell whether the gradients stay on the GPU of a job with one rank, where reducing them changes nothing."""
        assert step.job is not None
        assert step.channel is not None
        options = self.options
        if step.job.engine.size > 1 or options.topk is not None or options.partial or options.delay > 0:
            return False
        slices = any(slot.kind == kinds.SPARSE for slot in step.present)
        wired = any(bucket.wire for bucket in step.channel.layout.buckets)
        return not slices and not wired and devices.on_gpu(slot.variable for slot in step.present)

    def _reduced(self, step: Step, gradients: Sequence[Any]) -> list[Any]:
        """Reduce the step's gradients; for momentum correction they are first multiplied by their rates."""
        assert step.job is not None
        assert step.channel is not None
        options, topk, channel = self.options, self.options.topk, step.channel
        factor = options.gradient_predivide_factor
        slots = {slot.place: slot for slot in step.present if slot.place is not None}
        pairs = zip(step.present, gradients, strict=True)
        results = {slot.place: gradient for slot, gradient in pairs if slot.place is not None}
        if topk is not None and topk.clip is not None:
            clipped = _clipped(list(results.values()), topk.clip / step.job.engine.size**0.5)
            results = dict(zip(results, clipped, strict=True))
        density = None if step.feedback is None else step.feedback.density(channel)
        momentum = self.momentum
        now = None if momentum is None else momentum.now()
        begun = channel.begin(density, now) if channel.selects else None
        if channel.whole is not None:
            with tf.control_dependencies(begun or []), tf.device("CPU:0"):
                step.whole = channel.whole.read_value()
        rates: dict[int, tf.Tensor] = {}
        corrected = None
        if momentum is not None:
            places = [place for place in sorted(channel.with_momentum) if place in results]
            variables, own = [slots[place].variable for place in places], [results[place] for place in places]
            corrected = correction.corrected(momentum, variables, own, step.whole, options, step.job, step.name)
            rates = dict(zip(places, corrected.rates, strict=True))
            results |= zip(places, corrected.gradients, strict=True)
        dense = [
            results[place] if place in slots and slots[place].kind == kinds.DENSE else None
            for place in range(len(channel.layout.tensors))
        ]
        scaled = [None if gradient is None else kinds.scaled(gradient, 1 / factor) for gradient in dense]
        if step.delayed is not None:
            step.applies = step.delayed.next_step(gives=not self._without_gradient)
        if not self._without_gradient:
            found = channel.reduce(scaled, begun)
        else:
            found = channel.reduce(None) if step.delayed is None else step.delayed.take()
        for place, (own, reduced) in enumerate(zip(dense, found, strict=True)):
            if own is not None:
                results[place] = kinds.scaled(reduced, factor)
        for place, slot in slots.items():
            if slot.kind == kinds.SPARSE:
                channel.rows_nbytes[place] = sparse.most_nbytes(results[place])
                results[place] = sparse.reduce(
                    step.job,
                    f"{step.name}, rows {place}",  # not the variable's name, which may differ between ranks
                    results[place],
                    options,
                    shape=tuple(slot.variable.shape),
                    dtype=kinds.dtype(slot.variable),
                )
        if step.feedback is not None:
            each = [rates.get(place, 1.0) for place in results]
            ended, step.applies = step.feedback.ended(channel, list(results.values()), each)
            results = dict(zip(results, ended, strict=True))
            if corrected is not None:
                corrected.end(step.applies)
        return [
            gradient if slot.place is None else results[slot.place]
            for slot, gradient in zip(step.present, gradients, strict=True)
        ]

    def _load(self, number: int, every: GradientSet) -> None:
        """Restore a list's layout and state, once the list has a channel; one of before `shutdown` gets another."""
        if not every.channels or not every.is_open:
            return
        if number in self._layouts:
            every.load_layout(self._layouts.pop(number))
        if number in self._restored and every.keeps:
            every.load(*self._restored.pop(number))
            for factor in self._factors:
                every.scale_momentum(factor)

    def _set(self, job: Runtime, keys: tuple[Any, ...], variables: Sequence[Any]) -> tuple[int, GradientSet]:
        """Return the set of these variables, and its place in `sets`."""
        every = self._sets.get(keys)
        if every is None or every.job is not job or not every.is_open:
            if every is not None and every.feedback is not None and every.waits:
                _LOG.warning(
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
        if self.options.partial and number in self._restored:  # the optimizer does not count steps that it skips
            before = carried.rounds(*self._restored[number])
            if before is not None:
                return before
        return self._first_step()

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


def _clipped(gradients: Sequence[Any], limit: float) -> list[Any]:
    """Scale gradients so that their joint norm, in float32, is at most the limit; repeated rows are not added first."""
    values = [one.values if isinstance(one, tf.IndexedSlices) else one for one in gradients]
    squares = [tf.reduce_sum(tf.square(tf.cast(one, tf.float32))) for one in values]
    norm = tf.sqrt(tf.add_n(squares)) if squares else tf.constant(0.0)
    # if the norm is not finite, all gradients become NaN, so that all ranks skip the step
    factor = tf.where(tf.math.is_finite(norm), tf.where(norm > limit, limit / norm, 1.0), float("nan"))
    scaled = [one * tf.cast(factor, one.dtype) for one in values]
    return [
        tf.IndexedSlices(value, one.indices, one.dense_shape) if isinstance(one, tf.IndexedSlices) else value
        for one, value in zip(gradients, scaled, strict=True)
    ]
