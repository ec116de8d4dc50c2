"""What a step would take if something were changed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hvd_ext.errors import PlanError
from hvd_ext.planning import models, scaling, what_if
from hvd_ext.planning.cost import lane
from hvd_ext.planning.step_times import StepTimes
from hvd_ext.planning.tensors import Tensor
from hvd_ext.topology.presets import cluster
from hvd_ext.topology.tree import ETHERNET, SHARED_MEMORY, Link, from_hosts

LAYERS = [models.Layer(f"layer{number}", ((f"layer{number}/kernel", 1_000_000),), 1.0) for number in range(6)]
TIMES = models.step_times(LAYERS, 0.03)
SLOW = Link(ETHERNET.alpha_s, 10 * ETHERNET.beta_s_per_byte)
NAMES = [
    "as it is",
    "links between hosts 2 times as fast",
    "links between hosts 10 times as fast",
    "one host more",
    "TopK(0.01)",
    "half precision on the wire",
    "updates one step late",
    "gathers behind the next forward pass",
]


def test_every_change_is_priced_and_the_best_is_named() -> None:
    found = what_if.on_a_cluster(cluster([2, 2], SHARED_MEMORY, SLOW), TIMES, ("single", "optimal"))
    assert [change.name for change in found] == NAMES
    gains = {change.name: change.gain for change in found}
    assert gains["as it is"] == 1.0
    assert 1.0 < gains[NAMES[1]] < gains[NAMES[2]] < 10.0
    assert gains["TopK(0.01)"] > 1.5 and 1.2 < gains["half precision on the wire"] < 2.0
    assert gains["updates one step late"] > 1.0 and gains["gathers behind the next forward pass"] >= 1.0
    assert what_if.winner(found).gain == max(gains.values())
    more = next(change for change in found if change.name == "one host more")
    assert more.row is not None and more.row.ranks == 6
    assert all(change.as_json()["what_if"] == change.name for change in found)


def test_what_cannot_be_priced_says_why() -> None:
    found = {change.name: change for change in what_if.on_a_cluster(from_hosts(["a"] * 4), TIMES, ("single",))}
    assert found[NAMES[1]].why_not == "there is one host" and found[NAMES[1]].gain == 0
    assert "says nothing of a link to others" in found["one host more"].why_not
    assert found["one host more"].as_json() == {"what_if": "one host more", "why_not": found["one host more"].why_not}
    line = {change.name: change for change in what_if.on_a_line(lane.line(1e-3, 1e-9), TIMES)}
    assert line["one host more"].row is None and line["TopK"].row is None
    with pytest.raises(PlanError, match="bucketer 'largest'"):
        what_if.on_a_cluster(cluster([2, 2], SHARED_MEMORY, SLOW), TIMES, ("largest",))


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
