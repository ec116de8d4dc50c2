"""Training with `LowRank` equals a model of all ranks in NumPy, and loses nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.keras.optimizers.optimizer import channels
from tests.ranks.compare import assert_equal
from tests.ranks.topk_jobs import restart
from tests.ranks.training import assert_same_bits_on_all_ranks, checkpoint, values

pytestmark = [pytest.mark.slow, pytest.mark.ranks(2, 3, 4), pytest.mark.usefixtures("apart")]

SHAPES = ((12, 10), (7,), (3, 4, 9), (5, 2))  # two matrices that get smaller, a vector, and one that does not
FACTORISED = (0, 2)
RANK = 2
CODEC = hvd.LowRank(RANK, start=2, saving=1.0)


def gradients(rank: int, step: int) -> list[np.ndarray]:
    random = np.random.default_rng((rank, step))
    return [random.standard_normal(shape).astype(np.float32) for shape in SHAPES]


def variables() -> list[keras.Variable]:
    return [keras.Variable(np.zeros(shape), dtype="float32", name=f"v{n}") for n, shape in enumerate(SHAPES)]


class Model:
    """PowerSGD of all ranks, in float64."""

    def __init__(self, size: int, codec: hvd.LowRank = CODEC, op: Any = hvd.Average) -> None:
        self.codec, self.share = codec, 1 if op == hvd.Sum else size
        self.weights = [np.zeros(shape) for shape in SHAPES]
        self.given = [np.zeros(shape) for shape in SHAPES]
        self.residuals = {place: [0.0] * size for place in FACTORISED}
        self.right = {
            place: np.random.default_rng((codec.seed, place)).standard_normal((SHAPES[place][-1], RANK))
            for place in FACTORISED
        }

    def step(self, of_ranks: Sequence[Sequence[np.ndarray]], whole: bool) -> None:
        for place in range(len(SHAPES)):
            own = [of_rank[place].astype(np.float64) for of_rank in of_ranks]
            self.given[place] += sum(own)
            if place not in FACTORISED:
                self.weights[place] -= sum(own) / self.share
                continue
            columns = SHAPES[place][-1]
            matrices = [
                one.reshape(-1, columns) + residual for one, residual in zip(own, self.residuals[place], strict=True)
            ]
            if whole:
                result, self.residuals[place] = sum(matrices), [0.0] * len(matrices)
            else:
                left = np.linalg.qr(sum(matrix @ self.right[place] for matrix in matrices))[0]
                result = left @ sum(left.T @ matrix for matrix in matrices)
                self.right[place] = sum(matrix.T @ left for matrix in matrices) / self.share
                self.residuals[place] = [matrix - left @ (left.T @ matrix) for matrix in matrices]
            self.weights[place] -= result.reshape(SHAPES[place]) / self.share


def optimizer_of(codec: hvd.LowRank = CODEC, op: Any = hvd.Average) -> keras.optimizers.Optimizer:
    return hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=codec, op=op, check_every=3)


def apply(optimizer: keras.optimizers.Optimizer, step: int, to: Sequence[keras.Variable]) -> None:
    optimizer.apply([tf.constant(one) for one in gradients(hvd.rank(), step)], list(to))


@pytest.mark.parametrize(("op", "traced"), [(hvd.Average, False), (hvd.Sum, True)], ids=["eager", "traced"])
def test_twenty_steps_are_those_of_the_model_and_nothing_is_lost(op: Any, traced: bool) -> None:
    optimizer, weights, expected = optimizer_of(op=op), variables(), Model(hvd.size(), op=op)
    optimizer.build(weights)
    step = tf.function(lambda *own: optimizer.apply(own, weights), autograph=False)
    for number in range(21):
        if number in (10, 20):
            hvd.flush(optimizer)
        if traced:
            step(*map(tf.constant, gradients(hvd.rank(), number)))
        else:
            apply(optimizer, number, weights)
        whole = hvd.size() == 1 or number < CODEC.start or number in (10, 20)
        expected.step([gradients(rank, number) for rank in range(hvd.size())], whole)
        for got, wanted in zip(values(weights), expected.weights, strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-5 * (number + 1) * hvd.size())
    assert_same_bits_on_all_ranks(weights)
    share = 1 if op == hvd.Sum else hvd.size()
    for got, given in zip(values(weights), expected.given, strict=True):
        np.testing.assert_allclose(-got * share, given, atol=1e-3)


@pytest.mark.skipif("hvd.size() == 1", reason="one rank sends nothing")
def test_only_the_factors_are_sent() -> None:
    optimizer, weights = optimizer_of(hvd.LowRank(RANK, saving=1.0)), variables()
    for number in range(3):
        apply(optimizer, number, weights)
    (gradient_set,) = optimizer._hvd_ext.reducer.sets
    left, right = gradient_set.policy.channels
    sizes = [(12 * RANK + 7 + 12 * RANK + 10) * 4, (10 + 9) * RANK * 4]
    assert [sum(channel.layout.nbytes) for channel in (left, right)] == sizes
    assert [channel.steps for channel in (left, right, channels(optimizer)[-1])] == [3, 3, 0]
    text = hvd.explain(optimizer)
    assert "left factors: " in text and "right factors: " in text
    gradient_set.close()
    assert not left.is_open and not right.is_open


def test_a_step_that_is_not_finite_is_skipped_on_all_ranks_and_changes_nothing() -> None:
    optimizer, weights = optimizer_of(hvd.LowRank(RANK, saving=1.0)), variables()
    expected = Model(hvd.size())
    for number in range(4):
        if number == 2:
            before, bad = values(weights), gradients(hvd.rank(), 9)
            if hvd.rank() == hvd.size() - 1:
                bad[0][2, 3] = np.nan
            optimizer.apply([tf.constant(one) for one in bad], weights)
            assert_equal(weights, before)
        apply(optimizer, number, weights)
        expected.step([gradients(rank, number) for rank in range(hvd.size())], hvd.size() == 1)
    for got, wanted in zip(values(weights), expected.weights, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_a_matrix_of_zeros_sends_what_comes_after_it() -> None:
    optimizer, weights = optimizer_of(hvd.LowRank(RANK, saving=1.0)), variables()
    zeros = [tf.zeros(shape) for shape in SHAPES]
    for _ in range(2):
        optimizer.apply(zeros, weights)
    one = np.zeros(SHAPES[0], np.float32)
    one[3] = 1.0
    for _ in range(3):
        optimizer.apply([tf.constant(one), *zeros[1:]], weights)
    hvd.flush(optimizer)
    optimizer.apply(zeros, weights)
    np.testing.assert_allclose(values(weights)[0], -3 * one, atol=1e-5)


def test_a_checkpoint_has_the_residuals_and_the_factors(tmp_path: Path) -> None:
    def made() -> tuple[keras.Model, Any]:
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.layers.Input((12,)), keras.layers.Dense(10), keras.layers.Dense(12)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), compression=hvd.LowRank(1)), "mse")
        return model, checkpoint(model, tmp_path)

    random = np.random.default_rng(hvd.rank())
    x = random.standard_normal((24, 12)).astype(np.float32)
    whole, _ = made()
    whole.fit(x, x, batch_size=4, epochs=2, shuffle=False, verbose=0)
    first, saver = made()
    first.fit(x, x, batch_size=4, epochs=1, shuffle=False, verbose=0, callbacks=[saver])
    second, saver = made()
    second.fit(x, x, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[saver])
    assert_equal(second.weights, [weight.numpy() for weight in whole.weights])


@pytest.mark.skipif("hvd.size() == 1", reason="one rank keeps nothing")
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
def test_residuals_of_another_number_of_ranks_make_the_same_update(op: Any) -> None:
    optimizer, weights = optimizer_of(hvd.LowRank(RANK, saving=1.0), op), variables()
    for number in range(3):
        apply(optimizer, number, weights)
    (gradient_set,) = optimizer._hvd_ext.reducer.sets
    policy, size = gradient_set.policy, hvd.size() + 1
    states = hvd.allgather_object({**policy.save(), "ranks": np.array(size)})
    states.append(states[0])
    policy.load(None, lambda: iter(states))
    assert policy.save()["steps"] == 3
    hvd.flush(optimizer)
    before = values(weights)
    optimizer.apply([tf.zeros(shape) for shape in SHAPES], weights)
    for place in FACTORISED:
        waiting = sum(state[f"residual/{place}"] for state in states) / (1 if op == hvd.Sum else size)
        np.testing.assert_allclose(before[place] - values(weights)[place], waiting.reshape(SHAPES[place]), atol=1e-5)
    assert_same_bits_on_all_ranks(weights)


def test_on_one_host_gradients_are_whole(caplog: pytest.LogCaptureFixture) -> None:
    restart([hvd.size()])
    optimizer, weights = optimizer_of(), variables()
    for number in range(4):
        apply(optimizer, number, weights)
    given = [gradients(rank, number) for rank in range(hvd.size()) for number in range(4)]
    for got, parts in zip(values(weights), zip(*given, strict=True), strict=True):
        np.testing.assert_allclose(got, -sum(parts) / hvd.size(), atol=1e-5)
    assert hvd.rank() or "LowRank changes nothing in this job: there is one host" in caplog.text
