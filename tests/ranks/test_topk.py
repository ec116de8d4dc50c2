"""Sparse training equals a model of all ranks in NumPy, bit for bit, and loses nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.compression.density import Auto
from hvd_ext.keras.optimizers.optimizer import channels
from hvd_ext.tensorflow.topk import auto_density
from tests.ranks.conftest import LAUNCHED_SIZE
from tests.ranks.topk_jobs import SHAPES, Expected, apply, gradients, hosts_of, restart, variables
from tests.ranks.training import assert_same_bits_on_all_ranks, values

STEPS = 4

# hosts of several ranks, and uneven ones, are shown by the first two tests
same_on_any_number = pytest.mark.skipif(LAUNCHED_SIZE > 2, reason="the same on any number of ranks")


@pytest.fixture(autouse=True, scope="module")
def apart(hvd: Any) -> Iterator[None]:
    """Two hosts that are far apart; a job of one rank has one."""
    restart(hosts_of(hvd.size()))
    yield
    hvd.shutdown()


def trained(
    options: hvd.TopK, density: Any, algorithm: str | None = None, **sgd: Any
) -> tuple[keras.optimizers.Optimizer, Expected, list[keras.Variable]]:
    """Train beside the model, and compare after every step."""
    model = {"momentum": sgd.get("momentum", 0.0), "nesterov": sgd.get("nesterov", False)}
    model |= {"masks": options.masks, "wire": options.wire}
    weights = variables()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0, **sgd), compression=options, algorithm=algorithm, check_every=2
    )
    expected = None
    for step in range(STEPS):
        every = [gradients(rank, step) for rank in range(hvd.size())]
        apply(optimizer, every[hvd.rank()], weights)
        expected = expected or Expected(optimizer, hosts_of(hvd.size()), **model)
        expected.step(every, density(step) if callable(density) else density)
        for got, wanted in zip(values(weights), expected.weights, strict=True):
            np.testing.assert_array_equal(got, wanted)
    assert_same_bits_on_all_ranks(weights)
    return optimizer, expected, weights


@pytest.mark.parametrize("wire", ["fp32", "fp16"])
def test_topk_steps_are_those_of_the_model_and_nothing_is_lost(wire: str) -> None:
    options = hvd.TopK(0.125, min_elements=10, wire=wire)
    optimizer, expected, weights = trained(options, 0.125)
    (channel,) = channels(optimizer)
    # the vector of 7 elements travels whole, in a bucket of its own
    assert sorted(sorted(bucket.tensors) for bucket in channel.layout.buckets) == [[0, 2], [1]]
    assert all((bucket.selection is None) == (len(bucket.tensors) == 1) for bucket in channel.layout.buckets)
    selections = [bucket.selection for bucket in channel.layout.buckets if bucket.selection is not None]
    assert hvd.size() == 1 or max(one.dense_above for one in selections) > 0.125
    # what was applied and what waits are what was given
    applied = -sum(weight.astype(np.float64).sum() for weight in values(weights)) * hvd.size()
    given = sum(total.astype(np.float64).sum() for total in expected.sums)
    assert applied + expected.waiting() == pytest.approx(given, abs=1e-3 if hvd.size() not in (1, 2, 4, 8) else 0)
    assert hvd.size() == 1 or expected.waiting() != 0


@pytest.mark.parametrize(("nesterov", "masks"), [(True, True), (True, False), (False, True)])
def test_a_momentum_that_is_taken_over_acts_on_the_shares(nesterov: bool, masks: bool) -> None:
    options = hvd.TopK(0.125, min_elements=10, wire="fp32", momentum_correction=True, masks=masks)
    optimizer, _, _ = trained(options, 0.125, momentum=0.5, nesterov=nesterov)
    assert optimizer.get_config()["momentum"] == 0.5
    assert all(not np.any(slot.numpy()) for slot in optimizer.momentums)


@same_on_any_number
@pytest.mark.parametrize("nesterov", [False, True])
def test_a_gradient_keeps_the_learning_rate_of_its_step_as_keras_has_it(nesterov: bool) -> None:
    options = hvd.TopK(1.0, min_elements=10, wire="fp32", momentum_correction=True)
    # it begins at 0, and rises and falls steeply
    schedules = keras.optimizers.schedules
    rate = schedules.CosineDecay(0.0, 4, 0.0, warmup_target=0.5, warmup_steps=3)
    plain, ours = (keras.optimizers.SGD(rate, momentum=0.5, nesterov=nesterov) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(ours, compression=options)
    weights, reference = variables(), variables()
    traced = tf.function(lambda *own: optimizer.apply(list(own), weights), autograph=False)
    for number in range(7):
        traced(*[tf.constant(one) for one in gradients(hvd.rank(), number)])
        every = [gradients(rank, number) for rank in range(hvd.size())]
        plain.apply([sum(parts) / np.float32(hvd.size()) for parts in zip(*every, strict=True)], reference)
        for got, wanted in zip(values(weights), values(reference), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@same_on_any_number
def test_passes_that_are_added_up_go_through_the_momentum_once() -> None:
    options = hvd.TopK(1.0, min_elements=10, wire="fp32", momentum_correction=True)
    settings = {"momentum": 0.5, "nesterov": True, "gradient_accumulation_steps": 2}
    plain, ours = keras.optimizers.SGD(1.0, **settings), keras.optimizers.SGD(1.0, **settings)
    optimizer = hvd.DistributedOptimizer(ours, compression=options)
    weights, reference = variables(), variables()
    traced = tf.function(lambda *own: optimizer.apply(list(own), weights), autograph=False)
    for number in range(6):
        own = [tf.constant(one) for one in gradients(hvd.rank(), number)]
        traced(
            *[one * np.nan for one in own] if number == 3 else own
        )  # the second update is left out, with both passes
        if number not in (2, 3):
            every = [gradients(rank, number) for rank in range(hvd.size())]
            plain.apply([sum(parts) / np.float32(hvd.size()) for parts in zip(*every, strict=True)], reference)
    for got, wanted in zip(values(weights), values(reference), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
    assert not any(np.any(slot.numpy()) for slot in ours.momentums)


@same_on_any_number
def test_a_warm_up_goes_from_dense_to_sparse_and_a_flush_sends_what_waits() -> None:
    warmup = hvd.Warmup(2, densities=(1.0, 0.25))
    options = hvd.TopK(0.0625, vectors=True, min_elements=1, wire="fp32", warmup=warmup)
    optimizer, expected, weights = trained(options, lambda step: [1.0, 0.25, 0.0625, 0.0625][step])
    assert hvd.size() == 1 or expected.waiting() != 0
    hvd.flush(optimizer)
    for step, density in ((4, 1.0), (5, 0.0625)):
        every = [gradients(rank, step) for rank in range(hvd.size())]
        apply(optimizer, every[hvd.rank()], weights)
        expected.step(every, density)
        for got, wanted in zip(values(weights), expected.weights, strict=True):
            np.testing.assert_array_equal(got, wanted)
        assert (expected.waiting() == 0) == (density == 1.0 or hvd.size() == 1)


@same_on_any_number
def test_a_clip_looks_at_each_ranks_own_gradients() -> None:
    limit = 8.0
    clipped, plain = variables(), variables()
    topk = {"min_elements": 10, "wire": "fp32", "density": 0.25}
    first = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=hvd.TopK(clip=limit, **topk))
    second = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=hvd.TopK(**topk))
    for step in range(2):
        own = gradients(hvd.rank(), step)
        norm = np.sqrt(sum(float((one.astype(np.float64) ** 2).sum()) for one in own))
        assert norm > limit
        apply(first, own, clipped)
        apply(second, [one * np.float32(limit / np.sqrt(hvd.size()) / norm) for one in own], plain)
    for got, wanted in zip(values(clipped), values(plain), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@same_on_any_number
@pytest.mark.parametrize("traced", [False, True])
def test_a_step_that_is_not_finite_leaves_no_trace(traced: bool) -> None:
    options = hvd.TopK(0.125, min_elements=10, wire="fp32", momentum_correction=True)
    made = [keras.optimizers.SGD(1.0, momentum=0.5) for _ in range(2)]
    optimizer, other = (hvd.DistributedOptimizer(one, compression=options) for one in made)
    weights, reference = variables(), variables()

    def step(*own: tf.Tensor) -> None:
        optimizer.apply(list(own), weights)

    step = tf.function(step, autograph=False) if traced else step
    for number in range(3):
        own = gradients(hvd.rank(), number)
        if number == 1:
            before = values(weights)
            for tensor in range(len(SHAPES)):
                bad = [one.copy() for one in own]
                if hvd.rank() == hvd.size() - 1:
                    bad[tensor].reshape(-1)[-1] = np.inf if tensor else np.nan
                step(*[tf.constant(one) for one in bad])
            for got, wanted in zip(values(weights), before, strict=True):
                np.testing.assert_array_equal(got, wanted)
        step(*[tf.constant(one) for one in own])
        apply(other, own, reference)
    for got, wanted in zip(values(weights), values(reference), strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert int(optimizer.iterations.numpy()) == 3


@same_on_any_number
@pytest.mark.parametrize(
    ("algorithm", "chosen"),
    [
        ("naive_allgather", {"wire": "fp32"}),
        ("gtopk", {"wire": "fp32"}),
        ("hitopk", {"wire": "fp32", "height": 2}),
        ("hitopk", {"wire": "fp32", "height": None}),
        ("hitopk", {"wire": "bf16", "indices": "bitmap", "per_tensor": True}),
        ("hitopk", {"wire": "fp16", "indices": "delta", "selector": "mstopk", "samplings": 10}),
        ("hitopk", {"wire": "fp32", "indices": "int32", "selector": "dgc"}),
        ("hitopk", {"selector": "threshold", "threshold": 1.5}),
        ("hitopk", {"selector": "random", "seed": 3}),
    ],
)
def test_every_way_to_send_sends_in_time_all_that_it_was_given(algorithm: str, chosen: dict[str, Any]) -> None:
    options = hvd.TopK(0.25, min_elements=10, **chosen)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=options, algorithm=algorithm)
    weights = variables()
    total = [np.zeros(shape, np.float64) for shape in SHAPES]
    for step in range(2):
        apply(optimizer, gradients(hvd.rank(), step), weights)
        for rank in range(hvd.size()):
            for one, gradient in zip(total, gradients(rank, step), strict=True):
                one += gradient
    hvd.flush(optimizer)
    apply(optimizer, [np.zeros(shape, np.float32) for shape in SHAPES], weights)
    for got, wanted in zip(values(weights), total, strict=True):
        np.testing.assert_allclose(got, -wanted / hvd.size(), rtol=1e-5, atol=1e-6)
    assert_same_bits_on_all_ranks(weights)


@same_on_any_number
@pytest.mark.parametrize(
    "sgd",
    [
        {"learning_rate": 1.0},
        {"learning_rate": keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5), "momentum": 0.125},
    ],
)
def test_auto_follows_the_norm_and_not_the_rate_and_all_ranks_alike(
    sgd: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(auto_density, "Auto", lambda: Auto(window_steps=2, densities=(1.0, 0.0625)))
    weights = variables()
    options = hvd.TopK("auto", min_elements=10, wire="fp32")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(**sgd), compression=options)
    step = tf.function(lambda *own: optimizer.apply(list(own), weights), autograph=False)
    densities = []
    with caplog.at_level(logging.INFO, "hvd_ext"):
        for number in range(8):
            step(*[tf.constant(one * (5.0 if number >= 6 else 1.0)) for one in gradients(hvd.rank(), 0)])
            densities.append(float(optimizer._hvd_ext_reducer.sets[0].feedback.density(channels(optimizer)[-1])))
    # the first window decides nothing, the second has the same norm, and the last a larger one
    assert densities == [1.0, 1.0, 1.0, 0.0625, 0.0625, *densities[5:7], 1.0]
    assert hvd.allgather_object(densities) == [densities] * hvd.size()
    if hvd.rank() == 0:
        assert "density 0.0625 from now on, it was 1: the norm of the gradients over 2 steps" in caplog.text
