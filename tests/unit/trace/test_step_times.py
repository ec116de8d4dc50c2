"""The model of a training from the times that the engine notes: hand-made steps, medians counted by hand."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from hvd_ext.engine.channels import RecentSteps
from hvd_ext.errors import InvalidError
from hvd_ext.planning.tensors import Tensor
from hvd_ext.trace import step_times
from hvd_ext.trace.step_times import Measured

TENSORS = (Tensor("a", (4,), "float32"), Tensor("b", (2, 3), "float16"))


def recent(count: int, first: int = 1, length: float = 1.0) -> RecentSteps:
    """Steps of one length, each ended a quarter before the next; tensor 1 comes before tensor 0, later each step."""
    steps = np.arange(first, first + count)
    begins_s = 100 + length * np.arange(count)
    arrival_offset_s = np.stack([0.5 + steps / 1000, 0.25 + steps / 1000], axis=1)
    return RecentSteps(steps, begins_s, begins_s + length * 0.75, arrival_offset_s)


def test_the_first_steps_do_not_count_and_arrivals_are_the_medians_of_the_newest_ten() -> None:
    assert step_times.measured(recent(3)) is None
    four = step_times.measured(recent(4))
    assert four == Measured((0.504, 0.254), None, None)
    many = step_times.measured(recent(30))
    assert many is not None
    assert many.ready_s == pytest.approx((0.5255, 0.2755))
    assert many.step_s == pytest.approx(1.0)
    assert many.update_s == pytest.approx(0.25)


def test_steps_in_an_earlier_layout_or_with_gaps_say_nothing_about_the_length_of_a_step() -> None:
    before, after = recent(20, length=2.0), recent(10, first=21)
    both = RecentSteps(*(np.concatenate(pair) for pair in zip(before, after, strict=True)))
    found = step_times.measured(both, first_step=21)
    assert found is not None
    assert found.step_s == pytest.approx(1.0)
    gaps = step_times.measured(RecentSteps(*(column[::2] for column in recent(12))))
    assert gaps is not None
    assert (gaps.step_s, gaps.update_s) == (None, None)


def test_the_latest_rank_counts_for_each_tensor_and_a_longer_update_makes_its_gradients_later() -> None:
    ranks = [Measured((0.5, 0.2), 1.0, 0.25), Measured((0.4, 0.3), 1.1, 0.25), Measured((0.1, 0.1), None, None)]
    assert step_times.latest(ranks) == Measured((0.5, 0.3), 1.1, 0.25)
    ranks = [Measured((0.5, 0.25), 1.0, 0.5), Measured((0.5, 0.375), 1.0, 0.25)]
    assert step_times.latest(ranks) == Measured((0.75, 0.5), 1.0, 0.25)


def test_each_step_counts_with_the_rank_that_is_the_latest_in_it() -> None:
    """Two ranks are late in turn: their medians are alike, and each step waits for the other one."""

    def rank(late: int) -> RecentSteps:
        steps = np.arange(4, 25)
        delay_s = np.where(steps % 2 == late, 0.2, 0.0)
        begins_s = 100.0 + 2 * np.arange(len(steps))
        arrival_offset_s = np.stack([1.0 + delay_s, 0.5 + delay_s, 0.75 + delay_s], axis=1)
        return RecentSteps(steps, begins_s, begins_s + 1.75, arrival_offset_s)

    found = [step_times.measured(rank(late)) for late in (0, 1)]
    ranks = [of_rank for of_rank in found if of_rank is not None]
    assert [of_rank.ready_s for of_rank in ranks] == [pytest.approx((1.1, 0.6, 0.85))] * 2
    latest = step_times.latest(ranks)
    assert latest.ready_s == pytest.approx((1.2, 0.7, 0.95))
    assert (latest.step_s, latest.update_s) == (pytest.approx(2.0), pytest.approx(0.25))
    again = [Measured.from_json(json.loads(json.dumps(dataclasses.asdict(of_rank)))) for of_rank in ranks]
    assert again == ranks
    fewer = [dataclasses.replace(ranks[0], arrivals_s=ranks[0].arrivals_s[1:]), ranks[1]]
    assert step_times.latest(fewer).ready_s == pytest.approx((1.1, 0.6, 0.85)), "of other steps"


def test_a_sample_tells_how_late_the_tensors_between_are() -> None:
    count, steps = 100, np.arange(4, 15)
    offsets_s = np.tile(np.linspace(1.0, 0.1, count), (len(steps), 1))
    begins_s = 2.0 * np.arange(len(steps))

    def rank(late: int) -> Measured:
        arrivals_s = offsets_s * np.where(steps % 2 == late, 1.5, 1.0)[:, np.newaxis]
        found = step_times.measured(RecentSteps(steps, begins_s, begins_s + 2.0, arrivals_s))
        assert found is not None
        assert {len(of_step) for of_step in found.arrivals_s} == {step_times.SAMPLE + 1}
        return found

    assert step_times.latest([rank(0), rank(1)]).ready_s == pytest.approx(1.5 * offsets_s[0])


def test_tensors_that_do_not_travel_are_ready_at_once() -> None:
    tensors = (TENSORS[0], Tensor("frozen", (9,), "float32"), TENSORS[1])
    model = step_times.model(tensors, [0, 2], Measured((0.5, 0.2), 1.0, None))
    assert model.tensors == tensors
    assert model.ready_s == (0.5, 0.0, 0.2)
    assert model.forward_s == 0.2
    assert model.order == (1, 2, 0)


def channel(ready_s: tuple[float, ...], tensors: tuple[Tensor, ...] = TENSORS) -> dict[str, object]:
    """A channel as a rank's file describes it."""
    listed = [[tensor.name, list(tensor.shape), tensor.dtype] for tensor in tensors]
    return {"channel": "Adam", "tensors": listed, "ready_s": list(ready_s), "step_s": 1.0, "update_s": None}


def test_a_trace_gives_the_model_of_its_largest_channel() -> None:
    small = (Tensor("c", (1,), "float32"),)
    ranks = {
        1: {"channels": [channel((0.1,), small), channel((0.5, 0.3))]},
        0: {"channels": [channel((0.2,), small), channel((0.6, 0.1))]},
        2: {"channels": []},
    }
    model = step_times.of_trace(ranks)
    assert model.tensors == TENSORS
    assert model.ready_s == (0.6, 0.3)


def test_a_trace_without_steps_or_with_other_tensors_on_a_rank_is_refused() -> None:
    with pytest.raises(InvalidError, match="has no times of steps: a training must make more than 3 steps"):
        step_times.of_trace({0: {}, 1: {"channels": []}})
    other = (TENSORS[0], Tensor("b", (7,), "float16"))
    with pytest.raises(InvalidError, match="the trace of rank 2 has other tensors than that of rank 0"):
        step_times.of_trace({0: {"channels": [channel((1, 2))]}, 2: {"channels": [channel((1, 2), other)]}})
