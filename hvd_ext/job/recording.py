"""Recording a trace on this rank: `start_trace`, `stop_trace`, Horovod's names for them, and the file."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_ext.engine.channels import lane_of
from hvd_ext.errors import InvalidError
from hvd_ext.job import clock, consensus, runtime
from hvd_ext.options import unsupported
from hvd_ext.trace import events, records, rounds, step_times

if TYPE_CHECKING:
    from hvd_ext.engine.engine import Engine
    from hvd_ext.engine.partial import Rounds
    from hvd_ext.job.runtime import Runtime
    from hvd_ext.planning.layout import Layout

VERSION = 1
# 15 MB of memory. With 10 buckets and plans of 10 rounds a step makes about 140 records, so that 900 steps fit.
CAPACITY = 1 << 17


@dataclasses.dataclass(frozen=True)
class _Recording:
    engine: Engine
    folder: Path
    job: str
    clock: clock.Clock
    zero_ns: int  # the trace's time 0 on this rank's clock
    begun_ns: int


_recording: _Recording | None = None


def start_trace(folder: str | os.PathLike[str]) -> None:
    """Record what the engine does until `stop_trace`, `shutdown` or the end of the process; all ranks call this.

    Each rank then writes `rank_R.json` into the folder, for `python -m hvd_ext trace` and for Perfetto. If a training
    is too long, its newest part is kept.

    Args:
        folder: created if it is missing; the ranks may share one folder or have different ones.

    Raises:
        InvalidError: a trace is being recorded already, or the folder cannot be written; raised on all ranks.
        NotInitializedError: before `init()`.
    """
    begin(runtime.current(), folder)


def stop_trace() -> Path:
    """End the recording of this rank and write its file, without waiting for other ranks.

    Returns:
        The path of the file.

    Raises:
        InvalidError: no trace is being recorded.
        OSError: the file cannot be written.
    """
    if _recording is None:
        raise InvalidError(
            "stop_trace: no trace is being recorded; call start_trace(folder) or set HVD_EXT_TRACE first"
        )
    return _ended(runtime.current())()


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Begin a trace under Horovod's name; all ranks call this function. See `hvd_ext.start_trace`.

    Horovod writes one file, on rank 0. Here each rank writes a file into a folder, and `python -m hvd_ext trace` merges
    them.

    Args:
        file_path: the folder's path; a suffix .json is dropped.
        mark_cycles: must be False; the engine has no cycles.

    Raises:
        InvalidError: mark_cycles is true, or `start_trace` raises it.
    """
    if mark_cycles:
        raise InvalidError(f"start_timeline: mark_cycles ({mark_cycles!r}): {unsupported.INSTEAD['mark_cycles']}")
    path = Path(file_path)
    start_trace(path.with_suffix("") if path.suffix == ".json" else path)


def stop_timeline() -> Path:
    """End the trace that `start_timeline` began, without waiting for other ranks.

    Returns:
        The path of this rank's file.

    Raises:
        InvalidError: no trace is being recorded.
    """
    return stop_trace()


def begin(owner: Runtime, folder: str | os.PathLike[str]) -> None:
    """Start a trace as `start_trace` does; `hvd_ext.job.process` calls this."""
    global _recording
    path = Path(folder).absolute()

    def ready() -> str:
        if _recording is not None and _recording.engine is owner.engine:
            raise InvalidError(f"start_trace: a trace is being recorded already, to {_recording.folder}; stop it first")
        try:
            path.mkdir(parents=True, exist_ok=True)
            probe = path / f".rank_{owner.engine.rank}.tmp"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise InvalidError(f"trace folder ({path}): must be writable; {error.strerror or error}") from error
        return uuid.uuid4().hex[:12]

    job = consensus.exchange(owner.engine, "start of the trace", ready)[0]
    clock_here = clock.measure(owner.engine)
    now = time.monotonic_ns()
    zero = consensus.exchange(owner.engine, "zero of the trace", lambda: now)[0] + clock_here.offset_ns
    records.start(CAPACITY)
    _recording = _Recording(owner.engine, path, job, clock_here, zero, time.monotonic_ns())


def end(owner: Runtime) -> Callable[[], None]:
    """End the recording if there is one, before the engine stops.

    Returns:
        A function that writes the file. It may be called after the engine has stopped, since the other ranks wait only
        a limited time for this rank's shutdown handshake. It never raises; it prints what went wrong.
    """
    if _recording is None or _recording.engine is not owner.engine:
        return lambda: None
    write_file = _ended(owner)

    def finish() -> None:
        try:
            write_file()
        except Exception as error:  # no error may keep the rank from ending
            print(f"hvd_ext: the trace of rank {owner.engine.rank} was not written: {error!r}", file=sys.stderr)

    return finish


def _ended(owner: Runtime) -> Callable[[], Path]:
    """End the recording; return a function that writes its file and returns the path."""
    global _recording
    recording, _recording = _recording, None
    assert recording is not None
    records.stop()
    times = []
    partial = {}
    for handle, channel in recording.engine.open_channels().items():
        if channel.is_partial:  # its gradients are ready together, when a round begins
            partial[lane_of(handle)] = recording.engine.rounds(handle)
            continue
        medians = step_times.measured(recording.engine.times(handle), channel.layouts[-1][0])
        if medians is not None:
            times.append(step_times.described(channel.name, channel.layout, medians))
    raw = records.read(CAPACITY)
    return lambda: _written(owner, recording, raw, times, partial)


def _written(
    owner: Runtime,
    recording: _Recording,
    raw: records.Raw,
    times: list[dict[str, Any]],
    partial: dict[int, Rounds],
) -> Path:
    """Write what a recording has found: records, the times of each channel's steps, and partial rounds by lane."""
    # A recorded wait may have begun during an earlier trace.
    in_time = [record for record in records.decoded(raw) if record.begin_ns >= recording.begun_ns]
    about = {
        "version": VERSION,
        "job": recording.job,
        "rank": owner.engine.rank,
        "size": owner.engine.size,
        "host": owner.hosts[owner.engine.rank],
        "clock_offset_us": recording.clock.offset_ns / 1e3,
        "clock_uncertainty_us": recording.clock.uncertainty_ns / 1e3,
        "records": len(in_time),
        "dropped": raw.dropped,
        "channels": times,
    }
    book = _book(owner, recording.zero_ns)
    trace_events = events.events_of(in_time, book)
    for number, partial_rounds in partial.items():
        trace_events += rounds.events_of(partial_rounds, book, number, recording.begun_ns)
    path = recording.folder / f"rank_{owner.engine.rank}.json"
    write(path, {"traceEvents": trace_events, "displayTimeUnit": "ms", "otherData": about})
    return path


def write(path: Path, document: dict[str, Any]) -> None:
    """Write a trace atomically: the file is complete or does not exist; after an error an older file remains."""
    new = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        new.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _book(owner: Runtime, zero_ns: int) -> events.Book:
    plans = {handle: events.levels_of(plan) for handle, plan in owner.plans.items()}
    channels = {}
    for lane, channel in owner.engine.channels.items():
        layouts = tuple((first, _buckets(layout)) for first, layout in channel.layouts)
        channels[lane] = events.Channel(channel.name, layouts)
    return events.Book(owner.engine.rank, owner.hosts[owner.engine.rank], zero_ns, channels, plans)


def _buckets(layout: Layout) -> tuple[events.Bucket, ...]:
    return tuple(
        events.Bucket(
            events.levels_of(bucket.plan),
            tuple(layout.tensors[place].name for place in bucket.tensors),
            nbytes,
            bucket.dtype,
        )
        for bucket, nbytes in zip(layout.buckets, layout.nbytes, strict=True)
    )
