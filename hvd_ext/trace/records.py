"""The engine's records: starting, stopping and reading them."""

from __future__ import annotations

import ctypes
import enum
from typing import NamedTuple

from hvd_ext import native


class Kind(enum.IntEnum):
    """What a record is about; the numbers are those of tf_ops/engine/trace.h, which says more."""

    FILL = 0
    SUBMITTED = 1
    WAIT = 2
    RUN = 3
    ROUND = 4
    DELIVER = 5
    ANNOUNCE = 6
    CALL = 7


class Record(NamedTuple):
    """Something that took from `begin_ns` to `end_ns` of this machine's steady clock; fields as in trace.h."""

    begin_ns: int
    end_ns: int
    id: int
    plan: int
    kind: Kind
    lane: int
    part: int
    round: int
    name: str


def start(capacity: int) -> None:
    """Let the running engine record from now on, and forget what was recorded before.

    Args:
        capacity: so many records are kept, the newest.

    Raises:
        InvalidError: the capacity is below 1.
        NotInitializedError: no engine runs.
    """
    native.call("hvd_ext_trace_start", capacity)


def stop() -> None:
    """End the recording; what the engine's thread is doing right now is still in it. The records stay readable."""
    native.call("hvd_ext_trace_stop")


def read(capacity: int) -> tuple[list[Record], int]:
    """Read what was recorded.

    Args:
        capacity: at most so many records, the newest.

    Returns:
        The records in the order in which they were made, and how many older ones were dropped.
    """
    memory = (native.TraceRecord * capacity)()
    count, dropped = ctypes.c_int64(), ctypes.c_int64()
    native.call("hvd_ext_trace_read", memory, capacity, ctypes.byref(count), ctypes.byref(dropped))
    return [
        Record(
            raw.begin_ns,
            raw.end_ns,
            raw.id,
            raw.plan,
            Kind(raw.kind),
            raw.lane,
            raw.part,
            raw.round,
            raw.name.decode(errors="replace"),
        )
        for raw in memory[: count.value]
    ], dropped.value
