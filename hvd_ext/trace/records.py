"""The engine's records: starting, stopping and reading them."""

from __future__ import annotations

import ctypes
import dataclasses
import enum
from typing import NamedTuple

from hvd_ext.engine import native


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


@dataclasses.dataclass(frozen=True)
class Raw:
    """What was read: memory with `count` records in the order in which they came; `dropped` older ones were lost."""

    memory: ctypes.Array[native.TraceRecord]
    count: int
    dropped: int


def read(capacity: int) -> Raw:
    """Read what was recorded; quick, so that a rank that leaves keeps nobody waiting.

    Args:
        capacity: at most so many records, the newest.

    Returns:
        The records, for `decoded`.
    """
    memory = (native.TraceRecord * capacity)()
    count, dropped = ctypes.c_int64(), ctypes.c_int64()
    native.call("hvd_ext_trace_read", memory, capacity, ctypes.byref(count), ctypes.byref(dropped))
    return Raw(memory, count.value, dropped.value)


def decoded(raw: Raw) -> list[Record]:
    """Give what was read as values of Python."""
    return [
        Record(
            record.begin_ns,
            record.end_ns,
            record.id,
            record.plan,
            Kind(record.kind),
            record.lane,
            record.part,
            record.round,
            record.name.decode(errors="replace"),
        )
        for record in raw.memory[: raw.count]
    ]
