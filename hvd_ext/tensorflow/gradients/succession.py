"""Graphs that outlive a world of a supervised job: their channels get successors in the next one.

A traced function knows its channel by a number, and no Python runs in its steps. When a step begins whose channel has
stopped with its world, the engine calls `_stopped`. The list of gradients is then registered again, as a rank that is
new registers it at its first step, and the new channel takes the place of the old one in the graph.

What that needs (the optimizer, its variables) lives as long as a function that has been traced with the channel.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvd_ext.engine import native, spec
from hvd_ext.errors import HvdExtError
from hvd_ext.job import membership
from hvd_ext.job.log import logger
from hvd_ext.tensorflow import ops

if TYPE_CHECKING:
    from hvd_ext.tensorflow.gradients.channel import Channel
    from hvd_ext.tensorflow.gradients.reducer import Facts, Reducer


@dataclasses.dataclass(eq=False)
class _Registration:
    """What registers a list of gradients again; the channel is that of the newest world that had a step."""

    reducer: Reducer
    channel: Channel
    variables: Sequence[Any]
    facts: Facts


_registrations: weakref.WeakValueDictionary[int, _Registration] = weakref.WeakValueDictionary()  # by channel
_lock = threading.Lock()


def is_needed() -> bool:
    """Tell whether worlds follow each other in this job."""
    return membership.session() is not None


def note(reducer: Reducer, channel: Channel, variables: Sequence[Any], facts: Facts) -> None:
    """Let a channel have a successor in the next world.

    Nothing is noted in eager mode, where each step looks for the channel of its world.

    Args:
        reducer: of the optimizer or tape.
        channel: a channel of it, which gets into the graph under construction.
        variables: those of the channel's list.
        facts: what the ranks have compared with it.
    """
    if tf.executing_eagerly():
        return
    with _lock:
        registration = _registrations.get(channel.handle)
        if registration is None:
            registration = _registrations[channel.handle] = _Registration(reducer, channel, variables, facts)
    # of the outermost graph, because TensorFlow frees no others that Keras makes
    ops.memory_of_outermost_graph().setdefault("registrations", set()).add(registration)
    native.load().hvd_ext_on_stopped(_CALL)


def _stopped(handle: int) -> None:
    """Make the successor of a channel; called by the engine on the thread that begins a step, and raises nothing."""
    with _lock:
        registration = _registrations.get(handle)
    if registration is None:
        return
    reducer = registration.reducer
    try:
        successor = reducer.register_again(registration.channel, registration.variables, registration.facts)
    except HvdExtError as error:  # the step fails with what the engine says, or is traced again
        logger.warning("%s: %s", reducer.label, error)
        return
    with _lock:
        _registrations.pop(handle, None)
        registration.channel = successor
        _registrations[successor.handle] = registration
    native.load().hvd_ext_channel_succeed(handle, successor.handle)


_CALL = spec.ON_STOPPED(_stopped)
