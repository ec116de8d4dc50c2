"""How a list of gradients is reduced over the ranks: optimizers and tapes of Keras 3, Keras 2 and TensorFlow use it.

Channels are opened when they are first needed. Most optimizers have one; an optimizer or tape that is used for several
parts of a model in turn has one for each list of variables.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from hvd_ext import process_sets
from hvd_ext.errors import HvdExtError, InvalidError
from hvd_ext.gradient_options import GradientOptions
from hvd_ext.runtime import Runtime
from hvd_ext.tensorflow import kinds, ops, sparse
from hvd_ext.tensorflow.channel import Channel
from hvd_ext.tensorflow.gradient_set import GradientSet

Facts = Callable[[], dict[str, Any]]


class Reducer:
    """The reduction of one optimizer's or tape's gradients.

    Args:
        label: its name in messages and of its channels, such as "Adam".
        options: how gradients become one.
    """

    def __init__(self, label: str, options: GradientOptions) -> None:
        self.label = label
        self.options = options
        self._local: list[Callable[[], Iterable[Any]]] = []
        self._sets: dict[tuple[Any, ...], GradientSet] = {}
        self._under_way: _Step | None = None

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The channels opened so far."""
        return tuple(channel for every in self._sets.values() for channel in every.channels)

    def register_local_var(self, variable: Any) -> None:
        """Keep a variable's gradient on its rank: it is not reduced, only divided (`scale_local_gradients`).

        Args:
            variable: of Keras or TensorFlow; it may differ from rank to rank.
        """
        self.register_local_source(lambda: (variable,))

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
    ) -> Iterator[list[Any]]:
        """Begin a step whose gradients are reduced later, by `reduce_step`; for Keras, which drops those that are None.

        Args:
            gradients: this rank's gradients.
            variables: the variables that they belong to.
            facts: gives what else must be the same on all ranks; asked when a channel is opened.
            dense: sparse gradients are made dense.
            communicates: False: nothing will be reduced in this eager call, which only adds its gradients up; what was
                agreed last holds.

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
            begun = _Step(None, None, kinds.OUTSIDE * len(variables), (), list(gradients), variables, "")
        else:
            begun = self._begun(job, gradients, variables, facts, dense or self.options.sparse_as_dense, communicates)
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
        if tf.executing_eagerly() or after is None:
            return self._reduced(step, gradients)
        with tf.control_dependencies([after.read_value()]):
            reduced = self._reduced(step, gradients)
        with tf.control_dependencies(tf.nest.flatten(reduced, expand_composites=True)):
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
    ) -> _Step:
        local = {kinds.key(variable) for source in self._local for variable in source()}
        keys = [kinds.key(variable) for variable in variables]
        shared = tuple(index for index, key in enumerate(keys) if key not in local)
        every = self._set(job, tuple(keys[index] for index in shared), [variables[index] for index in shared])

        def checked() -> dict[str, Any]:
            for index in shared:
                kinds.refuse(self.label, gradients[index], variables[index])
            return {**self.options.described(), **({} if facts is None else facts())}

        own = "".join(kinds.kind(gradients[index], dense) for index in shared)
        traced = not tf.executing_eagerly()
        with tf.init_scope():  # exchanges are eager, and Keras reads the learning rate for the facts
            channel, joint = every.agree(own, checked, traced=traced, communicates=communicates)
        agreed = [kinds.LOCAL] * len(variables)
        for index, kind in zip(shared, joint, strict=True):
            agreed[index] = kind
        divisor = job.engine.size if self.options.scale_local_gradients else 1
        ready = [
            kinds.ready(self.label, gradient, variable, kind, divisor)
            for gradient, variable, kind in zip(gradients, variables, agreed, strict=True)
        ]
        return _Step(job, channel, "".join(agreed), shared, ready, variables, every.name)

    def _set(self, job: Runtime, keys: tuple[Any, ...], variables: Sequence[Any]) -> GradientSet:
        every = self._sets.get(keys)
        if every is None or every.job is not job or not every.is_open:
            every = self._sets[keys] = GradientSet(self.label, self.options, job, variables)
        return every

    def _reduced(self, step: _Step, gradients: Sequence[Any]) -> list[Any]:
        assert step.job is not None
        assert step.channel is not None
        factor = self.options.gradient_predivide_factor
        results = dict(zip(step.present, gradients, strict=True))
        dense = [results[index] if step.kinds[index] == kinds.DENSE else None for index in step.shared]
        scaled = [None if gradient is None else kinds.scaled(gradient, 1 / factor) for gradient in dense]
        for index, own, reduced in zip(step.shared, dense, step.channel.reduce(scaled), strict=True):
            if own is not None:
                results[index] = kinds.scaled(reduced, factor)
        for index in step.shared:
            if step.kinds[index] == kinds.SPARSE:
                results[index] = sparse.reduce(
                    step.job,
                    f"{step.name}/{kinds.name(step.variables[index])}#{index}",
                    results[index],
                    self.options,
                    shape=tuple(step.variables[index].shape),
                    dtype=kinds.dtype(step.variables[index]),
                )
        return [results[index] for index in step.present]


@dataclasses.dataclass
class _Step:
    """A step under way.

    Args:
        job: the runtime of the ranks that take part; None where this rank does not.
        channel: for the dense gradients; None where this rank does not take part.
        kinds: the agreed kind of each gradient.
        shared: the indices of the variables that are not local.
        ready: what was given to the caller.
        variables: of the step.
        name: of the calls for sparse gradients.
    """

    job: Runtime | None
    channel: Channel | None
    kinds: str
    shared: tuple[int, ...]
    ready: list[Any]
    variables: Sequence[Any]
    name: str
    reduced: bool = False

    @property
    def present(self) -> list[int]:
        """The indices of the gradients that are there."""
        return [index for index, gradient in enumerate(self.ready) if gradient is not None]
