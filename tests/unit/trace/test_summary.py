"""The summary of hand-made traces, computed by hand."""

from __future__ import annotations

import dataclasses

import pytest

from hvd_ext.trace import summary
from hvd_ext.trace.summary import Step, steps_of
from tests.unit.trace.files import RANK_0, RANK_1, span, submitted


def test_a_step_of_two_ranks_and_of_one():
    both = Step(
        channel="Adam",
        step=1,
        communication_us=40,
        exposed_us=30,
        hidden=1 - 15 / 60,
        slowest=0,
        slowest_us=20,
        last=1,
        late_us=63.5,
    )
    assert steps_of(RANK_0 + RANK_1) == [both]
    assert steps_of(RANK_0) == [dataclasses.replace(both, hidden=1 - 15 / 40, last=None, late_us=0)]


def test_ranks_that_are_equally_late_the_first_is_named():
    events = [span("step", rank, 0, 9) for rank in (2, 0, 1)] + [submitted(rank, 5) for rank in (2, 0, 1)]
    (step,) = steps_of(events)
    assert (step.last, step.late_us) == (0, 0)


def test_a_step_without_communication_has_no_hidden_share():
    (step,) = steps_of([span("step", 0, 0, 9), submitted(0, 5)])
    assert step == Step("Adam", 1, 0, 0, None, None, 0.0, None, 0.0)


def test_a_step_that_is_not_whole_on_any_rank_is_left_out_and_on_one_rank_that_rank():
    part = [event for event in RANK_1 if event["cat"] != "step"]
    assert steps_of(part) == []
    assert steps_of(RANK_0 + part) == steps_of(RANK_0)


def test_steps_come_in_the_order_of_their_begin_and_channels_are_kept_apart():
    events = [
        span("step", 0, 50, 60, step=2),
        span("step", 0, 10, 20, step=1),
        span("step", 0, 30, 40, step=1, lane=2, channel="SGD"),
        span("reduce", 0, 31, 39, step=1, lane=2, channel="SGD", bucket=4),
        {"name": "allreduce 'x'", "cat": "call", "ph": "X", "ts": 1, "dur": 2, "pid": 0, "tid": 0, "args": {}},
        {"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "rank 0"}},
    ]
    found = [(step.channel, step.step, step.communication_us, step.slowest) for step in steps_of(events)]
    assert found == [("Adam", 1, 0, None), ("SGD", 1, 8, 4), ("Adam", 2, 0, None)]


def test_unions_join_what_overlaps_or_touches():
    assert summary.union([(5, 6), (0, 2), (2, 3), (1, 1.5)]) == [(0, 3), (5, 6)]
    assert summary.common([(0, 3), (5, 6)], [(2, 5.5), (7, 8)]) == [(2, 3), (5, 5.5)]


@pytest.mark.parametrize(
    ("values", "median", "p90"), [([3.0], 3.0, 3.0), ([4.0, 1.0], 2.5, 3.7), (list(range(11)), 5.0, 9.0)]
)
def test_totals_are_interpolated(values, median, p90):
    found = summary.total(values)
    assert (found.median, found.p90) == pytest.approx((median, p90))


def test_stragglers_are_counted():
    (step,) = steps_of(RANK_0 + RANK_1)
    steps = [dataclasses.replace(step, last=last) for last in (3, 1, 3, None, 1, 3, 0)]
    assert summary.stragglers(steps) == [(3, 3), (1, 2), (0, 1)]
