"""Nothing that waits on the ranks is lost where gradients come and go, functions differ, or the job rounds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext import Compression
from hvd_ext.errors import InvalidError, MismatchError
from hvd_ext.keras.checkpoint import optimizer_states
from hvd_ext.keras.optimizers.optimizer import channels
from tests.ranks.conftest import LAUNCHED_SIZE
from tests.ranks.topk_jobs import OPTIONS, SHAPES, gradients, hosts_of, restart, variables
from tests.ranks.training import model

pytestmark = [
    pytest.mark.skipif(LAUNCHED_SIZE > 2, reason="the same on any number of ranks"),
    pytest.mark.usefixtures("apart"),
]


def optimizer_of(weights: list[keras.Variable], **options: Any) -> keras.optimizers.Optimizer:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=hvd.TopK(**{**OPTIONS, **options}))
    optimizer.build(weights)
    return optimizer


def average(index: int, step: int) -> np.ndarray:
    own = [gradients(rank, step)[index] for rank in range(hvd.size())]
    return sum(own[1:], own[0]) / np.float32(hvd.size())


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_what_waits_is_applied_although_its_variable_has_no_gradient_now(traced: bool) -> None:
    weights = variables()[::2]  # the vector would travel whole
    optimizer = optimizer_of(weights)
    places, given = (0, 2), [np.zeros(SHAPES[0], np.float32), np.zeros(SHAPES[2], np.float32)]

    def step_with(*has: bool) -> Callable[..., None]:
        def step(*own: tf.Tensor) -> None:
            rest = iter(own)
            optimizer.apply([next(rest) if there else None for there in has], weights)

        return tf.function(step, autograph=False) if traced else step

    both, first = step_with(True, True), step_with(True, False)
    for number in range(6):
        present = (True, number % 2 == 0)
        own = [gradients(hvd.rank(), number)[place] for place in places]
        (both if all(present) else first)(*[tf.constant(one) for one, there in zip(own, present, strict=True) if there])
        for at, place in enumerate(places):
            given[at] += average(place, number) if present[at] else 0
    hvd.flush(optimizer)
    both(*[tf.zeros_like(weight) for weight in weights])
    for weight, sums in zip(weights, given, strict=True):
        np.testing.assert_array_equal(-weight.numpy(), sums)


def test_a_flush_holds_for_each_traced_function_that_has_a_channel_of_its_own() -> None:
    weights = variables()[::2]
    optimizer = optimizer_of(weights)
    alone = tf.function(lambda a: optimizer.apply([a, None], weights), autograph=False)
    both = tf.function(lambda a, b: optimizer.apply([a, b], weights), autograph=False)
    given = [np.zeros(SHAPES[0], np.float32), np.zeros(SHAPES[2], np.float32)]
    for number in range(6):
        own = gradients(hvd.rank(), number)
        given[0] += average(0, number)
        if number in (2, 4):
            both(tf.constant(own[0]), tf.constant(own[2]))
            given[1] += average(2, number)
        else:
            alone(tf.constant(own[0]))
    assert len(channels(optimizer)) == 2
    hvd.flush(optimizer)
    both(*[tf.zeros_like(weight) for weight in weights])
    alone(tf.zeros_like(weights[0]))
    for weight, sums in zip(weights, given, strict=True):
        np.testing.assert_array_equal(-weight.numpy(), sums)


def test_the_compression_of_the_job_does_not_round_what_is_selected_from() -> None:
    restart(hosts_of(hvd.size()), compression=Compression.fp16)
    weights = variables()[:1]
    optimizer = optimizer_of(weights)
    fine = np.float32(1 + 2**-16)  # float16 has no such value
    optimizer.apply([tf.constant(gradients(hvd.rank(), 0)[0] * fine)], weights)
    hvd.flush(optimizer)
    optimizer.apply([tf.zeros_like(weights[0])], weights)
    np.testing.assert_array_equal(-weights[0].numpy(), average(0, 0) * fine)


def test_accumulation_under_a_loss_scale_is_refused() -> None:
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    with pytest.raises(InvalidError, match="every pass of a gradient accumulation is reduced"):
        hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(inner), compression=hvd.TopK())


def test_a_clip_of_gradients_whose_norm_overflows_leaves_the_step_out() -> None:
    weights = variables()[:1]
    optimizer = optimizer_of(weights, clip=1.0)
    optimizer.apply([tf.fill(SHAPES[0], 3e19 if hvd.rank() == 0 else 0.0)], weights)
    assert optimizer._hvd_ext_reducer.sets[0].feedback.skipped == 1
    assert int(optimizer.iterations) == 0


def test_what_waits_at_a_shutdown_is_lost_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    weights = variables()[:1]
    optimizer = optimizer_of(weights)
    optimizer.apply([tf.constant(gradients(hvd.rank(), 0)[0])], weights)
    restart(hosts_of(hvd.size()))
    with caplog.at_level(logging.WARNING, "hvd_ext"):
        optimizer.apply([tf.constant(gradients(hvd.rank(), 1)[0])], weights)
    assert "hvd_ext was shut down, and the residuals are lost" in caplog.text


def test_ranks_that_have_counted_differently_meet_in_the_check() -> None:
    weights = variables()[:1]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), check_every=2)
    optimizer.build(weights)
    optimizer.iterations.assign(5 + hvd.rank())
    own = [tf.zeros_like(weights[0])]
    optimizer.apply(own, weights)
    if hvd.size() == 1:
        optimizer.apply(own, weights)
        return
    with pytest.raises(MismatchError, match="'iterations' must have the same bits on all ranks; rank 1 has"):
        optimizer.apply(own, weights)


def test_what_is_restored_replaces_what_waits_in_every_channel() -> None:
    weights = variables()[::2]
    optimizer = optimizer_of(weights)
    alone = tf.function(lambda a: optimizer.apply([a, None], weights), autograph=False)
    both = tf.function(lambda a, b: optimizer.apply([a, b], weights), autograph=False)
    own = [tf.constant(one) for one in gradients(hvd.rank(), 0)]
    alone(own[0])
    both(own[0], own[2])
    (kept,) = optimizer._hvd_ext_reducer.sets
    saved = kept.save()
    alone(own[0])
    assert len(kept.channels) == 2
    kept.load(saved, lambda: iter(()))
    again = kept.save()
    assert saved.keys() == again.keys()
    assert all(np.array_equal(saved[key], again[key]) for key in saved)


def test_a_save_before_the_first_step_says_what_it_cannot_have(caplog: pytest.LogCaptureFixture) -> None:
    made = model()
    made.compile(optimizer_of(variables()[:1]), "mse")
    made.optimizer._hvd_ext_reducer.restore({0: (None, lambda: iter(()))})  # of another number of ranks
    with caplog.at_level(logging.WARNING, "hvd_ext"):
        assert optimizer_states.collect(made) == {}
    said = "saved before its first step on another number of ranks: what the ranks carry over (top-k) is not in"
    assert (said in caplog.text) == (hvd.rank() == 0)
