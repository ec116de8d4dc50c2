"""The order of an epoch: a permutation of each part, which every rank, every number of ranks and C++ know alike."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from hvd_ext.data import native
from hvd_ext.data.steps import used
from tests import epoch_order as order

# seed, epoch, samples, parts, position -> the sample's number and its seed; tests/native/test_order.cc has the same
GOLDEN = [
    ((0, 0, 1, 1, 0), 0, (1098042292, 1767912456)),
    ((7, 1, 10, 2, 0), 4, (891688806, -834644864)),
    ((7, 1, 10, 2, 9), 1, (-960518527, 78769134)),
    ((7, 1, 10, 1, 4), 8, (-187175881, 987359057)),
    ((-1, 3, 1000, 7, 123), 634, (298844181, -864034719)),
    ((4611686018427387904, 2, 1280000, 4, 1279999), 507159, (-1903041753, 1458990278)),
    ((42, 89, 1281167, 8, 640000), 12272, (1074373597, -411078771)),
    ((42, 90, 1281167, 8, 640000), 381152, (1025195972, 1544542567)),
    ((5, -2, 4097, 3, 4096), 2983, (-1392051706, -451491645)),
    ((123456789, 0, 3000000000, 1, 2999999999), 2957774327, (1928574218, 1185537113)),
]


def numbers(places: np.ndarray, samples: int, parts: int, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    return order.numbers(places, seed=seed, epoch=epoch, samples=samples, parts=parts, shuffle=shuffle)


@pytest.mark.parametrize(("of", "number", "seeds"), GOLDEN)
def test_orders_and_seeds_are_these_in_numpy_and_in_cpp(
    of: tuple[int, ...], number: int, seeds: tuple[int, int]
) -> None:
    seed, epoch, samples, parts, position = of
    assert numbers(np.array([position]), samples, parts, seed, epoch).tolist() == [number]
    assert order.seeds(np.array([number]), seed=seed, epoch=epoch).tolist() == [list(seeds)]


def test_the_seed_of_a_sample_depends_on_seed_epoch_and_number_alone() -> None:
    found = order.seeds(np.arange(1000), seed=4, epoch=2)
    assert (found.dtype, found.shape) == (np.int32, (1000, 2))
    assert len({tuple(each) for each in found}) == 1000
    assert np.array_equal(order.seeds(np.arange(1000)[::-1], seed=4, epoch=2), found[::-1])
    assert not np.array_equal(order.seeds(np.arange(1000), seed=4, epoch=3), found)
    assert not np.array_equal(order.seeds(np.arange(1000), seed=5, epoch=2), found)


def test_the_op_gives_what_numpy_gives_also_in_functions_where_the_epoch_is_a_tensor() -> None:
    drawn = np.random.default_rng(5)
    traced = tf.function(native.epoch_order, reduce_retracing=True)
    for repetition in range(20):
        samples, seed, epoch = (int(drawn.integers(1, top)) for top in (100_000, 1 << 62, 1000))
        parts, shuffle = int(drawn.integers(1, min(samples, 64) + 1)), bool(drawn.integers(4))
        places = drawn.integers(0, samples, 300)
        op = native.epoch_order if repetition % 4 else traced
        found, seeds = op(tf.constant(places), seed - 7, tf.constant(epoch, tf.int64), samples, parts, shuffle=shuffle)
        wanted = numbers(places, samples, parts, seed - 7, epoch, shuffle)
        np.testing.assert_array_equal(found, wanted)
        np.testing.assert_array_equal(seeds, order.seeds(wanted, seed=seed - 7, epoch=epoch))


@pytest.mark.parametrize(
    ("samples", "parts", "size", "remainder", "wanted"),
    [
        (103, 4, 4, "drop", 100),
        (103, 4, 2, "drop", 100),  # as many as the four ranks have used
        (103, 1, 2, "drop", 102),
        (103, 2, 3, "drop", 102),
        (103, 4, 1, "repeat", 104),
        (103, 4, 3, "repeat", 105),
        (103, 4, 2, "uneven", 103),
    ],
)
def test_the_positions_in_use_follow_parts_and_ranks(
    samples: int, parts: int, size: int, remainder: str, wanted: int
) -> None:
    assert used(samples, parts, size, remainder) == wanted
