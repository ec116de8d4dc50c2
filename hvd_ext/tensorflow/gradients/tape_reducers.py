"""The reducers that the tapes of a training loop share: each step makes a new tape, but its channels must stay open.

A reducer is kept under its options and sources, until one of the sources is deleted.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_ext import state
from hvd_ext.errors import InvalidError
from hvd_ext.job import process_sets, runtime
from hvd_ext.options.gradients import GradientOptions
from hvd_ext.tensorflow.gradients import kinds
from hvd_ext.tensorflow.gradients.identity import Identity
from hvd_ext.tensorflow.gradients.reducer import Reducer


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """The description of a source, which the ranks compare; it does not keep the variable alive."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class TapeReducer:
    """The reducer for one combination of options and sources.

    Args:
        reducer: opens the channels.
        sources: the descriptions of the variables, in their order.
        steps: orders the steps of a function. None in a graph of TensorFlow 1: its sessions run one step at a time, and
            its initializer may exist already, so that a new variable would stay uninitialized.
    """

    reducer: Reducer
    sources: tuple[Source, ...]
    steps: tf.Variable | None

    def reduce(self, gradients: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
        """Reduce one step's gradients; see `Reducer.reduce`.

        Args:
            gradients: one or None for each source.
            sources: the sources themselves, whose weights are compared.

        Returns:
            The reduced gradients; in a graph, their reduction begins after that of the step before has ended.
        """
        return self.reducer.begin(gradients, self.sources, weights=sources).reduce_all(self.steps)


_reducers: dict[tuple[Any, ...], TapeReducer] = {}


def reducer_for(
    label: str, options: GradientOptions, sources: Sequence[Any], local: Sequence[int], generic: bool
) -> TapeReducer:
    """Return the reducer that tapes with these options and sources share; the first call makes it.

    Args:
        label: the tape's name in messages.
        options: the tape's options.
        sources: variables of Keras or TensorFlow, or tensors.
        local: the places of the sources whose gradients are not reduced.
        generic: name the sources after their places, not after the variables.

    Returns:
        The same object for the same variables, or for tensors of the same shapes and dtypes.

    Raises:
        InvalidError: a source cannot be reduced.
    """
    own = tuple(_described(label, place, source, generic) for place, source in enumerate(sources))
    place_of = {kinds.key(source): place for place, source in enumerate(sources)}
    groups: Any = options.groups
    if isinstance(groups, tuple):
        found = [[place_of.get(kinds.key(variable)) for variable in group] for group in groups]
        groups = tuple(tuple(place for place in group if place is not None) for group in found)
    in_session = not tf.compat.v1.executing_eagerly_outside_functions()
    key = (
        _identity(options),
        in_session,
        groups,
        tuple(local),
        generic,
        tuple(map(_same, range(len(own)), sources, own)),
    )
    if key not in _reducers:
        if isinstance(groups, tuple):
            groups = [[own[place] for place in group] for group in groups]
        reducer = Reducer(Identity(label), dataclasses.replace(options, groups=groups), after_first=True)
        _register(reducer)
        for place in local:
            reducer.register_local_var(own[place])
        steps = None
        if not in_session:
            with tf.init_scope():
                steps = tf.Variable(0, dtype=tf.int64, trainable=False, name="hvd_ext_tape_steps")
        _reducers[key] = TapeReducer(reducer, own, steps)
        for source in sources:
            owner = _owner(source)
            if owner is not None:
                weakref.finalize(owner, _forget, key).atexit = False
    return _reducers[key]


def _register(reducer: Reducer) -> None:
    """Add layout and what is carried over to checkpoints, by the number of the tape in the order of the first steps."""
    job = process_sets.runtime_of(reducer.options.process_set)
    if job is None:
        return
    ranks = "" if job is runtime.current() else f" of ranks {', '.join(map(str, job.engine.ranks))}"
    owner = f"buckets: tape {job.count('tape')}{ranks}"
    state.unregister(owner)  # an earlier init may have registered this owner
    state.register(owner, reducer.save_first_layout, reducer.load_first_layout)
    what = reducer.policy.keeps
    if what:
        owner = f"{what}: tape {job.count(f'tape with {what}')}{ranks}"
        state.unregister(owner)
        state.register(owner, reducer.save_first, load_all=reducer.load_first)


def _described(label: str, place: int, source: Any, generic: bool) -> Source:
    shape = getattr(source, "shape", None)
    variable = hasattr(source, "assign")
    if shape is None or not (variable or isinstance(source, tf.Tensor)):
        raise InvalidError(f"{label}, source {place} ({source!r}): must be a variable or a dense tensor")
    shape = tf.TensorShape(shape)
    if not shape.is_fully_defined():
        raise InvalidError(
            f"{label}, source {place}: its shape {shape} must be known when the function is traced; give the function "
            "an input_signature of known shapes, or use a plain tape and hvd_ext.allreduce"
        )
    name = kinds.name(source) if variable and not generic else f"source {place}"
    return Source(name, tuple(shape.as_list()), kinds.dtype(source).name)


def _same(place: int, source: Any, about: Source) -> tuple[Any, ...]:
    """Return the part of the key that two steps must have in common to share a channel."""
    owner = _owner(source)
    described = (about.name, about.shape, about.dtype)
    return (*described, place) if owner is None else (*described, kinds.key(source) if owner is source else id(owner))


def _owner(source: Any) -> Any:
    """Return the object whose deletion closes the channel; None for a tensor: the next tensors use its channel too."""
    if not hasattr(source, "assign"):
        return None
    if getattr(getattr(source, "handle", None), "graph", None) is None:
        return source
    # the source is an argument of a traced function: TensorFlow drops this variable after tracing, so the graph counts
    graph = source.handle.graph
    while getattr(getattr(graph, "outer_graph", None), "outer_graph", None) is not None:
        graph = graph.outer_graph
    return graph


def _identity(options: GradientOptions) -> tuple[Any, ...]:
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    del values["groups"]
    process_set = values.pop("process_set")
    return (id(process_set), *values.values())


def _forget(key: tuple[Any, ...]) -> None:
    shared = _reducers.pop(key, None)
    if shared is not None:
        shared.reducer.close()
