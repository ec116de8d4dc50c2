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


def test_the_op_gives_what_numpy_gives_also_in_functions() -> None:
    drawn = np.random.default_rng(5)
    traced = tf.function(native.epoch_step, reduce_retracing=True)
    for repetition in range(40):
        steps = drawn_steps(drawn)
        epoch, of_epoch = int(drawn.integers(0, 3)), int(drawn.integers(0, steps.number))
        again = epoch == steps.again_epoch
        first = of_epoch * steps.batch_size
        elements = steps.again_elements if again else steps.elements
        end = first + steps.batch_size if steps.full and elements else min(first + steps.batch_size, elements)
        mine = np.arange(first, max(first, end)) % max(1, elements)
        shift = steps.again_position - steps.again_step * steps.batch_size * steps.size if again else 0
        places = (shift + mine * steps.size + steps.rank) % steps.samples
        wanted = numbers(places, steps.samples, steps.parts, steps.seed, epoch, bool(steps.shuffle))
        op = native.epoch_step if repetition % 4 else traced
        found, seeds = op(tf.constant([*steps, 7, 7], tf.int64), tf.constant(epoch * steps.number + of_epoch, tf.int64))
        np.testing.assert_array_equal(found, wanted)
        np.testing.assert_array_equal(seeds, order.seeds(wanted, seed=steps.seed, epoch=epoch))


def drawn_steps(drawn: np.random.Generator) -> native.EpochSteps:
    """Draw the steps of a rank."""
    samples, seed = (int(drawn.integers(1, top)) for top in (100_000, 1 << 62))
    size, batch_size, number = (int(drawn.integers(1, top)) for top in (9, 300, 100))
    parts, rank = int(drawn.integers(1, min(samples, 64) + 1)), int(drawn.integers(size))
    full, shuffle = int(drawn.integers(2)), int(drawn.integers(4) > 0)
    elements, left = (int(each) for each in drawn.integers(0, max(1, samples // size), 2))
    again = (int(drawn.integers(-1, 3)), int(drawn.integers(number)), int(drawn.integers(samples)), left)
    begin = (number, batch_size, full, samples, parts, rank, size, seed - 7, shuffle, elements)
    return native.EpochSteps(*begin, *again)


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
