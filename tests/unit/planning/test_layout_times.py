"""Layouts by the times of a step: the best bucketer, its predicted step, and the fewest sparsified elements."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from hvd_ext.compression.momentum import Momentum
from hvd_ext.compression.topk import TopK
from hvd_ext.errors import PlanError
from hvd_ext.options import Sum
from hvd_ext.planning import buckets as bucketers, lane_prices, needed
from hvd_ext.planning.layout import TIE, Layout, layout
from hvd_ext.planning.prediction import predict, ready_of
from hvd_ext.planning.step_times import StepTimes
from hvd_ext.planning.tensors import Tensor
from hvd_ext.topology.tree import Link, Tree, from_hosts

TIMED = ("wfbp", "single", "by_size", "mgwfbp", "optimal")


def cluster(hosts: str = "aabb") -> Tree:
    return replace(from_hosts(list(hosts), between=Link(150e-6, 8 / 100e6)), message_s=20e-6)


def model(seed: int, layers: int = 30, elements: int = 60_000, computed_s: float = 0.3) -> StepTimes:
    """Matrices and biases whose gradients come in the order of back-propagation."""
    rng = random.Random(seed)
    tensors = []
    for number in range(layers):
        tensors.append(Tensor(f"{number}/kernel", (1 + int(rng.random() ** 3 * elements), 4), "float32"))
        tensors.append(Tensor(f"{number}/bias", (rng.randint(1, 200),), "float32"))
    shares = [rng.random() for _ in tensors]
    ready, ready_s = computed_s / 3, []
    for share in reversed(shares):
        ready += computed_s * 2 / 3 * share / sum(shares)
        ready_s.append(ready)
    return StepTimes(tuple(tensors), tuple(reversed(ready_s)), computed_s / 3, 0.01)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("topk", [None, TopK(0.01)])
def test_auto_is_as_good_as_every_bucketer(seed: int, topk: TopK | None) -> None:
    tree, times = cluster(), model(seed)
    made = layout(tree, times.tensors, Sum, times=times, codec=topk)
    step_s = predict(tree, made, times).step_s
    for name in bucketers.names():
        if name == "by_groups":
            continue
        other = layout(tree, times.tensors, Sum, times=times, codec=topk, buckets=name)
        assert other.bucketer == name
        assert step_s <= predict(tree, other, times).step_s * (1 + 2 * TIE), name
    assert made.bucketer == made.outcomes[0].bucketer
    assert {one.bucketer for one in made.outcomes} >= {"wfbp", "single", "mgwfbp", "optimal"}
    assert made.outcomes[0].buckets == len(made.buckets)
    assert f"{made.bucketer} " in made.reason
    assert sorted(made.sent_tensors) == list(range(len(times.tensors)))


def test_a_step_is_computation_and_what_is_not_hidden_behind_it() -> None:
    tree, times = cluster(), model(1)
    made = layout(tree, times.tensors, Sum, times=times, buckets="single")
    found = predict(tree, made, times)
    assert found.begins_s == (times.computed_s,)
    assert found.exposed_s == pytest.approx(found.ends_s[0] - times.computed_s)
    assert found.step_s == pytest.approx(times.computed_s + found.exposed_s + 0.01)
    assert predict(tree, layout(tree, times.tensors, Sum, places=[], times=times), times).exposed_s == 0.0
    by_price = predict(tree, made, times, most_messages=0)
    assert by_price.step_s == pytest.approx(found.step_s, rel=0.02)


def test_without_times_auto_is_what_it_was_and_what_a_bucketer_lacks_is_said() -> None:
    tree, times = cluster(), model(2)
    plain = layout(tree, times.tensors, Sum)
    assert (plain.bucketer, plain.outcomes, plain.reason) == ("by_size", (), "")
    assert len(layout(tree, times.tensors, Sum, buckets="wfbp").buckets) == len(times.tensors)
    for name, words, known in (("by_groups", "it needs groups", None), ("none", "must be one of", times)):
        with pytest.raises(PlanError, match=f"bucketer '{name}': {words}"):
            layout(tree, times.tensors, Sum, buckets=name, times=known)


def test_three_classes_are_left_to_the_other_bucketers() -> None:
    tensors = tuple(Tensor(dtype, (5000,), dtype) for dtype in ("float32", "float16", "float64"))
    made = layout(cluster(), tensors, Sum, times=StepTimes(tensors, (0.3, 0.2, 0.1)))
    assert "2 classes" in next(one.reason for one in made.outcomes if one.bucketer == "optimal")
    assert made.bucketer in TIMED


@pytest.mark.parametrize("topk", [None, TopK(0.01)])
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("name", ["auto", *bucketers.names()])
def test_the_users_groups_go_before_the_name_of_a_bucketer(name: str, timed: bool, topk: TopK | None) -> None:
    times = model(3, layers=5)
    made = layout(
        cluster(), times.tensors, Sum, times=times if timed else None, groups=[[0, 2], [1]], buckets=name, codec=topk
    )
    assert made.bucketer == "by_groups"
    assert {(0, 2), (1,)} <= {tuple(sorted(bucket.tensors)) for bucket in made.buckets}
    if timed and name == "auto":
        assert [one.reason for one in made.outcomes if one.bucketer == "optimal"] == ["it does not support groups"]


@pytest.mark.parametrize("name", TIMED)
def test_a_named_bucketer_waits_for_times_and_keeps_what_is_selected_apart(name: str) -> None:
    tensors = [Tensor(f"t{n}", (250 + n, 4), "float32") for n in range(6)]
    times = StepTimes(tuple(tensors), tuple(0.01 * (6 - n) for n in range(6)), 0.01)
    assert layout(cluster(), tensors, Sum, buckets=name).bucketer in (name, "by_size")
    assert layout(cluster(), tensors, Sum, buckets=name, times=times).bucketer == name
    topk = TopK(0.01, min_elements=1016)
    selecting = layout(cluster(), tensors, Sum, buckets=name, codec=topk, times=times)
    assert selecting.bucketer == name
    assert selecting.selected == {4, 5}
    assert all(len({place in {4, 5} for place in bucket.tensors}) == 1 for bucket in selecting.buckets)


def test_times_are_found_by_name_and_those_of_another_model_are_refused() -> None:
    times = model(4, layers=3)
    shuffled = StepTimes(times.tensors[::-1], times.ready_s[::-1], times.forward_s)
    assert ready_of(shuffled, times.tensors) == times.ready_s
    with pytest.raises(PlanError, match="tensor 'other' is missing; the times are those of another model"):
        ready_of(times, [Tensor("other", (1,), "float32")])
    with pytest.raises(PlanError, match="tensor '0/kernel' has .* elements there and 1 here"):
        ready_of(times, [Tensor("0/kernel", (1,), "float32")])


@pytest.mark.parametrize("momentum", [None, Momentum(0.9, False)])
@pytest.mark.parametrize("computed_s", [0.02, 0.2, 2.0])
def test_topk_where_needed_sparsifies_few_elements_and_stays_near(computed_s: float, momentum: Momentum | None) -> None:
    tree, times = cluster("aabbb"), model(5, computed_s=computed_s)

    def made(where: str, times_of: StepTimes | None = times) -> tuple[Layout, set[int]]:
        """The layout, and the tensors that are selected from."""
        topk = TopK(0.01, where=where)  # type: ignore[arg-type]
        found = layout(tree, times.tensors, Sum, times=times_of, codec=topk, momentum=momentum)
        selects = [one for one in found.buckets if one.selection is not None and one.selection.dense_above > 0]
        return found, {place for one in selects for place in one.tensors}

    everywhere, needed_only = made("everywhere"), made("needed")
    few, many = (sum(times.tensors[place].elements for place in found[1]) for found in (needed_only, everywhere))
    assert few < many
    step_s, shortest_s = (predict(tree, found[0], times).step_s for found in (needed_only, everywhere))
    assert step_s <= shortest_s * (needed.NEAR + TIE)
    assert (few == 0) == (computed_s == 2.0)
    # without times all of them are; and all float32 tensors keep residuals, so that a traced graph stays right
    if momentum is None:
        (all_of_them, selected), (always, selected_always) = made("needed", None), made("everywhere", None)
        assert selected == selected_always == always.selected
        assert all_of_them.selected == set(range(len(times.tensors)))


def test_the_fewest_elements_are_those_that_the_lane_has_no_time_for() -> None:
    tensors = [Tensor(str(n), (n + 1,), "float32") for n in range(8)]
    ready_s = [8.0 - n for n in range(8)]

    def step_s(selected: object) -> float:
        return 10.0 - (1 if 0 in selected else 0) - (2 if 1 in selected else 0)  # type: ignore[operator]

    assert needed.fewest(tensors, ready_s, range(8), step_s, 1.0) == {0, 1}
    assert needed.fewest(tensors, ready_s, range(8), step_s, 8.1 / 7) == {1}
    assert needed.fewest(tensors, ready_s, range(8), step_s, 2.0) == frozenset()


@pytest.mark.parametrize("hosts", ["aaaabbbb", "aaaabbbbccccdddd"])
def test_400_tensors_are_planned_in_well_below_a_second(hosts: str) -> None:
    tree, times = cluster(hosts), model(6, layers=200, elements=200_000, computed_s=3.0)
    layout(tree, times.tensors, Sum, times=times)
    begin = time.process_time()
    layout(tree, times.tensors, Sum, times=times)
    assert time.process_time() - begin < 0.8


def test_rows_of_embeddings_count_as_load_in_every_price_of_a_step() -> None:
    tree, times = cluster(), model(7)
    rows = replace(times, rows=((times.computed_s, 300_000),))
    hold_s = lane_prices.gather_parts(tree, 300_000).hold_s
    plain = {one.bucketer: one.step_s for one in layout(tree, times.tensors, Sum, times=times).outcomes}
    for name in TIMED:
        made = layout(tree, times.tensors, Sum, times=rows, buckets=name)
        played, priced = predict(tree, made, rows), predict(tree, made, rows, most_messages=0)
        (outcome,) = made.outcomes
        assert len(played.ends_s) == len(made.buckets)
        assert outcome.step_s == pytest.approx(priced.step_s, rel=0.03), name
        assert outcome.step_s == pytest.approx(played.step_s, rel=0.05), name
        assert (outcome.step_s or 0.0) > (plain[name] or 0.0) + 0.5 * hold_s, name
    rows = replace(times, rows=((times.ready_s[-1], 300_000), (times.computed_s, 100_000)))
    best = layout(tree, times.tensors, Sum, times=rows)
    without = layout(tree, times.tensors, Sum, times=times)
    assert predict(tree, best, rows).step_s <= predict(tree, without, rows).step_s * (1 + TIE)
