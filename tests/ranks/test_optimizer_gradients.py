"""Gradients that some ranks lack, that come and go, and that are sparse: all equal training on the joined batch."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.keras.optimizers.optimizer import channels
from tests.ranks.compare import assert_close
from tests.ranks.steps import averaged, gradients, variables
from tests.ranks.training import assert_same_bits_on_all_ranks, buckets_sent, values

pytestmark = [pytest.mark.ranks(2), pytest.mark.filterwarnings("ignore:Gradients do not exist")]

ROWS, COLUMNS = 7, 3
SHAPES = {"table": (ROWS, COLUMNS), "bias": (4,)}


def here(rank: int, step: int, index: int) -> bool:
    """Whether a rank has a gradient: the first always, the others in patterns that change; none has v2 in step 0."""
    return index == 0 or (step > 0 and (rank + step + index) % 3 > 0) or (index == 1 and step == 0 and rank == 0)


def partly(rank: int, step: int) -> list[tf.Tensor | None]:
    return [part if here(rank, step, index) else None for index, part in enumerate(gradients(rank, step))]


def joined(step: int) -> list[tf.Tensor | None]:
    every = [partly(rank, step) for rank in range(hvd.size())]
    return [
        tf.add_n([part for part in parts if part is not None]) / hvd.size()
        if any(p is not None for p in parts)
        else None
        for parts in zip(*every, strict=True)
    ]


def assert_near(ours: list[keras.Variable], reference: list[keras.Variable]) -> None:
    assert_close(ours, reference)
    assert_same_bits_on_all_ranks(ours)


@pytest.mark.parametrize("dense", [False, True], ids=["plain", "accumulated"])
def test_gradients_that_come_and_go_on_some_ranks_equal_training_on_the_joined_batch(dense: bool) -> None:
    ours, reference = variables(), variables()
    settings = {"gradient_accumulation_steps": 2} if dense else {}
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9, **settings))
    plain = keras.optimizers.SGD(0.1, momentum=0.9)
    for step in range(4):
        optimizer.apply(partly(hvd.rank(), step), ours)
        if not dense:
            plain.apply(joined(step), reference)
    if dense:
        for step in (0, 2):
            both = [
                None if first is second is None else sum(part for part in (first, second) if part is not None) / 2
                for first, second in zip(joined(step), joined(step + 1), strict=True)
            ]
            plain.apply(both, reference)
    assert_near(ours, reference)
    # one for what the first step had, and a wider one when v2 came
    assert len(channels(optimizer)) <= 2


def test_functions_that_differ_in_their_gradients_take_turns() -> None:
    """As with several losses: each function has its pattern on all ranks; the momentum tells them apart."""
    ours, reference = variables(), variables()
    optimizer, plain = (keras.optimizers.SGD(0.1, momentum=0.9) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(optimizer)

    def step_of(part: slice) -> Callable[[list[tf.Tensor]], None]:
        def step(given: list[tf.Tensor]) -> None:
            optimizer.apply([gradient if n in range(3)[part] else None for n, gradient in enumerate(given)], ours)

        return tf.function(step)

    parts = (slice(0, 3), slice(0, 1), slice(1, 3))
    turns = [step_of(part) for part in parts]
    for step, turn in enumerate((1, 0, 2, 1, 2)):
        turns[turn](gradients(hvd.rank(), step))
        wanted = range(3)[parts[turn]]
        plain.apply([gradient if n in wanted else None for n, gradient in enumerate(averaged(step))], reference)
    assert_near(ours, reference)


def slices(rank: int, step: int) -> tf.IndexedSlices:
    """Rows with repetitions, of which some ranks have the same."""
    rows = [(rank + step) % ROWS, 5, 5, (3 * rank) % ROWS]
    parts = ((np.arange(4 * COLUMNS).reshape(4, COLUMNS) * 3 + rank * 5 + step) % 16 - 7) / 8
    return tf.IndexedSlices(tf.constant(parts, tf.float32), tf.constant(rows), tf.constant([ROWS, COLUMNS]))


def average_of_slices(step: int) -> tf.Tensor:
    return tf.add_n([tf.convert_to_tensor(slices(rank, step)) for rank in range(hvd.size())]) / hvd.size()


def table() -> list[keras.Variable]:
    result = [keras.Variable(np.zeros(shape), dtype="float32", name=name) for name, shape in SHAPES.items()]
    result[0].assign(np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS) % 5 / 8)
    return result


@pytest.mark.parametrize(
    ("make", "settings", "traced"),
    [
        (keras.optimizers.SGD, {"momentum": 0.9, "nesterov": True, "clipvalue": 0.125}, True),
        (keras.optimizers.Adam, {}, True),
        (keras.optimizers.Adagrad, {"global_clipnorm": 0.25}, False),
        (keras.optimizers.SGD, {"loss_scale_factor": 4.0, "clipnorm": 0.25}, False),
        (keras.optimizers.Adam, {"gradient_accumulation_steps": 2, "weight_decay": 0.1, "use_ema": True}, False),
        (keras.optimizers.Adam, {"gradient_accumulation_steps": 2}, True),
    ],
    ids=str,
)
def test_sparse_gradients_equal_training_with_the_dense_average(
    make: type, settings: dict[str, object], traced: bool
) -> None:
    """Keras itself squares repeated rows one by one in Adam: its reference here gets dense gradients."""
    ours, reference = table(), table()
    optimizer, plain = hvd.DistributedOptimizer(make(0.1, **settings)), make(0.1, **settings)
    bias = tf.constant([1.0, 2.0, 3.0, 4.0])

    def step(parts: tf.IndexedSlices) -> None:
        optimizer.apply([parts, bias * (hvd.rank() + 1)], ours)

    step = tf.function(step, reduce_retracing=True) if traced else step
    before = buckets_sent()
    for number in range(2):
        step(slices(hvd.rank(), number))
        plain.apply([average_of_slices(number), bias * (hvd.size() + 1) / 2], reference)
    assert_near(ours, reference)
    (channel,) = channels(optimizer)
    dense = "gradient_accumulation_steps" in settings or "loss_scale_factor" in settings
    assert channel.kinds == ("dd" if dense else "sd")
    assert buckets_sent() - before == (1 if "gradient_accumulation_steps" in settings else 2)


def test_one_dense_gradient_makes_all_dense_and_sparse_as_dense_makes_them_so_at_once() -> None:
    for keywords, gradient, kind in (
        ({}, slices(hvd.rank(), 0) if hvd.rank() else tf.convert_to_tensor(slices(0, 0)), "d"),
        ({"sparse_as_dense": True}, slices(hvd.rank(), 0), "d"),
        ({}, slices(0, 0) if hvd.rank() == 0 else None, "s"),
    ):
        ours = table()[:1]
        start = values(ours)[0]
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum, **keywords)
        optimizer.apply([gradient], ours)
        ranks = range(hvd.size()) if kind == "d" else [0]
        total = sum(tf.convert_to_tensor(slices(rank, 0)).numpy() for rank in ranks)
        np.testing.assert_array_equal(values(ours)[0], start - total)
        assert channels(optimizer)[0].kinds == kind


def test_an_embedding_of_a_rank_without_shape_is_given_the_variables() -> None:
    ours = table()[:1]
    start = values(ours)[0]
    own = slices(hvd.rank(), 0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)
    optimizer.apply([tf.IndexedSlices(own.values, own.indices, None)], ours)
    np.testing.assert_array_equal(values(ours)[0], start - average_of_slices(0).numpy() * hvd.size())
