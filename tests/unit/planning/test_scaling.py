"""Rows of a simulation: their times and their efficiency; and what a step would take if something were changed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hvd_ext.planning import models, planner, scaling, what_if
from hvd_ext.planning.cost import lane
from hvd_ext.planning.step_times import StepTimes
from hvd_ext.planning.tensors import Tensor
from hvd_ext.topology.presets import cluster, preset
from hvd_ext.topology.tree import ETHERNET, SHARED_MEMORY, Link, from_hosts

# MG-WFBP's Theorem 1 fails here: backward times (1, 1, 2), sizes (1, 1, 1), a = 2, b = 1
COUNTEREXAMPLE = StepTimes(tuple(Tensor(name, (1,), "float32") for name in "abc"), (4.0, 2.0, 1.0))
TWO_AND_ONE = lane.line(2.0, 0.25)  # 1 second for the 4 bytes of a tensor
SMALL = models.step_times(
    [models.Layer(f"layer{number}", ((f"layer{number}/kernel", 200_000),), 1.0) for number in range(8)], 0.012
)
LAYERS = [models.Layer(f"layer{number}", ((f"layer{number}/kernel", 1_000_000),), 1.0) for number in range(6)]
TIMES = models.step_times(LAYERS, 0.03)
SLOW = Link(ETHERNET.alpha_s, 10 * ETHERNET.beta_s_per_byte)
NAMES = [
    "as it is",
    "links between hosts 2 times as fast",
    "links between hosts 10 times as fast",
    "one host more",
    "TopK(0.01)",
    *(f"Quantized(bits={bits})" for bits in (8, 4, 1)),
    'compression="auto"',
    "half precision on the wire",
    *(f"LocalSteps(every={every}){codec}" for codec in ("", ", Quantized(bits=4)") for every in (16, 64)),
    "updates one step late",
    "gathers behind the next forward pass",
]


def test_a_row_has_the_times_of_the_counterexample() -> None:
    ends = {name: scaling.on_line(TWO_AND_ONE, COUNTEREXAMPLE, name) for name in scaling.BUCKETERS}
    assert ends["mgwfbp"].iteration_s == 9.0 and ends["optimal"].iteration_s == 8.0
    assert (ends["wfbp"].buckets, ends["single"].buckets) == (3, 1)
    row = ends["optimal"]
    found = row.predicted
    assert (found.ready_s, found.begins_s, found.ends_s) == ((1.0, 4.0), (1.0, 4.0), (4.0, 8.0))
    assert (row.exposed_s, row.alone_s, row.efficiency) == (4.0, 4.0, 0.5)
    assert scaling.best(list(ends.values())) is row
    auto = scaling.on_line(TWO_AND_ONE, COUNTEREXAMPLE, "auto")
    assert (auto.bucketer, auto.predicted) == ("auto", row.predicted)


def test_an_update_comes_after_all_communication() -> None:
    times = StepTimes(COUNTEREXAMPLE.tensors, COUNTEREXAMPLE.ready_s, 0.0, update_s=1.0)
    row = scaling.on_line(TWO_AND_ONE, times, "optimal")
    assert (row.iteration_s, row.exposed_s, row.alone_s) == (9.0, 4.0, 5.0)


def test_one_bucket_takes_its_price_after_back_propagation() -> None:
    tree = cluster([2, 2], SHARED_MEMORY, ETHERNET)
    row = scaling.on_cluster(tree, SMALL, "single", "ring")
    nbytes = sum(tensor.nbytes for tensor in SMALL.tensors)
    assert row.exposed_s == pytest.approx(planner.price(tree, "ring", nbytes).seconds, rel=0.05)


def test_4096_ranks_are_a_row_like_any_other() -> None:
    (row,) = scaling.rows(preset("commlib"), SMALL, ("optimal",), ("blueconnect",), (4096,))
    assert row.ranks == 4096 and row.iteration_s > SMALL.computed_s


def test_every_change_is_priced_and_the_best_is_named() -> None:
    found = what_if.on_a_cluster(cluster([2, 2], SHARED_MEMORY, SLOW), TIMES, ("single", "optimal"))
    assert [change.name for change in found] == NAMES
    gains = {change.name: change.gain for change in found}
    assert gains["as it is"] == 1.0
    assert 1.0 < gains[NAMES[1]] < gains[NAMES[2]] < 10.0
    assert gains["TopK(0.01)"] > 1.5 and 1.2 < gains["half precision on the wire"] < 2.0
    assert 1.0 < gains["Quantized(bits=8)"] < gains["Quantized(bits=4)"]
    assert gains['compression="auto"'] >= 0.94 * gains["Quantized(bits=8)"]
    local = [gains[name] for name in NAMES if name.startswith("LocalSteps")]
    assert gains["half precision on the wire"] < local[0] < min(local[1:3]) and max(local[1:3]) < local[3]
    assert gains["updates one step late"] > 1.0 and gains["gathers behind the next forward pass"] >= 1.0
    assert what_if.winner(found).gain == max(gains.values())
    more = next(change for change in found if change.name == "one host more")
    assert more.row is not None and more.row.ranks == 6
    assert all(change.as_json()["what_if"] == change.name for change in found)


def test_local_steps_share_an_outer_step_that_waits_for_all_bytes() -> None:
    """Hosts of one rank send nothing between outer steps; on uneven hosts the one with more ranks is awaited."""
    tree = cluster([1, 1], SHARED_MEMORY, SLOW)
    found = {change.name: change for change in what_if.on_a_cluster(tree, TIMES, ("single",))}
    alone_s = TIMES.computed_s + (TIMES.update_s or 0.0)
    (whole,) = scaling.rows(tree, TIMES, ("single",))
    local = found["LocalSteps(every=16)"]
    assert local.iteration_s == pytest.approx(alone_s + whole.exposed_s / 16, rel=0.01)
    assert local.row is not None and local.row.ranks == 2
    assert local.gain == pytest.approx(whole.iteration_s / local.iteration_s)
    uneven = cluster([2, 1], SHARED_MEMORY, SLOW)
    (inside,) = scaling.rows(uneven.subset([0, 1]), TIMES, ("single",))
    changes = {change.name: change for change in what_if.on_a_cluster(uneven, TIMES, ("single",))}
    assert inside.exposed_s > 0
    assert changes["LocalSteps(every=64)"].iteration_s > inside.iteration_s


def test_what_cannot_be_priced_says_why() -> None:
    found = {change.name: change for change in what_if.on_a_cluster(from_hosts(["a"] * 4), TIMES, ("single",))}
    assert found[NAMES[1]].why_not == "there is one host" and found[NAMES[1]].gain == 0
    assert found["LocalSteps(every=64)"].why_not == "there is one host"
    assert "says nothing of a link to others" in found["one host more"].why_not
    assert found["one host more"].as_json() == {"what_if": "one host more", "why_not": found["one host more"].why_not}
    line = {change.name: change for change in what_if.on_a_line(lane.line(1e-3, 1e-9), TIMES)}
    assert line["one host more"].row is None and line["TopK"].row is None


def test_faster_links_are_those_between_hosts() -> None:
    tree = cluster([2] * 4, SHARED_MEMORY, ETHERNET, racks=2)
    rack = replace(tree.root.children[0], port=SLOW)
    quick = what_if.faster(replace(tree, root=replace(tree.root, children=(rack, tree.root.children[1]))), 10).root
    assert quick.link.beta_s_per_byte == pytest.approx(tree.root.link.beta_s_per_byte / 10)
    assert quick.children[0].link.beta_s_per_byte == pytest.approx(ETHERNET.beta_s_per_byte / 10)
    assert quick.children[0].port == replace(SLOW, beta_s_per_byte=ETHERNET.beta_s_per_byte)
    assert quick.children[0].children[0].link == SHARED_MEMORY
    assert quick.link.alpha_s == tree.root.link.alpha_s


def test_a_late_update_hides_communication_behind_the_whole_step() -> None:
    """Six allreduces of 4 ms + 1 ms take 30 ms, one of 6 x 4 ms + 1 ms takes 25 ms, and a step computes for 30."""
    found = what_if.on_a_line(lane.line(1e-3, 1e-9), TIMES, ("wfbp", "single"))
    late = found[-2]
    assert late.name == "updates one step late" and late.iteration_s == pytest.approx(TIMES.computed_s)
    slower = what_if.on_a_line(lane.line(1e-3, 2e-9), TIMES, ("wfbp", "single"))[-2]
    assert slower.iteration_s == pytest.approx(1e-3 + 2e-9 * 24e6)
    assert slower.row is not None and slower.row.bucketer == "single"


def test_gathers_hide_behind_the_next_forward_pass() -> None:
    """Two layers: forward 1 + 1, backward 2 + 2, an allreduce takes 2 a layer, of which each half takes 1.

    The reductions end at 5 (the last layer's) and 7 (the first layer's). The gathers of the first and the last layer
    end at 8 and 9; the next forward pass begins at 8 and ends at 10, 8 after the one before.
    """
    times = StepTimes(tuple(Tensor(name, (1,), "float32") for name in "ab"), (6.0, 4.0), 2.0)
    half = lane.line(1.0, 0.0)
    row = scaling.on_line(half, times, "wfbp")
    assert row.predicted.ends_s == (5.0, 7.0)
    assert what_if.gathered_s(row, half) == pytest.approx(8.0)
