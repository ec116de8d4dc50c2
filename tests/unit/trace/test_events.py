"""From records to events: hand-made records, events counted by hand."""

from __future__ import annotations

import itertools

import pytest

from hvd_ext.planning import lower, planner
from hvd_ext.topology.tree import from_hosts
from hvd_ext.trace import merge
from hvd_ext.trace.events import Book, Bucket, Channel, Levels, events_of, levels_of
from hvd_ext.trace.records import Kind, Record

LEVELS = Levels("two", ("up", "down"), (2, 3))
BUCKETS = (Bucket(LEVELS, ("b", "a"), 80, "float32"), Bucket(LEVELS, ("c",), 4, "float32"))
BOOK = Book(
    rank=3,
    host="mill",
    zero_ns=1_000_000,
    channels={1: Channel("Adam", ((1, BUCKETS), (9, BUCKETS[:1])))},
    plans={77: LEVELS},
)


def record(kind: Kind, begin_us: float, end_us: float, **more: object) -> Record:
    """A record of step 5 of lane 1; times in us after the zero of the trace."""
    base = Record(int(begin_us * 1e3) + 1_000_000, int(end_us * 1e3) + 1_000_000, 5, -1, kind, 1, 0, 0, "")
    return base._replace(**more)


STEP = [
    record(Kind.FILL, 0, 10),
    record(Kind.FILL, 11, 20, part=1),
    record(Kind.SUBMITTED, 20, 20),
    record(Kind.RUN, 12, 40),
    record(Kind.ROUND, 12, 20, round=0),
    record(Kind.ROUND, 15, 30, round=1),
    record(Kind.ROUND, 25, 40, round=2),
    record(Kind.DELIVER, 40, 43, round=2),
    record(Kind.RUN, 30, 50, part=1),
    record(Kind.DELIVER, 50, 52, part=1, round=1),
    record(Kind.WAIT, 14, 46),
    record(Kind.WAIT, 47, 53),
]


def spans(events: list, category: str) -> list[tuple[str, float, float]]:
    """Name, begin and length of the events of a category."""
    return [(event["name"], event["ts"], event["dur"]) for event in events if event.get("cat") == category]


def test_a_bucket_is_filled_queued_reduced_and_delivered_and_rounds_are_joined_to_levels():
    events = events_of(STEP, BOOK)
    assert spans(events, "fill") == [("fill", 0, 10), ("fill", 11, 9)]
    assert spans(events, "queue") == [("queue", 10, 2), ("queue", 20, 10)]
    assert spans(events, "reduce") == [("bucket 0", 12, 28), ("bucket 1", 30, 20)]
    assert spans(events, "level") == [("up", 12, 18), ("down", 25, 15)]
    assert spans(events, "deliver") == [("deliver", 40, 3), ("deliver", 50, 2)]
    reduce = next(event for event in events if event.get("cat") == "reduce")
    whose = {"channel": "Adam", "lane": 1, "step": 5, "bucket": 0}
    assert reduce["args"] == {**whose, "algorithm": "two", "nbytes": 80, "dtype": "float32", "tensors": ["b", "a"]}


def test_waiting_is_exposed_from_the_last_tensor_on():
    events = events_of(STEP, BOOK)
    assert spans(events, "exposed") == [("exposed", 20, 26), ("exposed", 47, 6)]
    assert spans(events, "step") == [("step 5", 0, 53)]
    assert [event["ts"] for event in events if event["ph"] == "i"] == [20]


@pytest.mark.parametrize("lost", [0, 2, 7])
def test_a_step_of_which_records_were_dropped_is_not_called_whole(lost):
    events = events_of(STEP[:lost] + STEP[lost + 1 :], BOOK)
    assert spans(events, "step") == spans(events, "exposed") == []
    assert len(spans(events, "reduce")) == 2


def test_a_step_has_the_buckets_of_its_layout():
    later = [one._replace(id=9) for one in STEP if one.part == 0]
    found = events_of([*STEP, *later], BOOK)
    assert [e["args"]["step"] for e in found if e.get("cat") == "step"] == [5, 9]
    assert [e["args"]["bucket"] for e in found if e.get("cat") == "reduce" and e["args"]["step"] == 9] == [0]


def test_calls_that_overlap_have_tracks_of_their_own_and_a_call_under_way_at_the_end_is_left_out():
    calls = [record(Kind.ANNOUNCE, 90, 91, lane=0)]
    for number, begin in enumerate((0, 5, 40)):
        about = {"id": number, "lane": 0}
        calls.append(record(Kind.ANNOUNCE, begin, begin + 2, plan=77, name=f"allreduce '{number}'", **about))
        calls.append(record(Kind.ROUND, begin + 3, begin + 6, round=2, **about))
        calls.append(record(Kind.CALL, begin + 2, begin + 8, **about))
    events = events_of(calls, BOOK)
    assert spans(events, "call") == [("allreduce '0'", 2, 6), ("allreduce '1'", 7, 6), ("allreduce '2'", 42, 6)]
    assert len(spans(events, "announce")) == 3
    found = [event for event in events if event.get("cat") == "call"]
    assert [event["tid"] for event in found] == [found[0]["tid"], found[0]["tid"] + 100, found[0]["tid"]]
    assert found[0]["args"] == {"algorithm": "two", "levels_us": {"down": 3.0}}


def test_events_are_chromes_and_tracks_have_names():
    events = events_of(STEP, BOOK)
    assert [merge.problem_of(event) for event in events] == [""] * len(events)
    assert {event["pid"] for event in events} == {3}
    assert events[0]["args"] == {"name": "rank 3 on mill"}
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    tracks = ["steps", "bucket 0", "bucket 0, up", "bucket 0, down", "bucket 1"]
    assert list(names.values()) == [f"Adam: {track}" for track in tracks]
    assert {event["tid"] for event in events if event["ph"] != "M"} == set(names)
    # Perfetto draws spans of one track that overlap without nesting wrongly.
    for track in names:
        drawn = sorted((e["ts"], -e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == track)
        for (begin, minus), (next_begin, next_minus) in itertools.pairwise(drawn):
            assert next_begin >= begin - minus or next_begin - next_minus <= begin - minus


def test_the_levels_of_a_plan_end_where_its_rounds_do():
    plan = planner.allreduce_plan(from_hosts(["a", "a", "a", "b", "b"]), "two_level", nbytes=1 << 20).plan
    levels = levels_of(plan)
    assert levels.algorithm == "two_level"
    assert len(levels.names) == len(levels.ends) == len(plan.levels)
    assert list(levels.ends) == sorted(levels.ends)
    assert levels.ends[-1] == lower.rounds_of(plan)
