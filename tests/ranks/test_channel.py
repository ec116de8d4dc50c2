"""Channels: one optimizer's gradients, opened together and reduced step by step."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import InvalidError, NotInitializedError
from hvd_ext.options import Options
from hvd_ext.planning.tensors import Tensor
from hvd_ext.tensorflow import ops
from hvd_ext.tensorflow.gradients import registration
from hvd_ext.tensorflow.gradients.registration import Channel
from tests.ranks.numbers import total, values

SHAPES = {"kernel": (7, 5), "bias": (5,), "scalar": (), "empty": (0, 2), "large": (40_009,)}


def specs(dtype: str = "float32") -> list[Tensor]:
    return [Tensor(name, shape, dtype) for name, shape in SHAPES.items()]


def opened(name: str = "test", **choices: object) -> Channel:
    return registration.open_channel(name, specs(), Options(op=hvd.Sum).replace(**choices))


def gradients(rank: int, step: int = 0) -> list[tf.Tensor]:
    return [tf.constant(values(rank, shape, i + step), tf.float32) for i, shape in enumerate(SHAPES.values())]


def assert_reduced(results: list[tf.Tensor | None], size: int, step: int = 0) -> None:
    for index, (result, shape) in enumerate(zip(results, SHAPES.values(), strict=True)):
        assert result is not None
        np.testing.assert_array_equal(result, total(size, shape, index + step))


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("bucket_nbytes", [1, 400, 8 << 20])
def test_every_step_gives_the_sums(bucket_nbytes: int, traced: bool, rank: int, size: int) -> None:
    channel = opened(bucket_nbytes=bucket_nbytes)
    reduce = tf.function(channel.reduce) if traced else channel.reduce
    for step in range(3):
        assert_reduced(reduce(gradients(rank, step)), size, step)
    channel.close()


@pytest.mark.parametrize("traced", [False, True])
def test_large_results_belong_to_their_owner_whatever_later_steps_and_its_own_ops_do(
    traced: bool, rank: int, size: int
) -> None:
    # Results of 1 MB and more are not copied: they are the bucket's memory, which the next step must not use again.
    shapes = {"first": (600, 500), "small": (3,), "second": (300_000,)}
    channel = registration.open_channel("kept", [Tensor(name, shape, "float32") for name, shape in shapes.items()])

    def step(number: tf.Tensor) -> list[tf.Tensor]:
        reduced = channel.reduce([tf.fill(shape, tf.cast(number + rank, tf.float32)) for shape in shapes.values()])
        # TensorFlow may add in the memory of a result that nobody else uses
        return [reduced[0], reduced[1] + 1.0, reduced[2] + 1.0]  # type: ignore[operator]

    run = tf.function(step) if traced else step
    kept = [run(tf.constant(number)) for number in range(6)]
    channel.close()
    for number, results in enumerate(kept):
        mean = number + (size - 1) / 2
        for result, shape, more in zip(results, shapes.values(), (0, 1, 1), strict=True):
            np.testing.assert_array_equal(result, np.full(shape, mean + more, np.float32))


def test_dtypes_may_be_mixed_and_averages_are_taken(rank: int, size: int) -> None:
    dtypes = ["float32", "bfloat16", "float64", "float16", "float32", "int32"]
    channel = registration.open_channel("mixed", [Tensor(f"g{i}", (9,), d) for i, d in enumerate(dtypes)])
    results = channel.reduce([tf.cast(values(rank, (9,), i) * size, d) for i, d in enumerate(dtypes)])
    for index, (result, dtype) in enumerate(zip(results, dtypes, strict=True)):
        assert result is not None
        assert result.dtype.name == dtype
        np.testing.assert_array_equal(tf.cast(result, tf.int64), total(size, (9,), index))
    channel.close()


def test_a_gradient_that_some_ranks_lack_counts_as_zero_there_and_one_that_all_lack_is_left(
    rank: int, size: int
) -> None:
    has = {"everywhere": True, "last rank": rank == size - 1, "nowhere": False}
    tensors, kinds = [Tensor(name, (4,), "float32") for name in has], "".join("-d"[here] for here in has.values())
    channel = registration.open_channel("presence", tensors, Options(op=hvd.Sum), kinds=kinds)
    assert channel.kinds == "dd-"
    own = [tf.constant(values(rank, (4,), i), tf.float32) if here else None for i, here in enumerate(has.values())]
    everywhere, last, nowhere = channel.reduce(own)
    np.testing.assert_array_equal(everywhere, total(size, (4,)))
    np.testing.assert_array_equal(last, values(size - 1, (4,), 1))
    assert nowhere is None
    with pytest.raises(InvalidError, match=r"'nowhere'.*no rank had it when channel 'presence' was opened"):
        channel.reduce([own[0], own[1], tf.zeros(4)])
    channel.close()


@pytest.mark.parametrize("present", [False, True])
def test_a_channel_may_have_nothing_to_reduce(present: bool) -> None:
    channel = registration.open_channel("nothing", [Tensor("g", (2,), "float32")] * present, kinds="-" * present)
    assert channel.reduce([None] * present) == [None] * present
    assert channel.layout.largest is None
    channel.close()


def test_several_steps_in_one_graph_keep_their_order(rank: int, size: int) -> None:
    channel = opened(bucket_nbytes=400)

    @tf.function
    def unrolled(first: list[tf.Tensor], second: list[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        return channel.reduce(first), channel.reduce(second)

    @tf.function
    def looped(x: list[tf.Tensor]) -> list[tf.Tensor]:
        sums = [tf.zeros_like(g) for g in x]
        for turn in tf.range(6):
            reduced = channel.reduce([g * tf.cast(turn, g.dtype) for g in x])
            sums = [s + r for s, r in zip(sums, reduced)]  # noqa: B905 - AutoGraph knows no strict
        return sums

    for turn in range(3):
        a, b = unrolled(gradients(rank, turn), gradients(rank, turn + 3))
        assert_reduced(a, size, turn)
        assert_reduced(b, size, turn + 3)
        for index, (result, shape) in enumerate(zip(looped(gradients(rank, turn)), SHAPES.values(), strict=True)):
            np.testing.assert_array_equal(result, 15 * total(size, shape, index + turn))
    channel.close()


def operations(graph: tf.Graph) -> dict[str, list[tf.Operation]]:
    found: dict[str, list[tf.Operation]] = {}
    for operation in graph.get_operations():
        found.setdefault(operation.type, []).append(operation)
    return found


def test_in_a_graph_submits_wait_for_the_beginning_of_the_step_and_each_bucket_for_its_own_submits(rank: int) -> None:
    channel = opened(bucket_nbytes=400)
    step = tf.function(channel.reduce).get_concrete_function(gradients(rank))
    kinds = operations(step.graph)
    assert len(kinds["HvdExt>BeginStep"]) == 1
    assert all(submit.control_inputs == kinds["HvdExt>BeginStep"] for submit in kinds["HvdExt>Submit"])
    buckets = [bucket.tensors for bucket in channel.layout.buckets]
    assert len(buckets) > 1
    assert [tuple(collect.get_attr("tensors")) for collect in kinds["HvdExt>Collect"]] == buckets
    for collect, bucket in zip(kinds["HvdExt>Collect"], buckets, strict=True):
        assert list(collect.control_inputs) == []
        assert [tensor.op.type for tensor in collect.inputs] == ["HvdExt>Submit"] * len(collect.inputs)
        assert sorted(n for ticket in collect.inputs for n in ticket.op.get_attr("tensors")) == sorted(bucket)
    channel.close()


def test_an_op_collects_what_the_engine_has_put_into_several_buckets(rank: int, size: int) -> None:
    channel = opened(bucket_nbytes=400)
    assert len(channel.layout.buckets) > 1
    given, everything = gradients(rank), list(range(len(SHAPES)))
    for traced in (False, True):

        def step(*tensors: tf.Tensor) -> list[tf.Tensor]:
            begin = ops.begin_step(channel=channel.handle)
            with tf.control_dependencies([] if begin is None else [begin]):
                ticket = ops.submit(tensors, channel=channel.handle, tensors=everything)
            shapes = list(SHAPES.values())
            return ops.collect([ticket], "float32", shapes, channel=channel.handle, tensors=everything)

        assert_reduced((tf.function(step) if traced else step)(*given), size)
    channel.close()


def test_gradients_of_two_steps_are_not_collected_together(rank: int) -> None:
    channel = registration.open_channel("two steps", [Tensor("g", (3,), "float32")])
    tickets = []
    for _ in range(2):
        ops.begin_step(channel=channel.handle)
        tickets.append(ops.submit([tf.zeros(3)], channel=channel.handle, tensors=[0]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="gradients of steps 1 and 2 are collected together"):
        ops.collect(tickets, "float32", [(3,)], channel=channel.handle, tensors=[0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="must have equal lengths; got 2 and 1"):
        ops.submit([tf.zeros(3)], channel=channel.handle, tensors=[0, 1])
    ops.collect(tickets[1:], "float32", [(3,)], channel=channel.handle, tensors=[0])
    channel.close()


def test_tensors_that_are_together_are_ready_when_all_are_and_can_be_differentiated() -> None:
    @tf.function
    def step(x: tf.Tensor, limit: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.control_dependencies([tf.debugging.assert_less(x, limit, message="told to fail")]):
            late = tf.identity(x)
        early, _ = ops.together([x * 3.0, late])
        return changed.assign(early), tf.gradients(early, x)[0]

    changed = tf.Variable(0.0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="told to fail"):
        step(tf.constant(2.0), tf.constant(1.0))
    assert float(changed) == 0
    value, gradient = step(tf.constant(2.0), tf.constant(9.0))
    assert (float(value), float(gradient)) == (6, 3)


def test_a_step_that_was_left_half_way_is_named_and_a_cancelled_step_does_no_harm(rank: int, size: int) -> None:
    broken, other = opened("broken", bucket_nbytes=1), opened("other")

    @tf.function
    def step(x: list[tf.Tensor]) -> list[tf.Tensor]:
        with tf.control_dependencies([tf.debugging.assert_less(tf.reduce_sum(x[0]), -1.0, message="told to fail")]):
            last = tf.identity(x[-1])
        return broken.reduce([*x[:-1], last])

    with pytest.raises(tf.errors.InvalidArgumentError, match="told to fail"):
        step(gradients(rank))
    assert hvd.allgather_object("past the broken step") == ["past the broken step"] * size
    assert_reduced(other.reduce(gradients(rank)), size)
    broken.close()
    other.close()


def test_gradients_that_do_not_fit_are_refused_with_their_name(rank: int, size: int) -> None:
    channel = opened()
    good = gradients(rank)
    with pytest.raises(InvalidError, match="one gradient or None for each of its 5 tensors; got 2"):
        channel.reduce(good[:2])
    with pytest.raises(InvalidError, match=r"'kernel': it is float32\[5, 7\].*float32\[7, 5\]"):
        channel.reduce([tf.transpose(good[0]), *good[1:]])
    with pytest.raises(InvalidError, match=r"'bias': it is float64\[5\].*float32\[5\]"):
        channel.reduce([good[0], tf.cast(good[1], tf.float64), *good[2:]])
    with pytest.raises(InvalidError, match="'bias': it is an IndexedSlices"):
        channel.reduce([good[0], tf.IndexedSlices(tf.zeros(1), [0], [5]), *good[2:]])
    assert_reduced(channel.reduce(good), size)
    channel.close()


def test_a_closed_channel_says_so(rank: int) -> None:
    channel = opened("closed one")
    assert channel.is_open
    channel.close()
    channel.close()
    assert not channel.is_open
    with pytest.raises(NotInitializedError, match="'closed one': it is closed"):
        channel.reduce(gradients(rank))


def test_a_tape_takes_reduced_gradients_for_constants(rank: int) -> None:
    channel = opened()
    x = gradients(rank)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.add_n([tf.reduce_sum(g) for g in channel.reduce(x) if g is not None])
    assert tape.gradient(y, x) == [None] * len(x)
    channel.close()
