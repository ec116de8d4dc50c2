"""The conversion of the engine's records to events of Chrome's trace format, which Perfetto opens; pure functions.

Format: "Trace Event Format", Google, 2016: `ph` X is a span (ts and dur in microseconds), i an instant, M a name.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from hvd_ext.planning import lower
from hvd_ext.planning.model import LogicalPlan
from hvd_ext.trace.records import Kind, Record

Event = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Levels:
    """A plan as the trace shows it.

    Args:
        ends: the first round after each level.
    """

    algorithm: str
    names: tuple[str, ...]
    ends: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A bucket as the trace shows it: its plan, the names of its tensors, its size in bytes and its dtype."""

    levels: Levels
    tensors: tuple[str, ...]
    nbytes: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class Channel:
    """A channel: its name, and the buckets of each layout that it has had with the number of their first step."""

    name: str
    layouts: tuple[tuple[int, tuple[Bucket, ...]], ...]

    def buckets(self, step: int) -> tuple[Bucket, ...]:
        """The buckets of a step."""
        return next(buckets for first, buckets in reversed(self.layouts) if first <= step)


@dataclasses.dataclass(frozen=True)
class Book:
    """The names and plans that a rank's records refer to.

    Args:
        zero_ns: the time on the rank's clock that is 0 in the trace.
        channels: the channels by lane.
        plans: the plans of calls, by handle.
    """

    rank: int
    host: str
    zero_ns: int
    channels: dict[int, Channel]
    plans: dict[int, Levels]


def levels_of(plan: LogicalPlan) -> Levels:
    """Find the rounds of each level of a plan; a level without a name is named after its place."""
    ends, end = [], 0
    for level in plan.levels:
        end += lower.rounds_of_level(level)
        ends.append(end)
    names = [level.name or f"level {index}" for index, level in enumerate(plan.levels)]
    return Levels(plan.algorithm, tuple(names), tuple(ends))


def events_of(records: Sequence[Record], book: Book) -> list[Event]:
    """Make the events of one rank.

    Args:
        records: the engine's records; a step with missing records gets no event of category "step".

    Returns:
        Events with the categories of docs/trace.md; the names of the process and of the tracks come first.
    """
    writer = _Writer(book)
    of_step: dict[tuple[int, int], list[Record]] = defaultdict(list)
    for record in records:
        of_step[(record.lane, record.id)].append(record)
    for (lane, number), of_run in sorted(of_step.items()):
        if lane == 0:
            writer.call(of_run)
        elif lane in book.channels:
            writer.step(lane, number, of_run)
    return writer.names() + writer.events


class _Writer:
    def __init__(self, book: Book) -> None:
        self.book = book
        self.events: list[Event] = []
        self._tracks: dict[tuple[int, ...], str] = {}
        self._calls_end: list[int] = []  # for each track of calls, the end of its last call

    def names(self) -> list[Event]:
        where = f"rank {self.book.rank} on {self.book.host}"
        names = [
            self._meta("process_name", 0, {"name": where}),
            self._meta("process_sort_index", 0, {"sort_index": self.book.rank}),
        ]
        for track in sorted(self._tracks):
            tid = self._tid(track)
            names.append(self._meta("thread_name", tid, {"name": self._tracks[track]}))
            names.append(self._meta("thread_sort_index", tid, {"sort_index": tid}))
        return names

    def step(self, lane: int, number: int, records: Sequence[Record]) -> None:
        channel = self.book.channels[lane]
        # partial rounds have one more bucket, the table of the ranks that take part
        records = [record for record in records if record.part < len(channel.buckets(number))]
        of: dict[Kind, list[Record]] = defaultdict(list)
        for record in records:
            of[record.kind].append(record)
        about = {"channel": channel.name, "lane": lane, "step": number}
        filled = {record.part: record for record in of[Kind.FILL]}
        for record in of[Kind.FILL]:
            self._bucket(lane, record, "fill", "fill", about)
        for record in of[Kind.RUN]:
            if record.part in filled and filled[record.part].end_ns <= record.begin_ns:
                waits = record._replace(begin_ns=filled[record.part].end_ns, end_ns=record.begin_ns)
                self._bucket(lane, waits, "queue", "queue", about)
            self._bucket(lane, record, "reduce", f"bucket {record.part}", about)
        for record in of[Kind.DELIVER]:
            self._bucket(lane, record, "deliver", "deliver", {**about, "collects": record.round})
        for part in {record.part for record in of[Kind.ROUND]}:
            rounds = [record for record in of[Kind.ROUND] if record.part == part]
            self._levels(lane, part, rounds, about)
        delivered = {record.part for record in of[Kind.DELIVER]}
        if of[Kind.SUBMITTED] and len(filled) == len(delivered) == len(channel.buckets(number)):
            self._step_events(lane, number, of, about)

    def call(self, records: Sequence[Record]) -> None:
        of = {record.kind: record for record in records}
        if Kind.ANNOUNCE not in of or Kind.CALL not in of:
            return
        announced, called = of[Kind.ANNOUNCE], of[Kind.CALL]
        about: dict[str, Any] = {}
        levels = self.book.plans.get(announced.plan)
        if levels is not None:
            spans = _by_level([record for record in records if record.kind == Kind.ROUND], levels)
            took = {levels.names[i]: (span.end_ns - span.begin_ns) / 1e3 for i, span in spans.items()}
            about = {"algorithm": levels.algorithm, "levels_us": took}
        free = [i for i, end in enumerate(self._calls_end) if end <= announced.begin_ns]
        place = free[0] if free else len(self._calls_end)
        self._calls_end[place : place + 1] = [called.end_ns]
        track = self._track((0, place), "calls" if place == 0 else f"calls {place + 1}")
        self._span(track, "announce", f"announce {announced.name}", announced, {})
        self._span(track, "call", announced.name, called, about)

    def _step_events(self, lane: int, number: int, of: dict[Kind, list[Record]], about: dict[str, Any]) -> None:
        track = self._track((lane, 0, 0), f"{about['channel']}: steps")
        submitted = of[Kind.SUBMITTED][0]
        begin = min(record.begin_ns for record in of[Kind.FILL])
        end = max(record.end_ns for record in [submitted, *of[Kind.DELIVER], *of[Kind.WAIT]])
        self._span(track, "step", f"step {number}", submitted._replace(begin_ns=begin, end_ns=end), about)
        at = {"name": "all submitted", "cat": "submitted", "ph": "i", "s": "t", "ts": self._us(submitted.end_ns)}
        self.events.append({**at, "pid": self.book.rank, "tid": track, "args": about})
        for wait in of[Kind.WAIT]:
            exposed = wait._replace(begin_ns=max(wait.begin_ns, submitted.end_ns))
            if exposed.begin_ns < exposed.end_ns:
                self._span(track, "exposed", "exposed", exposed, about)

    def _bucket(self, lane: int, record: Record, category: str, name: str, about: dict[str, Any]) -> None:
        bucket = self.book.channels[lane].buckets(about["step"])[record.part]
        track = self._track((lane, 1 + record.part, 0), f"{about['channel']}: bucket {record.part}")
        more: dict[str, Any] = {**about, "bucket": record.part}
        if category == "reduce":
            more |= {"algorithm": bucket.levels.algorithm, "nbytes": bucket.nbytes, "dtype": bucket.dtype}
            more["tensors"] = list(bucket.tensors)
        self._span(track, category, name, record, more)

    def _levels(self, lane: int, part: int, rounds: Sequence[Record], about: dict[str, Any]) -> None:
        levels = self.book.channels[lane].buckets(about["step"])[part].levels
        for index, span in _by_level(rounds, levels).items():
            title = f"{about['channel']}: bucket {part}, {levels.names[index]}"
            track = self._track((lane, 1 + part, 1 + index), title)
            self._span(track, "level", levels.names[index], span, {**about, "bucket": part, "level": index})

    def _track(self, track: tuple[int, ...], title: str) -> int:
        self._tracks[track] = title
        return self._tid(track)

    def _tid(self, track: tuple[int, ...]) -> int:
        """Return a track's number, which depends only on the track: equal on all ranks, in the order of the drawing."""
        lane, part, level = (*track, 0, 0)[:3]
        return lane * 1_000_000 + part * 100 + level

    def _span(self, tid: int, category: str, name: str, record: Record, about: dict[str, Any]) -> None:
        begin, end = self._us(record.begin_ns), self._us(record.end_ns)
        span = {"name": name, "cat": category, "ph": "X", "ts": begin, "dur": round(end - begin, 3)}
        self.events.append({**span, "pid": self.book.rank, "tid": tid, "args": about})

    def _meta(self, kind: str, tid: int, about: dict[str, Any]) -> Event:
        return {"name": kind, "ph": "M", "ts": 0, "pid": self.book.rank, "tid": tid, "args": about}

    def _us(self, ns: int) -> float:
        return (ns - self.book.zero_ns) / 1e3


def _by_level(rounds: Sequence[Record], levels: Levels) -> dict[int, Record]:
    """Join the rounds of each level into one record, from the begin of the first round to the end of the last."""
    spans: dict[int, Record] = {}
    for record in rounds:
        index = next((i for i, end in enumerate(levels.ends) if record.round < end), None)
        if index is None:
            continue
        span = spans.get(index, record)
        begin, end = min(span.begin_ns, record.begin_ns), max(span.end_ns, record.end_ns)
        spans[index] = record._replace(begin_ns=begin, end_ns=end)
    return dict(sorted(spans.items()))
