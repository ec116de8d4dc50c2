"""`local_steps=`: gradients are reduced inside a host, and all ranks average the weights every so many steps."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hvd_ext.errors import HvdExtError
from hvd_ext.job import consensus, process_sets
from hvd_ext.job.log import logger
from hvd_ext.state import Arrays, Everyone
from hvd_ext.tensorflow import ops
from hvd_ext.tensorflow.collectives.objects import broadcast_object
from hvd_ext.tensorflow.gradients import carried, identity, kinds
from hvd_ext.tensorflow.gradients.fragment import Fragment, divided
from hvd_ext.tensorflow.gradients.reducer import Reducer
from hvd_ext.tensorflow.gradients.step import Policy

if TYPE_CHECKING:
    from hvd_ext.options.gradients import GradientOptions
    from hvd_ext.tensorflow.gradients.reducer import GradientSet
    from hvd_ext.tensorflow.gradients.step import Step

# the names of what is saved
_COUNTS = ("applies", "updates", "taken_at")
_FLUSHING, _GROUP, _FRAGMENT = "flushing", "group", "fragment"

# those whose local steps have begun, for the models whose variables they have
_living: weakref.WeakSet[LocalGradients] = weakref.WeakSet()


class LocalGradients(Policy):
    """The gradients of local steps; what the hosts exchange are changes of weights, which a `Fragment` sends."""

    feature = "local steps"
    joins = False
    outlives = False
    keeps = "local-steps"
    changes_nothing_alone = False
    dense_only = True
    flushes = True

    def __init__(self, gradients: GradientSet) -> None:
        super().__init__(gradients)
        assert gradients.asked.local_steps is not None
        self._options = gradients.asked.local_steps
        self._fragments: list[Fragment] = []
        self._outer: Reducer | None = None
        self._before: Reducer | None = None  # of the first steps, whose gradients are reduced over all ranks
        self._beside = concurrent.futures.ThreadPoolExecutor(1, "hvd_ext_outer") if self._options.overlap else None
        self._loaded: tuple[Arrays | None, Everyone] | None = None  # until the first step
        with tf.init_scope(), tf.device("CPU:0"):
            # of calls and of updates; an outer step comes after the same number of them on all ranks, whatever steps a
            # loss scale has skipped
            self._applies, self._updates, self._taken_at = (
                tf.Variable(0, dtype=tf.int64, trainable=False, name=f"hvd_ext_local_{name}") for name in _COUNTS
            )
            self._flushing = tf.Variable(False, trainable=False, name="hvd_ext_local_flushing")

    @classmethod
    def steps_before(cls, own: Arrays | None, everyone: Everyone) -> int | None:
        """Give the number of updates: a loss scale may have skipped others on this host than on the first one."""
        saved = carried.any_saved(own, everyone)
        return None if saved is None else int(saved["updates"])

    @classmethod
    def check(cls, label: str, variable: Any) -> None:
        """Refuse a variable of a layer whose forward pass waits for all ranks."""
        kinds.refuse_meeting(label, variable, cls.feature)

    @ops.plain
    def begin(self, step: Step) -> None:
        """Make the weights global from which the first local step begins."""
        if not self._fragments:
            with tf.init_scope():
                self._make([slot.variable for slot in step.slots if slot.place is not None])
        ops.only_if(tf.equal(self._updates.read_value(), self._taken_at.read_value()), self._take)

    @ops.plain
    def finish(self, step: Step, gradients: dict[int, Any]) -> dict[int, Any]:
        """Reduce the gradients of the first steps over the hosts too."""
        before = self._before
        if before is None:
            return gradients
        with tf.init_scope():
            if int(self._updates.numpy()) >= self._options.start:
                return gradients
        variables = [step.variables[place] for place in gradients]

        def over_hosts() -> list[Any]:
            return before.reduce(list(gradients.values()), variables, lambda: self._compared(variables))

        if tf.executing_eagerly():
            return dict(zip(gradients, over_hosts(), strict=True))
        first = self._updates.read_value() < self._options.start
        results = tf.cond(first, over_hosts, lambda: [tf.identity(one) for one in gradients.values()])
        shaped = [tf.ensure_shape(one, own.shape) for one, own in zip(results, gradients.values(), strict=True)]
        return dict(zip(gradients, shaped, strict=True))

    @ops.plain
    def updated(self, step: Step, passes: int) -> None:
        """Begin and end the outer steps that are due."""
        every, overlap = self._options.every, self._options.overlap
        with tf.device("CPU:0"):
            is_update = tf.equal(self._applies.assign_add(1, read_value=True) % passes, 0)
            updates = self._updates.assign_add(tf.cast(is_update, tf.int64), read_value=True)
            apart = tf.logical_and(is_update, updates > self._taken_at.read_value())
            joins = tf.equal(updates, self._taken_at.read_value() + 1)
            flushing, local = self._flushing.read_value(), updates - self._options.start
        for number, fragment in enumerate(self._fragments):
            offset = self._options.offset(number, len(self._fragments))
            begins = tf.equal(local % every, offset)
            ends = tf.equal((local - overlap) % every, offset)  # if none is under way, nothing happens
            due = tf.logical_and(apart, tf.reduce_any(tf.stack([begins, ends, flushing, joins])))
            meet = functools.partial(fragment.meet, begins, flushing)
            ops.in_order(functools.partial(ops.only_if, due, meet))
        with tf.device("CPU:0"):
            self._flushing.assign(tf.logical_and(flushing, tf.logical_not(is_update)), read_value=False)

    def shared(self, variables: Sequence[Any]) -> list[tf.Tensor]:
        """Give the weights before the first local step, and then the global weights."""
        global_of = {id(variable): one for variable, one in self._pairs()}
        own = [tf.convert_to_tensor(variable) for variable in variables]
        equal = [tf.convert_to_tensor(global_of[id(variable)].value) for variable in variables]
        apart = self._updates.read_value() > self._taken_at.read_value()
        return [tf.where(apart, one, weight) for one, weight in zip(equal, own, strict=True)]

    @property
    def global_weights(self) -> Sequence[tuple[Any, Any]]:
        """Pairs of a variable and its global weights, once local steps have begun."""
        return self._pairs() if int(self._updates.numpy()) > int(self._taken_at.numpy()) else ()

    def take_global_weights(self) -> None:
        """Continue from the variables' values, equal on all ranks, which all call it; drop outer steps under way."""
        for fragment in self._fragments if self.global_weights else ():
            fragment.drop()
            fragment.take()

    def drop(self) -> None:
        """Drop the outer steps under way; all ranks call it."""
        for fragment in self._fragments:
            fragment.drop()

    def wait(self) -> None:
        """Wait until the outer steps under way have been reduced, or have failed."""
        for fragment in self._fragments:
            fragment.wait()

    def save(self) -> Arrays:
        """Copy the global weights, the outer optimizers, what outer steps keep, and the counts."""
        if not self._fragments:
            return {}
        job = self.gradients.job
        arrays: Arrays = {name: np.asarray(one.numpy()) for name, one in zip(_COUNTS, self._counts, strict=True)}
        arrays[_FLUSHING] = np.asarray(self._flushing.numpy())
        arrays |= {carried.RANKS: np.array(self._members.engine.size), _GROUP: np.array(job.engine.ranks)}
        for number, fragment in enumerate(self._fragments):
            arrays |= {f"{_FRAGMENT}/{number}/{name}": array for name, array in fragment.save().items()}
        return arrays

    def load(self, own: Arrays | None, everyone: Everyone) -> None:
        """Restore what `save` returned; where ranks or hosts were others, continue from the global weights."""
        self._loaded = own, everyone
        if self._fragments:
            self._load()

    def flush(self, ahead: int) -> None:
        """Make the next step end with an outer step that sends everything; all ranks call it."""
        self._flushing.assign(True)

    @property
    def reducers(self) -> Sequence[Reducer]:
        """That of outer steps, and that of the first steps if there is one."""
        return [reducer for reducer in (self._outer, self._before) if reducer is not None]

    @property
    def lost_at_shutdown(self) -> str:
        """Say what is lost: the state of the outer optimizer, and steps that the other hosts do not know."""
        if not self.global_weights:
            return ""
        return (
            "the state of outer steps is lost, and the hosts continue from their own weights; save it with "
            "hvd_ext.callbacks.Checkpoint, or call hvd_ext.flush() and train one more step before shutdown()"
        )

    @property
    def _counts(self) -> tuple[tf.Variable, ...]:
        return self._applies, self._updates, self._taken_at

    @property
    def _members(self) -> Any:
        return process_sets.member(self.gradients.asked.process_set, "local_steps")

    def _make(self, variables: Sequence[Any]) -> None:
        """Prepare the outer steps, at the first step; all ranks call it."""
        gradients, options, members = self.gradients, self._options, self._members
        first = consensus.exchange(members.engine, f"{gradients.label}: first step", gradients.first_step)[0]
        self._updates.assign(first)
        self._taken_at.assign(max(options.start, first))

        def reducer(what: str, of_reducer: GradientOptions, *, agrees_once: bool = False) -> Reducer:
            named = identity.of_optimizer(f"{gradients.label}, {what}", gradients.identity.name)
            return Reducer(named, of_reducer, waits=gradients.broadcast_follows, agrees_once=agrees_once)

        # the weights of a checkpoint differ between hosts
        outer = dataclasses.replace(gradients.asked.of_outer_steps, check_start=self._loaded is None)
        self._outer = reducer("outer steps", outer, agrees_once=True)
        if options.start > first and members.engine.size > gradients.job.engine.size:
            self._before = reducer("before local steps", gradients.asked.before_local_steps)
        self._fragments = [
            Fragment(part, self._outer, options, self._compared, self._take_again, self._beside)
            for part in divided(variables, options.fragments)
        ]
        members.outer_steps.add(self)
        _living.add(self)
        if self._loaded is not None:
            self._load()

    def _load(self) -> None:
        assert self._loaded is not None
        (own, everyone), self._loaded = self._loaded, None
        members, label = self._members, self.gradients.label

        def is_same() -> bool:
            ranks = self.gradients.job.engine.ranks
            return (
                own is not None
                and int(own[carried.RANKS]) == members.engine.size
                and tuple(own[_GROUP].tolist()) == tuple(ranks)
            )

        same = all(consensus.exchange(members.engine, f"{label}: the same hosts", is_same))
        saved = own
        if not same:
            saved = None
            if members.engine.rank == 0:
                try:
                    saved = next(iter(everyone()), None)
                except (HvdExtError, OSError) as error:
                    logger.warning("%s: the global weights are not restored: %s", label, error)
            name, process_set = f"{label}: global weights", self.gradients.asked.process_set
            saved = broadcast_object(saved, members.engine.ranks[0], name=name, process_set=process_set)
        if saved is None:
            return
        for name, variable in zip(_COUNTS, self._counts, strict=True):
            variable.assign(saved[name])
        self._flushing.assign(bool(self._flushing.numpy()) or bool(saved[_FLUSHING]))
        for number, fragment in enumerate(self._fragments):
            part = functools.partial(carried.under, f"{_FRAGMENT}/{number}/")
            fragment.load(part(saved), lambda part=part: map(part, everyone()), same=same)

    def _compared(self, having: Sequence[Any] = ()) -> dict[str, Any]:
        """Give what the ranks compare; `having`: the variables with a gradient, if these must be the same ones."""
        return {
            **self.gradients.facts,
            **{f"LocalSteps' {name}": value for name, value in self._options.described().items()},
            "the number of gradients in a step before local steps": len(having),
        }

    def _take_again(self) -> None:
        """Begin local steps once more: weights that differ between hosts are broadcast after this step."""
        self._taken_at.assign(self._updates.read_value())

    def _take(self) -> None:
        for fragment in self._fragments:
            fragment.take()

    def _pairs(self) -> list[tuple[Any, Any]]:
        return [pair for part in self._fragments for pair in zip(part.variables, part.global_weights, strict=True)]


def of_variables(variables: Sequence[Any]) -> list[tuple[LocalGradients, list[tuple[Any, Any]]]]:
    """Find the local steps that have begun and change some of these variables.

    Returns:
        Each with the pairs of its `global_weights` that are of these variables.
    """
    found = []
    keys = {kinds.key(variable) for variable in variables} if _living else set()
    for policy in list(_living) if keys else ():
        pairs = [pair for pair in policy.global_weights if kinds.key(pair[0]) in keys]
        if pairs:
            found.append((policy, pairs))
    return found


POLICY = LocalGradients
