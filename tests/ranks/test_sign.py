"""Training with `Sign` equals a model of all ranks in NumPy, bit for bit, and loses nothing."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import HvdExtError
from tests.ranks.compare import assert_equal
from tests.ranks.conftest import LAUNCHED_SIZE
from tests.ranks.topk_jobs import Expected, apply, gradients, hosts_of, variables
from tests.ranks.topk_model import SignModel
from tests.ranks.training import assert_same_bits_on_all_ranks, values

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("apart")]

SIGNS = {"min_elements": 10}


class Beside:
    """Training beside the model, which is compared after every step."""

    def __init__(self, dense_steps: int = 0) -> None:
        self.weights, self.expected, self.dense_steps = variables(), None, dense_steps
        codec = hvd.Sign(dense_steps, **SIGNS)
        self.optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=codec)

    def train(self, first: int, end: int, density: float | None = None) -> None:
        for step in range(first, end):
            every = [gradients(rank, step) for rank in range(hvd.size())]
            apply(self.optimizer, every[hvd.rank()], self.weights)
            self.expected = self.expected or Expected(self.optimizer, hosts_of(hvd.size()), SignModel)
            self.expected.step(every, density or (1.0 if step < self.dense_steps else 1 / 32))
            assert_equal(self.weights, self.expected.weights)
        assert_same_bits_on_all_ranks(self.weights)


def test_steps_are_those_of_the_model_and_what_is_not_sent_enters_later_steps() -> None:
    tried = Beside()
    tried.train(0, 4)
    assert hvd.size() == 1 or tried.expected.waiting() != 0
    hvd.flush(tried.optimizer)
    tried.train(4, 5, density=1.0)
    assert tried.expected.waiting() == 0
    # all that was given has been applied, but for the rounding of the scales
    applied = -sum(weight.astype(np.float64).sum() for weight in values(tried.weights)) * hvd.size()
    given = sum(total.astype(np.float64).sum() for total in tried.expected.sums)
    assert applied == pytest.approx(given, abs=1e-3)


def test_the_first_steps_may_be_dense() -> None:
    tried = Beside(dense_steps=2)
    tried.train(0, 2)
    assert tried.expected.waiting() == 0
    tried.train(2, 4)
    assert hvd.size() == 1 or tried.expected.waiting() != 0


def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks() -> None:
    tried = Beside()
    tried.train(0, 2)
    before = values(tried.weights)
    bad = gradients(hvd.rank(), 9)
    if hvd.rank() == hvd.size() - 1:
        bad[0][2, 3] = np.nan
    apply(tried.optimizer, bad, tried.weights)
    assert_equal(tried.weights, before)
    tried.train(2, 4)


def test_a_tape_takes_signs_too() -> None:
    tape = hvd.DistributedGradientTape(tf.GradientTape(), compression=hvd.Sign(**SIGNS))
    weight = tf.Variable(np.zeros((6, 7), np.float32))
    with tape:
        loss = tf.reduce_sum(weight * gradients(hvd.rank(), 0)[0])
    (seen,) = tape.gradient(loss, [weight])
    model = SignModel(hosts_of(hvd.size()), 42)
    every = [gradients(rank, 0)[0].reshape(-1) for rank in range(hvd.size())]
    expected = model.step(every, 1 / 32, dense=hvd.size() == 1) / np.float32(hvd.size())
    assert_equal([seen], [expected.reshape(6, 7)])


@pytest.mark.skipif(LAUNCHED_SIZE == 1, reason="on one rank all plans are dense")
def test_an_algorithm_that_merges_vectors_is_refused() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=hvd.Sign(**SIGNS), algorithm="gtopk")
    with pytest.raises(HvdExtError, match="its plans merge or pack vectors, which the codec cannot"):
        apply(optimizer, gradients(hvd.rank(), 0), variables())
