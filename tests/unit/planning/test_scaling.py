"""Rows of a simulation: their times, the speed-up, and clusters of several sizes."""

from __future__ import annotations

import pytest

from hvd_ext.errors import PlanError, TopologyError
from hvd_ext.planning import models, planner, scaling
from hvd_ext.planning.cost import lane
from hvd_ext.planning.step_times import StepTimes
from hvd_ext.planning.tensors import Tensor
from hvd_ext.topology.presets import cluster, preset
from hvd_ext.topology.tree import ETHERNET, SHARED_MEMORY

# MG-WFBP's Theorem 1 fails here: backward times (1, 1, 2), sizes (1, 1, 1), a = 2, b = 1
COUNTEREXAMPLE = StepTimes(tuple(Tensor(name, (1,), "float32") for name in "abc"), (4.0, 2.0, 1.0))
TWO_AND_ONE = lane.line(2.0, 0.25)  # 1 second for the 4 bytes of a tensor
SMALL = models.step_times(
    [models.Layer(f"layer{number}", ((f"layer{number}/kernel", 200_000),), 1.0) for number in range(8)], 0.012
)


def test_a_row_has_the_times_of_the_counterexample() -> None:
    ends = {name: scaling.on_line(TWO_AND_ONE, COUNTEREXAMPLE, name) for name in scaling.BUCKETERS}
    assert ends["mgwfbp"].iteration_s == 9.0 and ends["optimal"].iteration_s == 8.0
    assert (ends["wfbp"].buckets, ends["single"].buckets) == (3, 1)
    row = ends["optimal"]
    assert (row.ready_s, row.predicted.begins_s, row.predicted.ends_s) == ((1.0, 4.0), (1.0, 4.0), (4.0, 8.0))
    assert (row.exposed_s, row.alone_s) == (4.0, 4.0)
    assert scaling.best(list(ends.values())) is row
    auto = scaling.on_line(TWO_AND_ONE, COUNTEREXAMPLE, "auto")
    assert (auto.bucketer, auto.predicted) == ("auto", row.predicted)


def test_speed_up_and_efficiency_count_samples_per_second() -> None:
    row = scaling.on_line(TWO_AND_ONE, COUNTEREXAMPLE, "optimal", ranks=16)
    assert (row.efficiency, row.speedup) == (0.5, 8.0)
    figures = row.as_json()
    assert (figures["ranks"], figures["iteration_seconds"], figures["speedup"]) == (16, 8.0, 8.0)


def test_an_update_comes_after_all_communication() -> None:
    times = StepTimes(COUNTEREXAMPLE.tensors, COUNTEREXAMPLE.ready_s, 0.0, update_s=1.0)
    row = scaling.on_line(TWO_AND_ONE, times, "optimal")
    assert (row.iteration_s, row.exposed_s, row.alone_s) == (9.0, 4.0, 5.0)


def test_rows_of_several_clusters_come_in_order() -> None:
    tree = cluster([2, 2], SHARED_MEMORY, ETHERNET)
    found = scaling.rows(tree, SMALL, ("wfbp", "optimal"), ("ring", "auto"), (2, 4, 8))
    asked = [(row.ranks, row.algorithm, row.bucketer) for row in found]
    assert asked == [(n, a, b) for n in (2, 4, 8) for a in ("ring", "auto") for b in ("wfbp", "optimal")]
    assert all(row.used == ("ring",) for row in found if row.algorithm == "ring")
    for row in found:
        assert row.iteration_s >= row.alone_s == SMALL.computed_s
        assert len(row.ready_s) == len(row.predicted.begins_s) == len(row.predicted.ends_s) == row.buckets
        assert all(begin >= ready for ready, begin in zip(row.ready_s, row.predicted.begins_s, strict=True))


def test_one_bucket_takes_its_price_after_back_propagation() -> None:
    tree = cluster([2, 2], SHARED_MEMORY, ETHERNET)
    row = scaling.on_cluster(tree, SMALL, "single", "ring")
    nbytes = sum(tensor.nbytes for tensor in SMALL.tensors)
    assert row.exposed_s == pytest.approx(planner.price(tree, "ring", nbytes).seconds, rel=0.05)


def test_unknown_names_and_ranks_are_refused() -> None:
    tree = cluster([2, 2], SHARED_MEMORY, ETHERNET)
    with pytest.raises(PlanError, match="bucketer 'largest': must be one of"):
        scaling.rows(tree, SMALL, ("largest",))
    with pytest.raises(PlanError, match="'circle'"):
        scaling.rows(tree, SMALL, ("single",), ("circle",))
    with pytest.raises(TopologyError, match=r"ranks \(5\): whole hosts"):
        scaling.rows(tree, SMALL, ("single",), ranks=(5,))


def test_4096_ranks_are_a_row_like_any_other() -> None:
    (row,) = scaling.rows(preset("commlib"), SMALL, ("optimal",), ("blueconnect",), (4096,))
    assert row.ranks == 4096 and row.iteration_s > SMALL.computed_s
