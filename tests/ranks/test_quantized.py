"""Training with `Quantized` equals a model of all ranks in NumPy, bit for bit, and loses nothing."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
import pytest

import hvd_ext as hvd
from hvd_ext.keras.optimizers.optimizer import channels
from hvd_ext.planning.sparse_planner import needs
from tests.ranks.compare import assert_equal
from tests.ranks.conftest import LAUNCHED_SIZE
from tests.ranks.topk_jobs import Expected, apply, gradients, hosts_of, restart, variables
from tests.ranks.topk_model import QuantizedModel
from tests.ranks.training import assert_same_bits_on_all_ranks, values

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("apart")]

BITS = pytest.mark.parametrize("bits", [8, 4, 1])


class Beside:
    """Training beside the model, which is compared after every step."""

    def __init__(self, bits: int, hosts: Sequence[int], dense_steps: int = 0, sums: bool = False) -> None:
        self.weights, self.expected, self.hosts = variables(), None, hosts
        self.codec = hvd.Quantized(bits, 64, dense_steps, min_elements=10)
        self.sums = sums
        self.optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=self.codec)

    def train(self, first: int, end: int, density: float | None = None) -> None:
        for step in range(first, end):
            every = [gradients(rank, step) for rank in range(hvd.size())]
            apply(self.optimizer, every[hvd.rank()], self.weights)
            self.expected = self.expected or Expected(
                self.optimizer, self.hosts, QuantizedModel, bits=self.codec.bits, block=64, sums=self.sums
            )
            usual = 1.0 if step < self.codec.dense_steps else self.codec.density
            self.expected.step(every, density or usual)
            assert_equal(self.weights, self.expected.weights)
        assert_same_bits_on_all_ranks(self.weights)


@BITS
def test_steps_are_those_of_the_model_and_what_is_not_sent_enters_later_steps(bits: int) -> None:
    tried = Beside(bits, hosts_of(hvd.size()))
    tried.train(0, 4)
    assert hvd.size() == 1 or tried.expected.waiting() != 0
    hvd.flush(tried.optimizer)
    tried.train(4, 5, density=1.0)
    assert tried.expected.waiting() == 0
    # all that was given has been applied, but for the rounding of float32
    applied = -sum(weight.astype(np.float64).sum() for weight in values(tried.weights)) * hvd.size()
    given = sum(total.astype(np.float64).sum() for total in tried.expected.sums)
    assert applied == pytest.approx(given, abs=1e-3)


@pytest.mark.skipif(LAUNCHED_SIZE < 3, reason="sums are sent from three hosts on")
@BITS
def test_from_three_hosts_on_each_adds_up_a_piece_and_sends_its_sum(bits: int) -> None:
    hosts = [1] * hvd.size()
    restart(hosts)
    tried = Beside(bits, hosts, sums=True)
    tried.train(0, 3)
    (selected,) = [bucket for bucket in channels(tried.optimizer)[-1].layout.buckets if bucket.selection is not None]
    assert needs(selected.plan) == {"RESELECT"}
    assert tried.expected.waiting() != 0
    hvd.flush(tried.optimizer)
    tried.train(3, 4, density=1.0)
    assert tried.expected.waiting() == 0


def test_the_first_steps_may_be_dense_and_a_step_that_is_not_finite_is_skipped_on_all_ranks() -> None:
    tried = Beside(8, hosts_of(hvd.size()), dense_steps=2)
    tried.train(0, 2)
    assert tried.expected.waiting() == 0
    tried.train(2, 3)
    before = values(tried.weights)
    bad = gradients(hvd.rank(), 9)
    if hvd.rank() == hvd.size() - 1:
        bad[0][2, 3] = np.nan
    apply(tried.optimizer, bad, tried.weights)
    assert_equal(tried.weights, before)
    tried.train(3, 5)
