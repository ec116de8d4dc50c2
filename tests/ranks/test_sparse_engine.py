"""Sparse buckets through the engine's Python face and its ops, and every sparse schedule's sums and residuals."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.engine import native
from hvd_ext.engine.channels import TopKStatistics
from hvd_ext.errors import InvalidError
from hvd_ext.job import runtime
from hvd_ext.planning import planner, registry
from hvd_ext.planning.layout import BucketLayout, Layout, Selection
from hvd_ext.planning.lower import rows_of
from hvd_ext.planning.model import LogicalPlan
from hvd_ext.planning.sparse_planner import needs, sparse_plan
from hvd_ext.planning.tensors import Tensor
from hvd_ext.tensorflow import ops
from hvd_ext.topology.tree import Tree, from_hosts
from tests.unit.planning.interpreter import Floats, Ranks
from tests.unit.planning.test_sparse_plans import data_of

pytestmark = pytest.mark.ranks(1, 2, 3, 8)

ELEMENTS = 1000
DENSITY = 0.01


def open_channel(momentum: float | None = None) -> int:
    job = runtime.current()
    whole = planner.allreduce_plan(job.tree, nbytes=12).plan
    choice = sparse_plan(job.tree, "naive_allgather", 4 * ELEMENTS, DENSITY)
    selection = Selection(dense_above=1.0, momentum=momentum, value_wire="float16")
    buckets = (
        BucketLayout("float32", (0,), hvd.Sum, whole, 64),
        BucketLayout("float32", (1,), hvd.Sum, choice.plan, 64, selection=selection, dense=choice.dense),
    )
    return job.open("sparse", Layout((Tensor("dense", (3,), "float32"), Tensor("x", (ELEMENTS,), "float32")), buckets))


@pytest.fixture
def channel() -> Iterator[int]:
    handle = open_channel()
    yield handle
    runtime.current().engine.close_channel(handle)


def gradient(rank: int) -> np.ndarray:
    """Ten elements of one magnitude for each rank, the largest of its own, in places of its own."""
    x = np.ones(ELEMENTS, np.float32)
    x[rank * 10 : rank * 10 + 10] = 4096 + 1024 * rank
    return x


def test_what_is_selected_comes_back_summed_and_the_rest_is_kept(channel: int, rank: int, size: int) -> None:
    engine = runtime.current().engine
    inputs = [np.full(3, rank + 1, np.float32), gradient(rank)]
    outputs = [np.zeros_like(array) for array in inputs]
    engine.begin_topk_step(channel, DENSITY)
    engine.reduce(channel, inputs, outputs)
    engine.end_step(channel, True)
    alone = size == 1  # then everything is its own, and nothing is selected
    wanted = np.full(ELEMENTS, float(alone), np.float32)
    for other in range(size):
        wanted[other * 10 : other * 10 + 10] = 4096 + 1024 * other
    np.testing.assert_array_equal(outputs[0], np.full(3, size * (size + 1) / 2, np.float32))
    np.testing.assert_array_equal(outputs[1], wanted)
    assert engine.state(channel, 1) == (0, ELEMENTS, False)
    left = np.full(ELEMENTS, float(not alone), np.float32)
    left[rank * 10 : rank * 10 + 10] = 0
    np.testing.assert_array_equal(engine.read_state(channel, 1), left)
    peers = size - 1
    seen = engine.topk_statistics(channel)
    assert seen == TopKStatistics(10 * peers, 20 * peers, seen.index_bytes, 32 * peers, 1, 0)
    assert 10 * peers <= seen.index_bytes <= 11 * peers  # gaps of 0 in a byte each


def test_the_ops_begin_and_end_a_step_and_a_dropped_one_leaves_no_trace(channel: int, rank: int, size: int) -> None:
    engine = runtime.current().engine
    for ok in (False, True):
        ops.begin_topk_step(tf.constant(1.0, tf.float64), channel=channel)
        given = [np.full(3, rank + 1, np.float32), gradient(rank)]
        tickets = [ops.submit([tf.constant(x)], channel=channel, tensors=[i]) for i, x in enumerate(given)]
        (seen,) = ops.collect(tickets[1:], "float32", [[ELEMENTS]], channel=channel, tensors=[1])
        ops.collect(tickets[:1], "float32", [[3]], channel=channel, tensors=[0])
        np.testing.assert_array_equal(seen, sum(gradient(other) for other in range(size)))
        ops.end_step(tf.constant(ok), channel=channel)
    statistics = engine.topk_statistics(channel)
    assert (statistics.committed, statistics.dropped) == (1, 1)


def test_wrong_uses_are_refused_and_the_next_step_works(channel: int) -> None:
    engine = runtime.current().engine
    with pytest.raises(InvalidError, match="begin_topk_step"):
        native.call("hvd_ext_channel_begin_step", channel)
    with pytest.raises(InvalidError, match="density"):
        engine.begin_topk_step(channel, 1.5)
    for momentum in (1.0, -0.5, float("nan")):
        with pytest.raises(InvalidError, match="momentum .* must be in"):
            engine.begin_topk_step(channel, DENSITY, momentum)
    with pytest.raises(tf.errors.InvalidArgumentError, match="at most one scalar"):
        ops.begin_topk_step(tf.constant(1.0, tf.float64), channel, [tf.constant(0.5)] * 2)
    with pytest.raises(InvalidError, match="no top-k step is under way"):
        engine.end_step(channel, True)
    with pytest.raises(InvalidError, match="bucket 0 of 'sparse' is not sparse"):
        engine.state(channel, 0)
    with pytest.raises(InvalidError, match="it has no velocity"):
        engine.read_state(channel, 1, 1)
    for wrong in (np.zeros(ELEMENTS - 1, np.float32), np.zeros(ELEMENTS), np.zeros((ELEMENTS, 2), np.float32)[:, 0]):
        with pytest.raises(InvalidError, match="contiguous array of 1000 elements of float32"):
            engine.write_state(channel, 1, 0, wrong)
    engine.begin_topk_step(channel, DENSITY)
    with pytest.raises(InvalidError, match="a step is under way"):
        engine.read_state(channel, 1)
    engine.end_step(channel, False)


@pytest.mark.parametrize("of_the_step", ["", "engine", "op"])
def test_what_was_set_is_sent_and_kept_apart_from_the_velocity(of_the_step: str, rank: int, size: int) -> None:
    engine = runtime.current().engine
    channel = open_channel(momentum=0.5)
    residual = np.zeros(ELEMENTS, np.float32)
    residual[500] = 2.0**10
    velocity = np.zeros(ELEMENTS, np.float32)
    velocity[501] = 2.0 ** (5 + rank)
    engine.write_state(channel, 1, 0, residual)
    engine.write_state(channel, 1, 1, velocity)
    out = np.empty(ELEMENTS, np.float32)
    assert engine.read_state(channel, 1, 1, out) is out
    np.testing.assert_array_equal(out, velocity)
    x = [np.zeros(3, np.float32), np.zeros(ELEMENTS, np.float32)]
    if of_the_step == "op":
        ops.begin_topk_step(tf.constant(0.002, tf.float64), channel, [tf.constant(0.25)])
    else:
        engine.begin_topk_step(channel, 0.002, 0.25 if of_the_step else None)
    engine.reduce(channel, x, x)
    engine.end_step(channel, True)
    assert x[1][500] == size * 2.0**10
    assert x[1][501] == sum(2.0 ** ((3 if of_the_step else 4) + other) for other in range(size))
    assert not engine.read_state(channel, 1, 0).any()
    # What was selected loses its velocity; of a rank alone nothing is selected.
    assert engine.read_state(channel, 1, 1).any() == (size == 1)
    engine.close_channel(channel)


PRIME = 1013
DENSITIES = (0.05, 0.3, 1.0, 0.02)  # the third step takes the dense plan


def clusters(size: int) -> list[Tree]:
    """Two uneven hosts, and three with their ranks dealt out; of few ranks also one host, and a rank a host."""
    names = ["a" + "b" * (size - 1), "abcbcacb"[:size]]
    names += ["a" * size, "abcd"[:size]] if size <= 4 else []
    return [from_hosts(list(hosts)) for hosts in dict.fromkeys(names)]


def wanted(plans: list[LogicalPlan], data: Floats) -> list[Ranks]:
    """The interpreter's ranks after each step; their residuals go on."""
    steps: list[Ranks] = []
    for step, density in enumerate(DENSITIES):
        plan = plans[density == 1.0]
        ranks = Ranks([rows_of(plan, rank) for rank in range(plan.size)], plan.units, data * (step + 1), density)
        if steps:
            ranks.residuals = steps[-1].residuals.copy()
        ranks.run(step)
        steps.append(ranks)
    return steps


@pytest.mark.parametrize("name", registry.sparse_names())
def test_results_and_residuals_are_those_of_the_rows(name: str, rank: int, size: int) -> None:
    schedule, job = registry.sparse(name), runtime.current()
    for tree in clusters(size):
        data = data_of(size, PRIME)
        for plan in (plan for plan in schedule.variants(tree) if needs(plan) <= hvd.TopK.rows):
            dense = schedule.dense(tree)
            selection = Selection(dense_above=0.9)
            bucket = BucketLayout("float32", (0,), hvd.Sum, plan, 4 * PRIME, selection=selection, dense=dense)
            channel = job.open(f"{name} {plan.note}", Layout((Tensor("x", (PRIME,), "float32"),), (bucket,)))
            for step, ranks in enumerate(wanted([plan, dense], data)):
                x = (data[rank] * (step + 1)).astype(np.float32)
                job.engine.begin_topk_step(channel, DENSITIES[step])
                job.engine.reduce(channel, [x], [x])
                job.engine.end_step(channel, commit=True)
                np.testing.assert_array_equal(x, ranks.data[rank])
                kept = job.engine.state(channel, 0)
                mine = ranks.residuals[rank, kept.begin : kept.begin + kept.elements]
                np.testing.assert_array_equal(job.engine.read_state(channel, 0), mine)
                assert np.count_nonzero(ranks.residuals[rank]) == np.count_nonzero(mine)
            job.engine.close_channel(channel)
