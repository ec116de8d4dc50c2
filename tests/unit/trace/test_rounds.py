"""The summary of partial rounds, computed by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hvd_ext.engine.partial import Rounds
from hvd_ext.trace import events, rounds

# rank 1 gives its gradients of steps 1 and 2 to round 3, and that of step 4 to round 4
ARRIVED = np.array([[1, 0], [2, 0], [3, 2], [4, 4]])


def known(first: int = 1) -> Rounds:
    """What rank 0 knows; rank 1's gradient of step 3 has come at the time of that of step 4."""
    count = len(ARRIVED)
    announced_s = np.array([[1.0, 2.5], [3.0, 4.25], [5.0, 7.0], [7.0, 0.0]])
    return Rounds(
        np.arange(first, first + count),
        np.array([1.0, 3.0, 5.0, 7.0]),
        np.array([2.0, 4.0, 6.0, 8.0]),
        np.array([0.5, 0.5, 0.0, 0.25]),
        ARRIVED + first - 1,
        np.zeros((count, 2), np.int64),
        announced_s,
    )


@pytest.mark.parametrize("first", [1, 501])
def test_rank_0_knows_who_was_on_time_and_how_long_all_waited(first: int) -> None:
    found = rounds.of_engine(known(first), 0, (0, 3))
    assert found is not None
    assert (found.rounds, found.ranks, found.on_time, found.late) == (4, (0, 3), (4, 1), (0, 3))
    assert found.active == 5 / 4
    assert found.staleness == (5, 2, 1)  # steps 1, 2 and 3 of the late rank: 2, 1 and 1 rounds
    assert found.waited_s == (1.25, 0.0)
    assert found.line() == (
        "4 rounds with 1.25 of 2 ranks on time in the mean; late most often: rank 3 in 3; staleness of gradients "
        "0: 62%, 1: 25%, 2: 12%"
    )


def test_a_rank_that_came_before_its_round_was_over_has_waited_and_another_rank_knows_its_time_only() -> None:
    announced_s = known().announced_s.copy()
    announced_s[3, 1] = 7.25
    found = rounds.of_engine(known()._replace(announced_s=announced_s), 0, range(2))
    assert found is not None and found.waited_s == (1.25, 0.75)
    found = rounds.of_engine(known()._replace(announced_s=np.zeros((4, 2))), 1, range(2))
    assert found is not None and math.isnan(found.waited_s[0]) and found.waited_s[1] == 1.25
    assert rounds.of_engine(Rounds(*(array[:0] for array in known())), 0, range(2)) is None, "no round, no summary"


def event(rank: int, number: int, arrived: int, waited_us: float = 0.0, channel: str = "Adam") -> dict[str, Any]:
    about = {"channel": channel, "lane": 1, "round": number, "arrived": arrived, "waited_us": waited_us}
    return {"name": f"round {number}", "cat": "round", "ph": "X", "ts": 0, "dur": 1, "pid": rank, "args": about}


def test_the_events_of_all_ranks_have_the_summary_of_the_rounds_that_all_have_recorded() -> None:
    events = [event(rank, 7 + row, int(ARRIVED[row, rank]) + 6, 1e5) for row in range(4) for rank in range(2)]
    found = rounds.of_trace([event(0, 6, 6), *events, event(0, 11, 11)])
    expected = rounds.summed(np.arange(7, 11), ARRIVED + 6, np.array([0.4, 0.4]), range(2))
    assert found == {"Adam": expected}
    assert rounds.of_trace([event(0, 1, 1), event(1, 2, 2), {"ph": "M", "pid": 0}]) == {}, "they share no round"


def test_each_round_of_a_rank_is_an_event() -> None:
    book = events.Book(1, "mill", 500_000_000, {2: events.Channel("Adam", ())}, {})
    title, order, *spans = rounds.events_of(known(), book, 2, since_ns=2_000_000_000)
    assert (title["name"], title["args"]) == ("thread_name", {"name": "Adam: partial rounds"})
    assert (order["name"], {one["tid"] for one in (title, order, *spans)}) == ("thread_sort_index", {2_000_001})
    assert [(one["name"], one["ts"], one["dur"]) for one in spans] == [
        ("round 2, late", 2.5e6, 1e6),
        ("round 3, late", 4.5e6, 1e6),
        ("round 4", 6.5e6, 1e6),
    ]
    about = [[one["args"][key] for key in ("arrived", "on_time", "staleness", "waited_us")] for one in spans]
    assert about == [[0, False, None, 5e5], [2, False, 2, 0.0], [4, True, 1, 2.5e5]]
    assert rounds.events_of(known(), book, 2, since_ns=9_000_000_000) == []


def test_events_of_all_ranks_are_summed_up_as_the_engines_rounds() -> None:
    made = []
    for rank in range(2):
        book = events.Book(rank, "mill", 0, {2: events.Channel("Adam", ())}, {})
        made += rounds.events_of(known(), book, 2)
    assert rounds.of_trace(made)["Adam"] == rounds.summed(known().numbers, ARRIVED, np.array([1.25, 1.25]), range(2))
