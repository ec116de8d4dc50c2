"""The steps of an epoch: equal on all ranks, every sample once, and the same samples in each step on fewer ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvd_ext.data.steps import Steps
from hvd_ext.errors import InvalidError
from tests import epoch_order as order


@functools.cache
def dataset(steps: Steps) -> tf.data.Dataset:
    """Make the data set once: its graph takes most of the time."""
    return steps.batches(lambda numbers, *_: numbers, tf.TensorSpec([steps.rows], tf.int64))


def taken(steps: Steps) -> list[list[int]]:
    """Give the numbers of the samples of each step of the next epoch."""
    return [numbers.tolist() for numbers in dataset(steps).as_numpy_iterator()]


def flat(lists: Iterable[list[int]]) -> list[int]:
    """Join lists."""
    return [number for each in lists for number in each]


def ranks(samples: int, batch: int, size: int, **options: Any) -> list[Steps]:
    """Give the steps of all ranks that share samples, with the batch of all of them together."""
    return [Steps("x", samples, batch // size, rank=rank, size=size, **options) for rank in range(size)]


def joined(of_ranks: list[Steps]) -> list[list[int]]:
    """Give the samples of each step of the next epoch, of all ranks together, sorted."""
    return [sorted(flat(step)) for step in zip(*map(taken, of_ranks), strict=True)]


@pytest.mark.parametrize("remainder", ["drop", "repeat"])
def test_four_two_and_one_ranks_have_the_same_samples_in_each_step_of_every_epoch(remainder: str) -> None:
    samples = 103
    jobs = [ranks(samples, 24, size, parts=4, shuffle=True, seed=3, remainder=remainder) for size in (4, 2, 1)]
    epochs = []
    for _ in range(2):
        first, *others = map(joined, jobs)
        assert others == [first, first]
        epochs.append(first)
        seen = sorted(flat(first))
        whole = set(range(samples))
        assert len(seen) == (samples // 4 * 4 if remainder == "drop" else -(-samples // 4) * 4)
        assert set(seen) == whole or (remainder == "drop" and len(whole - set(seen)) == samples % 4)
    assert epochs[0] != epochs[1]


def test_as_many_ranks_as_parts_read_their_own_parts_in_every_epoch() -> None:
    for rank, steps in enumerate(ranks(51, 15, 3, shuffle=True)):
        epochs = [flat(taken(steps)) for _ in range(3)]
        assert len({tuple(each) for each in epochs}) == 3
        assert [sorted(each) for each in epochs] == [list(range(rank, 51, 3))] * 3


def test_steps_are_full_where_they_are_asked_for_and_begin_again_after_the_last_sample() -> None:
    steps = Steps("x", 10, 4, shuffle=True, steps=4, seed=9)
    (first, second) = (taken(steps) for _ in range(2))
    assert [len(each) for each in first] == [4] * 4
    assert flat(first)[10:] == flat(first)[:6]
    assert sorted(flat(first)[:10]) == list(range(10))
    assert first != second
    assert dataset(steps).element_spec.shape == (4,)
    few = Steps("x", 10, 4, shuffle=True, steps=1, seed=9)
    assert [taken(few), taken(few)] == [first[:1], second[:1]]


def test_the_last_smaller_step_may_be_left_out_and_uneven_ranks_share_every_sample() -> None:
    assert [len(each) for each in taken(Steps("x", 10, 4))] == [4, 4, 2]
    assert [len(each) for each in taken(Steps("x", 10, 4, drop_remainder=True))] == [4, 4]
    uneven = [flat(taken(each)) for each in ranks(11, 8, 4, remainder="uneven", shuffle=True)]
    assert [len(each) for each in uneven] == [3, 3, 3, 2]
    assert sorted(flat(uneven)) == list(range(11))
    assert taken(Steps("x", 1, 4, rank=1, size=2, remainder="uneven")) == []
    own = taken(Steps("x", 3, 2, elements=5, shuffle=True))
    assert [len(each) for each in own] == [2, 2, 1]
    assert flat(own)[3:] == flat(own)[:2]


def test_the_first_step_that_is_needed_stands_in_for_those_that_nobody_needs() -> None:
    read: list[int] = []

    def look(numbers: np.ndarray) -> np.ndarray:
        read.extend(numbers)
        return numbers.astype(np.float32) + 1

    def batch(numbers: tf.Tensor, *_: tf.Tensor) -> dict[str, Any]:
        x = tf.ensure_shape(tf.numpy_function(look, [numbers], tf.float32), numbers.shape)
        text = tf.strings.as_string(numbers)
        return {"x": x, "s": tf.sparse.from_dense(x), "t": text, "r": tf.RaggedTensor.from_row_lengths(x, [1] * 4)}

    spec = {"x": tf.TensorSpec([4], tf.float32), "s": tf.SparseTensorSpec([4], tf.float32)}
    spec |= {"t": tf.TensorSpec([None], tf.string), "r": tf.RaggedTensorSpec([4, None], tf.float32)}
    steps = Steps("x", 20, 4, shuffle=True, drop_remainder=True)
    whole = order.numbers(np.arange(20), seed=0, epoch=0, samples=20).tolist()
    steps.cursor.set(0, skipped=3)
    found = list(steps.batches(batch, spec))
    needed = [whole[place : place + 4] for place in (12, 16)]
    assert [each["x"].numpy().tolist() for each in found] == [
        [number + 1 for number in step] for step in [needed[0]] * 3 + needed
    ]
    for each in found[:3]:
        assert each["t"].numpy().tolist() == found[3]["t"].numpy().tolist()
        assert each["r"].to_list() == found[3]["r"].to_list()
        assert tf.sparse.to_dense(each["s"]).numpy().tolist() == each["x"].numpy().tolist()
    assert sorted(read) == sorted(whole[12:] + needed[0])  # it is read once for all of them


def test_a_smaller_last_step_stands_in_for_no_other() -> None:
    steps = Steps("x", 18, 4)
    steps.cursor.set(0, skipped=4)
    assert taken(steps) == [[12, 13, 14, 15]] * 4 + [[16, 17]]


def test_a_thousand_steps_that_nobody_needs_are_given_without_their_memory() -> None:
    read: list[int] = []

    def once(numbers: tf.Tensor, *_: tf.Tensor) -> tf.Tensor:
        flag = tf.numpy_function(lambda number: read.append(number) or np.uint8(1), [numbers[0]], tf.uint8)
        return tf.fill([128, 224, 224, 3], tf.ensure_shape(flag, []))

    steps = Steps("x", 1_281_167, 128, drop_remainder=True)
    steps.cursor.set(0, skipped=1000)
    batches = iter(steps.batches(once, tf.TensorSpec([128, 224, 224, 3], tf.uint8)))
    first = next(batches)
    places = {np.asarray(first).ctypes.data, *(np.asarray(next(batches)).ctypes.data for _ in range(999))}
    assert len(places) == 1  # all are one tensor, so 19 GB are neither written nor held
    assert min(read) == read[0] == 128_000
    assert len(read) < 10  # some of those that are needed may have been read by now


def test_parts_that_do_not_fit_are_refused_and_parts_of_an_earlier_job_leave_the_number_of_steps() -> None:
    for parts in (0, 11):
        with pytest.raises(InvalidError, match=rf"x: parts \({parts}\): must be a whole number from 1 to 10"):
            Steps("x", 10, 2, parts=parts)
    steps = Steps("x", 103, 20)
    before = steps.number
    steps.cursor.set(0, parts=4)  # uses 100 samples in 5 steps; Keras has been told 6
    assert (before, len(taken(steps))) == (6, 6)
