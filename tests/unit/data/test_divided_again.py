"""What is left of an epoch, divided among another number of ranks: each sample comes once."""

from __future__ import annotations

import random

import pytest
import tensorflow as tf

from hvd_ext.data.steps import Steps


def taken(steps: Steps, epoch: int, first: int, last: int) -> list[int]:
    """Gives the samples of a rank in the steps [first, last) of an epoch."""
    steps.cursor.set(epoch, first)
    batches = steps.batches(lambda numbers, seeds, parts: numbers, tf.TensorSpec([steps.rows], tf.int64))
    return [int(number) for batch in batches.take(last - first) for number in batch]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("remainder", ["drop", "repeat"])
def test_each_sample_comes_once_over_several_worlds(seed, remainder):
    draw = random.Random(seed)
    samples, batch, epoch = draw.randint(40, 120), draw.randint(1, 5), draw.randint(0, 2)
    seen: list[int] = []
    position, parts = 0, None
    sizes = [draw.randint(1, 5) for _ in range(3)]
    for number, size in enumerate(sizes):
        ranks = [
            Steps("data", samples, batch, rank=rank, size=size, parts=parts, shuffle=True, seed=7, remainder=remainder)
            for rank in range(size)
        ]
        parts = ranks[0].cursor.parts if parts is None else parts
        first = 0
        for rank in ranks if number else ():
            rank.cursor.again = rank.divide_again(epoch, position, parts)
            assert rank.cursor.again == ranks[0].divide_again(epoch, position, parts)
            first = rank.cursor.again.step
        is_last = number + 1 == len(sizes)
        last = ranks[0].number if is_last else min(ranks[0].number, first + draw.randint(0, 3))
        for rank in ranks:
            seen += taken(rank, epoch, first, last)
        position = ranks[0].position_of(epoch, last)
    if remainder == "repeat":
        assert set(seen) == set(range(samples))
        assert len(seen) < samples + parts + sum(sizes)
    else:
        assert len(set(seen)) == len(seen)
        assert len(seen) > samples - parts - sum(sizes)


def test_the_next_epoch_is_divided_as_ever():
    ranks = [Steps("data", 60, 4, rank=rank, size=3, shuffle=True, seed=1) for rank in range(3)]
    for rank in ranks:
        rank.cursor.again = rank.divide_again(0, 24, 3)
        assert rank.cursor.again.step == 2
    assert sorted(number for rank in ranks for number in taken(rank, 1, 0, rank.number)) == list(range(60))
    assert len({number for rank in ranks for number in taken(rank, 0, 2, rank.number)}) == 36


def test_a_position_is_that_of_all_ranks():
    steps = Steps("data", 60, 4, rank=1, size=3)
    assert [steps.position_of(2, step) for step in (0, 1, 5, 6)] == [0, 12, 60, 60]
    steps.cursor.again = steps.divide_again(2, 24, 3)
    assert [steps.position_of(2, step) for step in (2, 3, 5)] == [24, 36, 60]
    assert steps.position_of(3, 1) == 12
