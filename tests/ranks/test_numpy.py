"""The engine with NumPy arrays, without TensorFlow: a whole step of a channel."""

from __future__ import annotations

import numpy as np
import pytest

import hvd_ext as hvd
from hvd_ext.errors import InvalidError
from hvd_ext.job import runtime
from hvd_ext.planning import planner
from hvd_ext.planning.layout import BucketLayout, Layout
from hvd_ext.planning.tensors import Tensor
from tests.ranks.numbers import total, values

pytestmark = pytest.mark.ranks(1, 2)

SIZES = {"first": 7, "empty": 0, "large": 30_011}


@pytest.fixture
def channel() -> int:
    job = runtime.current()
    plan = planner.allreduce_plan(job.tree, nbytes=4 * sum(SIZES.values())).plan
    tensors = tuple(Tensor(name, (elements,), "float32") for name, elements in SIZES.items())
    buckets = tuple(BucketLayout("float32", places, hvd.Sum, plan, 1 << 16) for places in ((1, 0), (2,)))
    handle = job.open("numpy", Layout(tensors, buckets))
    yield handle
    job.engine.close_channel(handle)


def arrays(rank: int, step: int) -> list[np.ndarray]:
    return [values(rank, (n,), i + step).astype(np.float32) for i, n in enumerate(SIZES.values())]


def assert_sums(outputs: list[np.ndarray], step: int, size: int) -> None:
    for index, (output, n) in enumerate(zip(outputs, SIZES.values(), strict=True)):
        np.testing.assert_array_equal(output, total(size, (n,), index + step))


@pytest.mark.parametrize("in_place", [False, True])
def test_every_step_gives_the_sums(channel: int, in_place: bool, rank: int, size: int) -> None:
    for step in range(3):
        inputs = arrays(rank, step)
        outputs = inputs if in_place else [np.zeros_like(array) for array in inputs]
        runtime.current().engine.reduce(channel, inputs, outputs)
        assert_sums(outputs, step, size)


@pytest.mark.parametrize("wrong", ["dtype", "size", "strides", "number"])
def test_arrays_that_are_not_as_declared_are_refused_and_the_next_step_works(
    channel: int, wrong: str, rank: int, size: int
) -> None:
    engine, good = runtime.current().engine, arrays(rank, 0)
    bad = {
        "dtype": [good[0].astype(np.float64), *good[1:]],
        "size": [good[0][1:], *good[1:]],
        "strides": [np.zeros((7, 2), np.float32)[:, 0], *good[1:]],
        "number": good[1:],
    }[wrong]
    with pytest.raises(InvalidError, match="reduce of 'numpy'"):
        engine.reduce(channel, bad, good)
    engine.reduce(channel, good, good)
    np.testing.assert_array_equal(good[0], total(size, (7,), 0))


@pytest.mark.parametrize("late", [0, 1])
def test_tensors_are_handed_over_one_by_one_in_any_order_and_collected_together_at_once_or_one_step_late(
    channel: int, late: int, rank: int, size: int
) -> None:
    inputs = arrays(rank, 0)
    outputs = [np.zeros_like(array) for array in inputs]
    parts = runtime.current().engine.in_parts(channel, inputs, outputs)
    for step in range(4 + late):
        if step < 4:
            for array, values_now in zip(inputs, arrays(rank, step), strict=True):
                array[:] = values_now
            parts.begin()
            # the ranks' orders differ; that of the buckets is one
            for tensor in np.roll(range(3), step + rank):
                parts.submit(int(tensor))
        if step >= late:
            parts.collect(before=late if step < 4 else 0)
            assert_sums(outputs, step - late, size)


def test_a_step_in_parts_that_misses_a_tensor_or_has_one_twice_says_so(channel: int, rank: int, size: int) -> None:
    engine, good = runtime.current().engine, arrays(rank, 0)
    with pytest.raises(InvalidError, match="reduce of 'numpy'"):
        engine.in_parts(channel, good[1:], good)
    parts = engine.in_parts(channel, good, good)
    parts.begin()
    parts.submit(0)
    with pytest.raises(InvalidError, match="submitted twice"):
        parts.submit(0)
    with pytest.raises(InvalidError, match="left half-way"):
        parts.begin()
    engine.reduce(channel, good, good)
    np.testing.assert_array_equal(good[0], total(size, (7,), 0))
