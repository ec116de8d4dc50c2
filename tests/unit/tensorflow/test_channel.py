"""Which gradients one op hands over."""

from __future__ import annotations

from hvd_ext.planning.layout import Layout
from hvd_ext.planning.tensors import Tensor
from hvd_ext.tensorflow.gradients.channel import ALONE_NBYTES, TOGETHER_NBYTES, handed_over


def lists(*nbytes: int) -> list[tuple[int, ...]]:
    tensors = tuple(Tensor(f"g{place}", (each // 4,), "float32") for place, each in enumerate(nbytes))
    return handed_over(Layout(tensors, ()), tuple(reversed(range(len(nbytes)))))


def test_small_gradients_are_handed_over_together_and_large_ones_alone() -> None:
    assert lists() == []
    assert lists(*[4] * 5) == [(4, 3, 2, 1, 0)]
    assert lists(ALONE_NBYTES, 4, ALONE_NBYTES - 4, 4 * ALONE_NBYTES, 0) == [(3,), (0,), (4, 2, 1)]


def test_one_op_hands_over_no_more_than_back_propagation_may_leave_uncovered() -> None:
    each = ALONE_NBYTES // 2
    fit = TOGETHER_NBYTES // each
    found = lists(*[each] * (2 * fit + 1))
    assert [len(places) for places in found] == [fit, fit, 1]
    assert [place for places in found for place in places] == list(reversed(range(2 * fit + 1)))
