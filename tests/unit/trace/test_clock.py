"""Clocks that are apart by a known time: the estimate's bounds hold it."""

from __future__ import annotations

import random

import pytest

from hvd_ext.job.clock import Clock, Stamps, estimate


def test_the_bounds_are_those_of_the_formula():
    # by hand: low = max(1000 - 60, 1100 - 130) = 970, high = min(1070 - 0, 1120 - 110) = 1010
    clock = estimate(Stamps([1000, 1100], [1070, 1120], "b"), Stamps([0, 110], [60, 130], "a"))
    assert clock == Clock(990, 20)


@pytest.mark.parametrize("offset", [-7_000_000, 0, 123_456_789])
def test_the_true_offset_is_within_the_uncertainty(offset):
    rng = random.Random(offset)
    now, mine, root = 10**12, ([], []), ([], [])
    for _ in range(10):
        first, second = now + rng.randrange(90_000), now + rng.randrange(90_000)
        start = max(first, second) + rng.randrange(30_000)
        root[0].append(first)
        mine[0].append(second + offset)
        root[1].append(start + rng.randrange(60_000))
        mine[1].append(start + rng.randrange(60_000) + offset)
        now = start + 100_000
    clock = estimate(Stamps(*mine, "b"), Stamps(*root, "a"))
    assert abs(clock.offset_ns - offset) <= clock.uncertainty_ns
    assert 0 < clock.uncertainty_ns < 180_000


@pytest.mark.parametrize(
    ("mine", "root", "clock"),
    [
        (Stamps([5, 25], [15, 33], "a"), Stamps([4, 26], [14, 35], "a"), Clock(0, 0)),  # one machine, one clock
        (Stamps([1005], [1015], "a"), Stamps([4], [14], "a"), Clock(1001, 10)),  # containers with clocks of their own
        (Stamps([5], [15], ""), Stamps([4], [14], ""), Clock(1, 10)),  # without a name they are not taken for one
    ],
)
def test_ranks_of_one_machine_share_its_clock(mine, root, clock):
    assert estimate(mine, root) == clock
