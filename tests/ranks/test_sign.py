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
from tests.ranks.topk_jobs import Beside, apply, gradients, hosts_of, variables
from tests.ranks.topk_model import SignModel

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("apart")]

SIGNS = {"min_elements": 10}


def beside(dense_steps: int = 0, flushed: int = -1) -> Beside:
    codec = hvd.Sign(dense_steps, **SIGNS)
    return Beside(codec, lambda step: 1.0 if step < dense_steps or step == flushed else 1 / 32, SignModel)


def test_steps_are_those_of_the_model_and_what_is_not_sent_enters_later_steps() -> None:
    tried = beside(flushed=4)
    tried.train(0, 4)
    assert hvd.size() == 1 or tried.expected.waiting() != 0
    hvd.flush(tried.optimizer)
    tried.train(4, 5)
    tried.assert_all_is_applied()


def test_the_first_steps_may_be_dense() -> None:
    tried = beside(dense_steps=2)
    tried.train(0, 2)
    assert tried.expected.waiting() == 0
    tried.train(2, 4)
    assert hvd.size() == 1 or tried.expected.waiting() != 0


def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks() -> None:
    tried = beside()
    tried.train(0, 2)
    tried.assert_a_nan_skips_a_step()
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
