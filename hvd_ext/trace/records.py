"""Recording in the engine: start, stop, and read the records."""

from __future__ import annotations

import ctypes
import dataclasses
import enum
from typing import NamedTuple

from hvd_ext.engine import native


class Kind(enum.IntEnum):
    """The kind of a record; tf_ops/engine/trace.h has the same numbers and explains them."""

    FILL = 0
    SUBMITTED = 1
    WAIT = 2
    RUN = 3
    ROUND = 4
    DELIVER = 5
    ANNOUNCE = 6
    CALL = 7


class Record(NamedTuple):
    """An activity from `begin_ns` to `end_ns` of this machine's steady clock; the fields are those of trace.h."""

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
    """Start recording in the running engine, and drop earlier records.

    Raises:
        InvalidError: the capacity is below 1.
        NotInitializedError: no engine runs.
    """
    native.call("hvd_ext_trace_start", capacity)


def stop() -> None:
    """Stop recording; the current activity of the engine's thread is still recorded. The records stay readable."""
    native.call("hvd_ext_trace_stop")


@dataclasses.dataclass(frozen=True)
class Raw:
    """The memory of `count` records in the order in which they were made; `dropped` older records were lost."""

    memory: ctypes.Array[native.TraceRecord]
    count: int
    dropped: int


def read(capacity: int) -> Raw:
    """Read the records without decoding them, which is quick, so that a rank that leaves keeps no other rank waiting.

    Returns:
        The records, for `decoded`.
    """
    memory = (native.TraceRecord * capacity)()
    count, dropped = ctypes.c_int64(), ctypes.c_int64()
    native.call("hvd_ext_trace_read", memory, capacity, ctypes.byref(count), ctypes.byref(dropped))
    return Raw(memory, count.value, dropped.value)


def decoded(raw: Raw) -> list[Record]:
    """Decode records into Python values."""
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
