"""Communication that delays computing: compared with a step computed in small pieces, and found from two layouts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hvd_ext.compression import AnyOf, Codec
from hvd_ext.compression.topk import TopK
from hvd_ext.errors import PlanError
from hvd_ext.options import Sum
from hvd_ext.planning import contention
from hvd_ext.planning.contention import Overlap
from hvd_ext.planning.layout import layout
from hvd_ext.planning.prediction import predict
from hvd_ext.planning.step_times import StepTimes
from tests.unit.planning.test_layout_times import cluster, model


def spans_of(seed: int) -> list[tuple[float, float]]:
    """Whole numbers of milliseconds."""
    rng, clock, spans = random.Random(seed), 0, []
    for _ in range(rng.randint(0, 6)):
        begin = clock + rng.randint(1, 60)
        clock = begin + rng.randint(1, 80)
        spans.append((begin / 1e3, clock / 1e3))
    return spans


@pytest.mark.parametrize("seed", range(20))
def test_delayed_computing_is_one_that_is_slower_beside_communication(seed: int) -> None:
    spans, share = spans_of(seed), random.Random(-1 - seed).choice([0.0, 0.25, 0.5, 0.75])
    alone_s, clock = 0.0, 0
    while clock < 600:  # in steps of a millisecond, which begin and end with the spans
        assert contention.delayed(alone_s, spans, share) == pytest.approx(clock / 1e3)
        assert contention.undelayed(clock / 1e3, spans, share) == pytest.approx(alone_s)
        beside = any(begin_s <= clock / 1e3 + 1e-9 < end_s for begin_s, end_s in spans)
        alone_s += 1e-3 * (1 - share if beside else 1)
        clock += 1


def test_spans_of_buckets_are_joined_where_they_touch() -> None:
    spans = contention.busy([5.0, 0.0, 1.0, 2.0, 9.0], [6.0, 2.0, 1.5, 3.0, 9.0])
    assert spans == [(0.0, 3.0), (5.0, 6.0)]
    assert contention.hidden_s(spans, 5.5) == pytest.approx(3.5)
    assert contention.hidden_s([], 5.5) == 0.0


def test_two_layouts_show_the_contention_if_they_hide_different_amounts() -> None:
    one, other = Overlap(1.0, 0.1), Overlap(1.2, 0.5)
    assert contention.between(one, other, 0.0) == contention.between(other, one, 0.0) == pytest.approx(0.5)
    assert contention.between(one, Overlap(1.2, 0.15), 0.25) == 0.25, "what they hide is too similar"
    assert contention.between(one, Overlap(0.8, 0.5), 0.25) == 0.0, "a quicker computation has other reasons"
    assert contention.between(one, Overlap(9.0, 0.5), 0.25) == contention.MOST


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [0.1, 0.4, contention.MOST])
def test_a_step_gets_longer_by_no_more_than_what_it_hides_costs(seed: int, share: float) -> None:
    tree, times = cluster(), model(seed)
    made = layout(tree, times.tensors, Sum, times=times, buckets="mgwfbp")
    free, shared = (predict(tree, made, replace(times, contention=value)) for value in (0.0, share))
    hidden_s = contention.hidden_s(contention.busy(free.begins_s, free.ends_s), times.computed_s)
    assert hidden_s > 0
    assert free.step_s <= shared.step_s <= free.step_s + hidden_s * share / (1 - share) + 1e-9
    assert all(late >= early for late, early in zip(shared.ready_s, free.ready_s, strict=True))
    single = layout(tree, times.tensors, Sum, times=times, buckets="single")
    both = [predict(tree, single, replace(times, contention=value)).step_s for value in (0.0, share)]
    assert both[0] == pytest.approx(both[1]), "nothing is hidden"


def test_where_hidden_communication_costs_time_more_is_sent_in_fewer_bits() -> None:
    tree, times = cluster(), model(5, computed_s=1.0)
    lossy = []
    for share in (0.0, 0.6):
        shared = replace(times, contention=share)
        made = layout(tree, times.tensors, Sum, times=shared, codec=AnyOf(vectors=True))
        assert predict(tree, made, shared).step_s <= 1.07 * min(seconds for _, seconds in made.forms)
        lossy.append(made.lossy_elements)
    assert lossy[0] < lossy[1]


@pytest.mark.parametrize("codec", [AnyOf(vectors=True), TopK(0.01, vectors=True, where="needed")])
def test_where_steps_take_longer_than_predicted_no_tensor_is_known_to_have_time(codec: Codec) -> None:
    tree, times = cluster(), model(5, computed_s=0.6)
    lossy = []
    for late in (0.0, 0.05, 0.06):
        made = layout(tree, times.tensors, Sum, times=replace(times, late=late), codec=codec)
        lossy.append(made.lossy_elements)
    large = [tensor.elements for tensor in times.tensors if tensor.elements >= codec.min_elements]
    assert lossy[0] == lossy[1] < lossy[2] == sum(large)


def test_a_contention_must_be_one() -> None:
    for value in (-0.1, 1.0, float("nan")):
        with pytest.raises(PlanError, match=r"contention .* must be between 0 and 0.9"):
            StepTimes((), (), contention=value)
