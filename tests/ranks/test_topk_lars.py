"""LARS whose momentum `TopK` takes over: its trust ratios have the gradients' norms of the step before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.keras.optimizers.momentum import OfLARS
from hvd_ext.tensorflow.gradients import kinds
from tests.ranks.conftest import LAUNCHED_SIZE
from tests.ranks.topk_jobs import OPTIONS, SHAPES, Expected, LateLARS, gradients, hosts_of, variables
from tests.ranks.training import assert_same_bits_on_all_ranks, data, fill, model, values

pytestmark = [
    pytest.mark.skipif(LAUNCHED_SIZE > 4, reason="the same on any number of ranks"),
    pytest.mark.usefixtures("apart"),
]

few = pytest.mark.skipif(LAUNCHED_SIZE > 2, reason="the same on any number of ranks")

MOMENTUM = keras.optimizers.schedules.PolynomialDecay(0.75, 8, 0.25)
DECAY, COEFFICIENT, RATE = 0.0625, 0.25, 0.5


def lars(kind: type = hvd.optimizers.LARS, **more: Any) -> keras.optimizers.Optimizer:
    given = {"trust_coefficient": COEFFICIENT, "weight_decay": DECAY, "exclude_from_trust": ["v1"], **more}
    return kind(RATE, MOMENTUM, parallel=False, exclude_from_weight_decay=["v2"], **given)


def filled() -> list[keras.Variable]:
    made = variables()
    fill(made)
    return made


@pytest.mark.parametrize("nesterov", [False, True], ids=["plain", "nesterov"])
def test_gradients_get_decay_and_rate_before_the_selection(nesterov: bool) -> None:
    weights, size = filled(), hvd.size()
    topk = hvd.TopK(**OPTIONS, momentum_correction=True)
    optimizer = hvd.DistributedOptimizer(lars(nesterov=nesterov), compression=topk)
    optimizer.build(weights)
    apply = tf.function(lambda *own: optimizer.apply(list(own), weights), autograph=False)
    expected, before = None, [0.0] * len(SHAPES)
    for number in range(7):
        own = [tf.constant(one) for one in gradients(hvd.rank(), number)]
        if number == 3:  # a step that is skipped measures nothing
            apply(*[one * (np.nan if hvd.rank() == size - 1 else 4.0) for one in own])
        apply(*own)
        if expected is None:
            expected = Expected(optimizer, hosts_of(size), momentum=1.0, nesterov=nesterov, masks=False)
            expected.weights = [one.copy() for one in values(filled())]
        rates, decays = [], [DECAY, DECAY, 0.0]
        for place, (w, norm) in enumerate(zip(expected.weights, before, strict=True)):
            length = np.linalg.norm(w.astype(np.float64))
            late = COEFFICIENT * length / (norm + decays[place] * length) if norm else 0.0
            rates.append(np.float32(RATE * (1.0 if place == 1 else late)))
        every = [gradients(rank, number) for rank in range(size)]
        for one in expected.models:
            one.momentum = np.float32(MOMENTUM(number))
        parts = zip(rates, decays, expected.weights, strict=True)
        decayed = [w * np.float32(rate * decay) for rate, decay, w in parts]
        expected.step([[g * r + d for g, r, d in zip(of, rates, decayed, strict=True)] for of in every], 0.125)
        before = [np.linalg.norm(np.mean(one, axis=0, dtype=np.float64)) for one in zip(*every, strict=True)]
    assert_same_bits_on_all_ranks([*weights, *optimizer.variables])
    for got, wanted in zip(values(weights), expected.weights, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6)
    assert size == 1 or expected.waiting() != 0


@few
@pytest.mark.parametrize(
    "options",
    [
        {"op": hvd.Sum},
        {"backward_passes_per_step": 2, "gradient_predivide_factor": 2.0},
        {"loss scale": True},
    ],
    ids=str,
)
def test_density_1_is_lars_with_the_norms_of_the_step_before(options: dict[str, Any]) -> None:
    options, weights, reference = dict(options), filled(), filled()
    made = lars()
    scale = 8.0 if options.pop("loss scale", False) else 1.0
    if scale > 1:
        made = keras.optimizers.LossScaleOptimizer(made, initial_scale=scale)
    topk = hvd.TopK(density=1.0, min_elements=10, wire="fp32", momentum_correction=True)
    optimizer = hvd.DistributedOptimizer(made, compression=topk, **options)
    passes = options.get("backward_passes_per_step", 1)
    plain = lars(LateLARS, **({} if passes == 1 else {"gradient_accumulation_steps": passes}))
    step = tf.function(lambda *own: optimizer.apply(list(own), weights), autograph=False)
    factor = passes * (hvd.size() if options.get("op") == hvd.Sum else 1)
    for number in range(4 * passes):
        step(*[tf.constant(one * np.float32(scale)) for one in gradients(hvd.rank(), number)])
        every = [gradients(rank, number) for rank in range(hvd.size())]
        plain.apply([tf.constant(np.mean(one, 0) * factor) for one in zip(*every, strict=True)], reference)
    assert np.abs(values(weights)[0] - values(filled())[0]).max() > 0.01
    for got, wanted in zip(values(weights), values(reference), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6)


@few
def test_estimates_of_the_norms_of_large_tensors_train_alike_on_all_ranks_and_near_exact_norms() -> None:
    shapes = ((40, 50), (7,), (30, 20))  # two are longer than a sketch
    zeros = [np.zeros(one, np.float32) for one in shapes]
    ours, reference = ([keras.Variable(one, name=f"v{n}") for n, one in enumerate(zeros)] for _ in range(2))
    fill(ours)
    fill(reference)
    start = values(ours)
    topk = hvd.TopK(density=1.0, min_elements=10, wire="fp32", momentum_correction=True)
    optimizer, plain = hvd.DistributedOptimizer(lars(), compression=topk), lars(LateLARS)
    optimizer.build(ours)
    step = tf.function(lambda *own: optimizer.apply(list(own), ours), autograph=False)
    for number in range(6):
        step(*[tf.constant(one) for one in gradients(hvd.rank(), number, shapes)])
        every = [gradients(rank, number, shapes) for rank in range(hvd.size())]
        plain.apply([tf.constant(np.mean(one, 0)) for one in zip(*every, strict=True)], reference)
    assert_same_bits_on_all_ranks([*ours, *optimizer.variables])
    for got, wanted, before in zip(values(ours), values(reference), start, strict=True):
        moved = np.linalg.norm(wanted - before)
        assert moved > 0
        assert np.linalg.norm(got - wanted) < 0.1 * moved
    kept = optimizer._hvd_ext_reducer.momentum.save([kinds.key(one) for one in ours])["gradient norms"]
    np.testing.assert_allclose(kept[[0, 2]], plain._before.numpy()[[0, 2]], rtol=0.2)


@few
def test_norms_that_another_number_of_ranks_has_saved_are_those_of_the_next_step() -> None:
    weights, reference = filled(), filled()
    saved = {"ranks": 5, "steps": 7, "flushing": False, "gradient norms": [2.0, 0.0, 3.0]}
    states = [{name: np.array(value) for name, value in saved.items()} for _ in range(5)]
    topk = hvd.TopK(density=1.0, min_elements=10, wire="fp32", momentum_correction=True)
    optimizer, plain = hvd.DistributedOptimizer(lars(), compression=topk), lars(LateLARS)
    object.__setattr__(plain, "_before", tf.Variable([2.0, 0.0, 3.0], dtype=tf.float64))
    optimizer.build(weights)
    optimizer._hvd_ext_reducer.restore({0: (None, lambda: iter(states))})
    optimizer.apply([tf.constant(one) for one in gradients(hvd.rank(), 0)], weights)
    every = [gradients(rank, 0) for rank in range(hvd.size())]
    plain.apply([tf.constant(np.mean(one, 0)) for one in zip(*every, strict=True)], reference)
    for got, wanted, before in zip(values(weights), values(reference), values(filled()), strict=True):
        assert np.abs(wanted - before).max() > 0.001
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6)


@few
def test_a_checkpoint_goes_on_bit_for_bit(tmp_path: Path) -> None:
    directory = Path(hvd.broadcast_object(str(tmp_path / "job")))

    def job() -> tuple[keras.Model, hvd.callbacks.Checkpoint]:
        made = model()
        optimizer = hvd.optimizers.LARS(RATE, trust_coefficient=COEFFICIENT, weight_decay=DECAY, parallel=False)
        topk = hvd.TopK(**OPTIONS, momentum_correction=True)
        made.compile(hvd.DistributedOptimizer(optimizer, compression=topk), "mse", run_eagerly=True)
        checkpoint = hvd.callbacks.Checkpoint(directory)
        checkpoint.set_model(made)
        return made, checkpoint

    whole, checkpoint = job()
    assert checkpoint.restore() == (0, 0)
    for step in range(5):
        if step == 2:
            checkpoint.save(1)
        whole.train_on_batch(*data(hvd.rank(), 4, step))
    second, checkpoint = job()
    assert checkpoint.restore() == (1, 0)
    for step in range(2, 5):
        second.train_on_batch(*data(hvd.rank(), 4, step))
    assert isinstance(second.optimizer._hvd_ext_reducer.momentum, OfLARS)
    for got, wanted in zip(values(second.weights), values(whole.weights), strict=True):
        np.testing.assert_array_equal(got, wanted)
