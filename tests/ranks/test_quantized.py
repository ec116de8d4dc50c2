"""Training with `Quantized` equals a model of all ranks in NumPy, bit for bit, and loses nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import hvd_ext as hvd
from hvd_ext.keras.optimizers.optimizer import channels
from hvd_ext.planning.sparse_planner import needs
from tests.ranks.conftest import LAUNCHED_SIZE
from tests.ranks.topk_jobs import Beside, restart
from tests.ranks.topk_model import QuantizedModel

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("apart")]

BITS = pytest.mark.parametrize("bits", [8, 4, 1])


def beside(
    bits: int, dense_steps: int = 0, flushed: int = -1, hosts: Sequence[int] | None = None, sums: bool = False
) -> Beside:
    codec = hvd.Quantized(bits, 64, dense_steps, min_elements=10)
    model = {"bits": bits, "block": 64, "sums": sums}
    dense = {*range(dense_steps), flushed}
    return Beside(codec, lambda step: 1.0 if step in dense else codec.density, QuantizedModel, model, hosts)


@BITS
def test_steps_are_those_of_the_model_and_what_is_not_sent_enters_later_steps(bits: int) -> None:
    tried = beside(bits, flushed=4)
    tried.train(0, 4)
    assert hvd.size() == 1 or tried.expected.waiting() != 0
    hvd.flush(tried.optimizer)
    tried.train(4, 5)
    tried.assert_all_is_applied()


@pytest.mark.skipif(LAUNCHED_SIZE < 3, reason="sums are sent from three hosts on")
@BITS
def test_from_three_hosts_on_each_adds_up_a_piece_and_sends_its_sum(bits: int) -> None:
    hosts = [1] * hvd.size()
    restart(hosts)
    tried = beside(bits, flushed=3, hosts=hosts, sums=True)
    tried.train(0, 3)
    (selected,) = [bucket for bucket in channels(tried.optimizer)[-1].layout.buckets if bucket.selection is not None]
    assert needs(selected.plan) == {"RESELECT"}
    assert tried.expected.waiting() != 0
    hvd.flush(tried.optimizer)
    tried.train(3, 4)
    tried.assert_all_is_applied()


def test_the_first_steps_may_be_dense_and_a_step_that_is_not_finite_is_skipped_on_all_ranks() -> None:
    tried = beside(8, dense_steps=2)
    tried.train(0, 2)
    assert tried.expected.waiting() == 0
    tried.train(2, 3)
    tried.assert_a_nan_skips_a_step()
    tried.train(3, 5)
