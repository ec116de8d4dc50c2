"""Graphs that outlive a world of a supervised job: their channels get successors in the next one.

A traced function knows its channel by a number, and no Python runs in its steps. When a step begins whose channel has
stopped with its world, the engine calls `_stopped`. The list of gradients is then registered again, as a rank that is
new registers it at its first step, and the new channel takes the place of the old one in the graph.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hvd_ext.engine import native, spec
from hvd_ext.errors import HvdExtError
from hvd_ext.job import membership
from hvd_ext.job.log import logger

if TYPE_CHECKING:
    from hvd_ext.tensorflow.gradients.channel import Channel
    from hvd_ext.tensorflow.gradients.reducer import Facts, Reducer


@dataclasses.dataclass(frozen=True)
class _Registration:
    reducer: Reducer
    channel: Channel
    variables: Sequence[Any]
    facts: Facts


_registrations: dict[int, _Registration] = {}  # by channel
_lock = threading.Lock()


def note(reducer: Reducer, channel: Channel, variables: Sequence[Any], facts: Facts) -> None:
    """Let a channel have a successor in the next world; only in supervised jobs, whose worlds end.

    Args:
        reducer: of the optimizer or tape.
        channel: a channel of it that has just been opened.
        variables: those of the channel's list.
        facts: what the ranks have compared with it.
    """
    if membership.session() is None:
        return
    with _lock:
        _registrations[channel.handle] = _Registration(reducer, channel, variables, facts)
    native.load().hvd_ext_on_stopped(_CALL)


def _stopped(handle: int) -> None:
    """Make the successor of a channel; called by the engine on the thread that begins a step, and raises nothing."""
    with _lock:
        found = _registrations.pop(handle, None)
    if found is None:
        return
    try:
        successor = found.reducer.register_again(found.channel, found.variables, found.facts)
    except HvdExtError as error:  # the step fails with what the engine says, or is traced again
        logger.warning("%s: %s", found.reducer.label, error)
        with _lock:
            _registrations[handle] = found
        return
    native.load().hvd_ext_channel_succeed(handle, successor.handle)


_CALL = spec.ON_STOPPED(_stopped)
