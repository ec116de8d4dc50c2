"""`cached` in place of `.cache()`: what runs again, what the next job finds, and what is refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_ext.data import store
from hvd_ext.data.stream import cached
from hvd_ext.errors import InvalidError
from tests.unit.data.caching import Counted, flip_a_bit, numbered

RANGE = 20


def upstream(counted: Counted, width: int = 16) -> tf.data.Dataset:
    return tf.data.Dataset.range(RANGE).map(numbered(counted, width))


def unknown(counted: Counted, width: int = 16) -> tf.data.Dataset:
    """Make a data set that does not know its length."""
    return upstream(counted, width).filter(lambda one: one["number"] < 15)


def numbers(dataset: tf.data.Dataset) -> list[int]:
    return [int(one["number"]) for one in dataset.as_numpy_iterator()]


def test_the_first_pass_stores_and_later_ones_do_not_run_the_data_set() -> None:
    counted = Counted()
    data = upstream(counted).apply(cached("stream", memory="4MB"))
    assert data.element_spec == upstream(counted).element_spec
    assert int(data.cardinality()) == RANGE
    for _ in range(3):
        assert numbers(data) == list(range(RANGE))
    assert counted.times == dict.fromkeys(range(RANGE), 1)
    assert sorted(numbers(data.shuffle(5).repeat(2))) == sorted([*range(RANGE)] * 2)
    assert sum(counted.times.values()) == RANGE


def test_a_pass_that_was_left_early_is_not_lost() -> None:
    counted = Counted()
    data = upstream(counted).apply(cached("stream", memory="4MB"))
    assert numbers(data.take(8)) == list(range(8))
    stored = sum(counted.times.values())
    assert numbers(data) == list(range(RANGE))
    assert numbers(data) == list(range(RANGE))
    # `skip` runs the data set up to where it goes on
    assert sum(counted.times.values()) == stored + RANGE


@pytest.mark.parametrize(("make", "stored"), [(upstream, RANGE), (unknown, 15)], ids=["known length", "unknown length"])
def test_the_next_job_does_not_run_the_data_set_unless_it_is_another(tmp_path: Path, make: Any, stored: int) -> None:
    for width, runs in ((16, 1), (16, 0), (17, 1)):
        counted = Counted()
        data = make(counted, width).apply(cached("disk", memory="4MB", disk=tmp_path, most=1000, version="1"))
        for _ in range(2):
            assert numbers(data) == list(range(stored))
        assert counted.times == dict.fromkeys(range(RANGE if runs else 0), 1)


def test_elements_beyond_the_limit_come_from_the_data_set_again(tmp_path: Path) -> None:
    counted = Counted()
    width = 25_000
    data = upstream(counted, width).apply(cached("half", memory=10 * (width * 4 + 128)))
    for _ in range(3):
        assert numbers(data) == list(range(RANGE))
    assert counted.times[19] == 3
    data = unknown(counted, width).apply(cached("most", memory="4MB", most=5))
    for _ in range(2):
        assert numbers(data) == list(range(15))


def test_a_damaged_element_is_taken_from_the_data_set_again(tmp_path: Path) -> None:
    def make() -> tf.data.Dataset:
        return tf.data.Dataset.range(RANGE).map(lambda one: one * 3).apply(cached("flip", memory=None, disk=tmp_path))

    first = list(make().as_numpy_iterator())
    (segment,) = store.host_folder(tmp_path).glob("flip-*/segment-*")
    flip_a_bit(segment, 3 * 64 + 20)
    assert list(make().as_numpy_iterator()) == first


def test_varying_strings_ragged_and_sparse_elements_come_back() -> None:
    def elements(number: tf.Tensor) -> Any:
        ragged = tf.RaggedTensor.from_row_lengths(tf.range(number + 2), [number, 2])
        return tf.range(number), tf.strings.as_string(number), ragged, tf.sparse.from_dense(tf.one_hot(number, 4))

    plain = tf.data.Dataset.range(4).map(elements)
    data = plain.apply(cached("any", memory="4MB"))
    assert data.element_spec == plain.element_spec
    for _ in range(2):
        for one, other in zip(data, plain, strict=True):
            assert np.array_equal(one[0], other[0]) and one[1] == other[1]
            assert one[2].to_list() == other[2].to_list()
            assert np.array_equal(tf.sparse.to_dense(one[3]), tf.sparse.to_dense(other[3]))


def test_what_differs_in_every_pass_is_refused_in_words() -> None:
    numbers_ = tf.data.Dataset.range(9)
    with pytest.raises(InvalidError, match="cached x: the data set in front of it shuffles .*; shuffle behind the ca"):
        numbers_.shuffle(3).map(lambda one: one + 1).apply(cached("x"))
    with pytest.raises(InvalidError, match=r"cached x: the data set in front of it is random \(RandomUniform\)"):
        numbers_.map(lambda one: tf.random.uniform(())).apply(cached("x"))
    generator, flip = tf.random.Generator.from_seed(1), keras.layers.RandomFlip("horizontal")
    with pytest.raises(InvalidError, match=r"is random \(RngReadAndSkip\), and the cache would repeat"):
        numbers_.map(lambda one: generator.uniform(())).apply(cached("x"))
    with pytest.raises(InvalidError, match=r"is random \(Stateless\w+\), and the cache would repeat"):
        numbers_.map(lambda one: flip(tf.zeros((4, 4, 3)), training=True)).apply(cached("x"))
    with pytest.raises(InvalidError, match="in no fixed order"):
        numbers_.map(lambda one: one, num_parallel_calls=2, deterministic=False).apply(cached("x"))
    with pytest.raises(InvalidError, match=r"has no end; put the cache in front of repeat\(\)"):
        numbers_.repeat().apply(cached("x"))
    with pytest.raises(InvalidError, match=r"name \(''\): must be 1 to 64 letters"):
        cached("")
    with pytest.raises(InvalidError, match=r"most \(0\): must be a whole number from 1"):
        cached("x", most=0)
    seed = tf.Variable([1, 2], dtype=tf.int64)
    seeded = numbers_.map(lambda one: tf.random.stateless_uniform((), seed + one))
    data = seeded.apply(cached("seeded", memory="4MB"))
    assert list(data.as_numpy_iterator()) == list(data.as_numpy_iterator())
