"""Sparse training equals a model of all ranks in NumPy, bit for bit, and loses nothing."""

from __future__ import annotations

import logging
from typing import Any

import keras
import numpy as np
import pytest

import hvd_ext as hvd
from hvd_ext.compression.density import Auto
from hvd_ext.keras.optimizers.optimizer import channels
from hvd_ext.tensorflow.topk import auto_density
from tests.ranks.compare import assert_close, assert_equal
from tests.ranks.conftest import LAUNCHED_SIZE
from tests.ranks.topk_jobs import (
    OPTIONS,
    Beside,
    apply,
    averaged,
    gradients,
    nothing,
    step_of,
    variables,
)
from tests.ranks.training import assert_same_bits_on_all_ranks, policy_of, values

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("apart")]

STEPS = 4
WHOLE = {**OPTIONS, "density": 1.0}

# hosts of several ranks, and uneven ones, are shown by the first two tests
same_on_any_number = pytest.mark.skipif(LAUNCHED_SIZE > 2, reason="the same on any number of ranks")


def beside(options: hvd.TopK, *more: Any, **sgd: Any) -> Beside:
    return Beside(options, *more, model={"masks": options.masks, "wire": options.wire}, **sgd)


@pytest.mark.parametrize("wire", ["fp32", "fp16"])
def test_topk_steps_are_those_of_the_model_and_nothing_is_lost(wire: str) -> None:
    tried = beside(hvd.TopK(**{**OPTIONS, "wire": wire}))
    tried.train(0, STEPS)
    (channel,) = channels(tried.optimizer)
    # the vector of 7 elements travels whole, in a bucket of its own
    assert sorted(sorted(bucket.tensors) for bucket in channel.layout.buckets) == [[0, 2], [1]]
    assert all((bucket.selection is None) == (len(bucket.tensors) == 1) for bucket in channel.layout.buckets)
    selections = [bucket.selection for bucket in channel.layout.buckets if bucket.selection is not None]
    assert hvd.size() == 1 or max(one.dense_above for one in selections) > 0.125
    # what was applied and what waits are what was given
    applied = -sum(weight.astype(np.float64).sum() for weight in values(tried.weights)) * hvd.size()
    given, waiting = sum(total.astype(np.float64).sum() for total in tried.expected.sums), tried.expected.waiting()
    assert applied + waiting == pytest.approx(given, abs=1e-3 if hvd.size() not in (1, 2, 4, 8) else 0)
    assert hvd.size() == 1 or waiting != 0


@pytest.mark.parametrize(("nesterov", "masks"), [(True, True), (True, False), (False, True)])
def test_a_momentum_that_is_taken_over_acts_on_the_shares(nesterov: bool, masks: bool) -> None:
    options = hvd.TopK(**OPTIONS, momentum_correction=True, masks=masks)
    tried = beside(options, momentum=0.5, nesterov=nesterov)
    tried.train(0, STEPS)
    assert tried.optimizer.get_config()["momentum"] == 0.5
    assert not any(np.any(slot.numpy()) for slot in tried.optimizer.momentums)


@same_on_any_number
@pytest.mark.parametrize("nesterov", [False, True])
def test_a_gradient_keeps_the_learning_rate_of_its_step_as_keras_has_it(nesterov: bool) -> None:
    # it begins at 0, and rises and falls steeply
    rate = keras.optimizers.schedules.CosineDecay(0.0, 4, 0.0, warmup_target=0.5, warmup_steps=3)
    plain, ours = (keras.optimizers.SGD(rate, momentum=0.5, nesterov=nesterov) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(ours, compression=hvd.TopK(**WHOLE, momentum_correction=True))
    weights, reference = variables(), variables()
    step = step_of(optimizer, weights, traced=nesterov)
    for number in range(7):
        step(gradients(hvd.rank(), number))
        plain.apply(averaged(number), reference)
        assert_close(weights, reference, rtol=1e-5, atol=1e-5)


@same_on_any_number
def test_passes_that_are_added_up_go_through_the_momentum_once() -> None:
    settings = {"momentum": 0.5, "nesterov": True, "gradient_accumulation_steps": 2}
    plain, ours = keras.optimizers.SGD(1.0, **settings), keras.optimizers.SGD(1.0, **settings)
    optimizer = hvd.DistributedOptimizer(ours, compression=hvd.TopK(**WHOLE, momentum_correction=True))
    weights, reference = variables(), variables()
    step = step_of(optimizer, weights)
    for number in range(6):
        # the second update is left out, with both passes
        step([part * np.float32(np.nan if number == 3 else 1) for part in gradients(hvd.rank(), number)])
        if number not in (2, 3):
            plain.apply(averaged(number), reference)
    assert_close(weights, reference)
    assert not any(np.any(slot.numpy()) for slot in ours.momentums)


@same_on_any_number
def test_a_warm_up_goes_from_dense_to_sparse_and_a_flush_sends_what_waits() -> None:
    warmup = hvd.Warmup(2, densities=(1.0, 0.25))
    options = hvd.TopK(0.0625, vectors=True, min_elements=1, wire="fp32", warmup=warmup)
    tried = beside(options, lambda step: [1.0, 0.25, 0.0625, 0.0625, 1.0, 0.0625][step])
    tried.train(0, 4)
    assert hvd.size() == 1 or tried.expected.waiting() != 0
    hvd.flush(tried.optimizer)
    tried.train(4, 5)
    assert tried.expected.waiting() == 0
    tried.train(5, 6)
    assert hvd.size() == 1 or tried.expected.waiting() != 0


@same_on_any_number
def test_a_clip_looks_at_each_ranks_own_gradients() -> None:
    limit, topk = 8.0, {**OPTIONS, "density": 0.25}
    clipped, plain = variables(), variables()
    first = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=hvd.TopK(clip=limit, **topk))
    second = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=hvd.TopK(**topk))
    for step in range(2):
        own = gradients(hvd.rank(), step)
        norm = np.sqrt(sum(float((one.astype(np.float64) ** 2).sum()) for one in own))
        assert norm > limit
        apply(first, own, clipped)
        apply(second, [part * np.float32(limit / np.sqrt(hvd.size()) / norm) for part in own], plain)
    assert_close(clipped, plain)


@same_on_any_number
@pytest.mark.parametrize("traced", [False, True])
def test_a_step_that_is_not_finite_leaves_no_trace(traced: bool) -> None:
    options = hvd.TopK(**OPTIONS, momentum_correction=True)
    made = [keras.optimizers.SGD(1.0, momentum=0.5) for _ in range(2)]
    optimizer, other = (hvd.DistributedOptimizer(one, compression=options) for one in made)
    weights, reference = variables(), variables()
    step = step_of(optimizer, weights, traced)
    for number in range(3):
        own = gradients(hvd.rank(), number)
        if number == 1:
            before = values(weights)
            for tensor in range(len(own)):
                bad = [one.copy() for one in own]
                if hvd.rank() == hvd.size() - 1:
                    bad[tensor].reshape(-1)[-1] = np.inf if tensor else np.nan
                step(bad)
            assert_equal(weights, before)
        step(own)
        apply(other, own, reference)
    assert_equal(weights, reference)
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
    for step in range(2):
        apply(optimizer, gradients(hvd.rank(), step), weights)
    hvd.flush(optimizer)
    apply(optimizer, nothing(), weights)
    assert_close(weights, [-first - second for first, second in zip(averaged(0), averaged(1), strict=True)])
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
    step = step_of(optimizer, weights, traced="momentum" in sgd)
    densities = []
    with caplog.at_level(logging.INFO, "hvd_ext"):
        for number in range(8):
            step([part * np.float32(5 if number >= 6 else 1) for part in gradients(hvd.rank(), 0)])
            densities.append(float(policy_of(optimizer).feedback.density(channels(optimizer)[-1])))
    # the first window decides nothing, the second has the same norm, and the last a larger one
    assert densities == [1.0, 1.0, 1.0, 0.0625, 0.0625, *densities[5:7], 1.0]
    assert hvd.allgather_object(densities) == [densities] * hvd.size()
    if hvd.rank() == 0:
        assert "density 0.0625 from now on, it was 1: the norm of the gradients over 2 steps" in caplog.text
