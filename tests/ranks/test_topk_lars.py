"""LARS whose momentum `TopK` takes over: its trust ratios have the gradients' norms of the step before."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.tensorflow.gradients import kinds
from tests.ranks.compare import assert_close
from tests.ranks.conftest import LAUNCHED_SIZE
from tests.ranks.topk_jobs import OPTIONS, SHAPES, Expected, LateLARS, averaged, gradients, hosts_of, step_of
from tests.ranks.training import assert_same_bits_on_all_ranks, fill, values

pytestmark = [
    pytest.mark.ranks(2),
    pytest.mark.skipif(LAUNCHED_SIZE > 2, reason="the same on any number of ranks"),
    pytest.mark.usefixtures("apart"),
]

MOMENTUM = keras.optimizers.schedules.PolynomialDecay(0.75, 8, 0.25)
DECAY, COEFFICIENT, RATE = 0.0625, 0.25, 0.5


def lars(kind: type = hvd.optimizers.LARS, **more: Any) -> keras.optimizers.Optimizer:
    given = {"trust_coefficient": COEFFICIENT, "weight_decay": DECAY, "exclude_from_trust": ["v1"], **more}
    return kind(RATE, MOMENTUM, parallel=False, exclude_from_weight_decay=["v2"], **given)


def filled(shapes: Any = SHAPES) -> list[keras.Variable]:
    made = [keras.Variable(np.zeros(shape), dtype="float32", name=f"v{n}") for n, shape in enumerate(shapes)]
    fill(made)
    return made


@pytest.mark.parametrize("nesterov", [False, True], ids=["plain", "nesterov"])
def test_gradients_get_decay_and_rate_before_the_selection(nesterov: bool) -> None:
    weights, size = filled(), hvd.size()
    topk = hvd.TopK(**OPTIONS, momentum_correction=True)
    optimizer = hvd.DistributedOptimizer(lars(nesterov=nesterov), compression=topk)
    optimizer.build(weights)
    apply = step_of(optimizer, weights, traced=nesterov)
    expected, before = None, [0.0] * len(SHAPES)
    for number in range(7):
        own = gradients(hvd.rank(), number)
        if number == 3:  # a step that is skipped measures nothing
            apply([part * np.float32(np.nan if hvd.rank() == size - 1 else 4) for part in own])
        apply(own)
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
        before = [np.linalg.norm(part.astype(np.float64)) for part in averaged(number)]
    assert_same_bits_on_all_ranks([*weights, *optimizer.variables])
    assert_close(weights, expected.weights, rtol=0, atol=2e-6)
    assert size == 1 or expected.waiting() != 0


class Late:
    """LARS under `TopK` of density 1, beside LARS with the norms of the step before on the joined batch.

    Args:
        shapes: of the variables.
        loss_scale: that ours has around it.
        options: of `hvd.DistributedOptimizer`.
    """

    def __init__(self, shapes: Any = SHAPES, loss_scale: float = 1.0, **options: Any) -> None:
        self.shapes, self.scale = shapes, np.float32(loss_scale)
        self.ours, self.reference, start = (filled(shapes) for _ in range(3))
        self.start = values(start)
        made = lars()
        if loss_scale > 1:
            made = keras.optimizers.LossScaleOptimizer(made, initial_scale=loss_scale)
        topk = hvd.TopK(**{**OPTIONS, "density": 1.0}, momentum_correction=True)
        self.optimizer = hvd.DistributedOptimizer(made, compression=topk, **options)
        self.optimizer.build(self.ours)
        passes = options.get("backward_passes_per_step", 1)
        self.factor = np.float32(passes * (hvd.size() if options.get("op") == hvd.Sum else 1))
        self.plain = lars(LateLARS, **({} if passes == 1 else {"gradient_accumulation_steps": passes}))
        self.step = step_of(self.optimizer, self.ours, traced=passes > 1)

    def train(self, steps: int) -> None:
        for number in range(steps):
            self.step([part * self.scale for part in gradients(hvd.rank(), number, self.shapes)])
            self.plain.apply([part * self.factor for part in averaged(number, self.shapes)], self.reference)
        assert_same_bits_on_all_ranks([*self.ours, *self.optimizer.variables])


@pytest.mark.parametrize(
    "options",
    [{"op": hvd.Sum}, {"backward_passes_per_step": 2, "gradient_predivide_factor": 2.0}, {"loss_scale": 8.0}],
    ids=str,
)
def test_density_1_is_lars_with_the_norms_of_the_step_before(options: dict[str, Any]) -> None:
    tried = Late(**options)
    tried.train(8)
    assert np.abs(values(tried.ours)[0] - tried.start[0]).max() > 0.01
    assert_close(tried.ours, tried.reference, rtol=0, atol=1e-6)


def test_estimates_of_the_norms_of_large_tensors_train_alike_on_all_ranks_and_near_exact_norms() -> None:
    tried = Late(shapes=((40, 50), (7,), (30, 20)))  # two are longer than a sketch
    tried.train(6)
    for result, wanted, before in zip(values(tried.ours), values(tried.reference), tried.start, strict=True):
        moved = np.linalg.norm(wanted - before)
        assert moved > 0
        assert np.linalg.norm(result - wanted) < 0.1 * moved
    kept = tried.optimizer._hvd_ext.reducer.momentum.save([kinds.key(one) for one in tried.ours])["gradient norms"]
    np.testing.assert_allclose(kept[[0, 2]], tried.plain._before.numpy()[[0, 2]], rtol=0.2)


def test_norms_that_another_number_of_ranks_has_saved_are_those_of_the_next_step() -> None:
    tried = Late()
    saved = {"ranks": 5, "steps": 7, "flushing": False, "gradient norms": [2.0, 0.0, 3.0]}
    states = [{name: np.array(value) for name, value in saved.items()} for _ in range(5)]
    object.__setattr__(tried.plain, "_before", tf.Variable([2.0, 0.0, 3.0], dtype=tf.float64))
    tried.optimizer._hvd_ext.reducer.restore({0: (None, lambda: iter(states))})
    tried.train(1)
    assert all(np.abs(one - before).max() > 0.001 for one, before in zip(values(tried.ours), tried.start, strict=True))
    assert_close(tried.ours, tried.reference, rtol=0, atol=1e-6)
