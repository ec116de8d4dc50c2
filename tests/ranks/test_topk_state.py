"""What sparse steps leave survives: in checkpoints, on other shapes of the job, and when gradients come and go."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext import Compression, state
from hvd_ext.errors import CheckpointError, InvalidError, MismatchError
from hvd_ext.keras.checkpoint import optimizer_states
from hvd_ext.keras.optimizers.optimizer import channels
from tests.ranks.compare import assert_close, assert_equal
from tests.ranks.conftest import LAUNCHED_SIZE
from tests.ranks.topk_jobs import (
    OPTIONS,
    SHAPES,
    apply,
    averaged,
    gradients,
    hosts_of,
    nothing,
    restart,
    step_of,
    variables,
)
from tests.ranks.training import checkpoint, data, model, policy_of, shared, values

pytestmark = [
    pytest.mark.ranks(2),
    pytest.mark.skipif(LAUNCHED_SIZE > 2, reason="the same on any number of ranks"),
    pytest.mark.usefixtures("apart"),
]


def compiled() -> keras.Model:
    made = model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.125), compression=hvd.TopK(**OPTIONS))
    made.compile(optimizer, "mse", run_eagerly=True)
    return made


def train(made: keras.Model, steps: int, salt: int = 0) -> keras.Model:
    for step in range(steps):
        made.train_on_batch(*data(hvd.rank(), 4, salt + step))
    return made


def take_nothing(made: keras.Model) -> None:
    """Take a step of zeros, which applies what waits if a flush was asked for."""
    apply(made.optimizer, nothing([weight.shape for weight in made.trainable_weights]), made.trainable_weights)


def wrapped(weights: list[keras.Variable], **options: Any) -> keras.optimizers.Optimizer:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=hvd.TopK(**OPTIONS, **options))
    optimizer.build(weights)
    return optimizer


def test_on_other_hosts_the_sum_of_what_waits_is_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory, first = shared(tmp_path), train(compiled(), 3)
    checkpoint(first, directory).save(1)
    hvd.flush(first.optimizer)
    take_nothing(first)
    restart([hvd.size()])  # all ranks on one host: other shares
    second = compiled()
    with caplog.at_level(logging.INFO, "hvd_ext"):
        assert checkpoint(second, directory).restore() == (1, 0)
        take_nothing(second)  # nothing is dropped on one host: what waits is applied at once
    assert_close(second.weights, first.weights)
    if hvd.size() > 1 and hvd.rank() == 0:
        assert "residuals and velocities are redistributed over 2 ranks" in caplog.text


def test_what_was_restored_is_saved_again_before_a_step(tmp_path: Path) -> None:
    directory, first = shared(tmp_path), train(compiled(), 3)
    checkpoint(first, directory).save(1)
    train(first, 1, salt=3)
    for epoch in (1, 2, 3):
        made = compiled()
        callback = checkpoint(made, directory)
        assert callback.restore() == (epoch, 0)
        callback.save(epoch + 1)
    train(made, 1, salt=3)
    assert_equal(made.weights, first.weights)


def states_of(ranks: int) -> list[dict[str, np.ndarray]]:
    """What four ranks of two hosts may have saved of the third variable and of the first."""
    found = []
    for rank in range(ranks):
        half = (np.arange(20 + rank % 2 * 5) + rank * 100).astype(np.float32)
        found.append({"ranks": np.array(ranks), "steps": np.array(7), "flushing": np.array(True)})
        found[-1][f"residual/2/{rank % 2 * 20}/v2"] = half
        if rank % 2 == 0:
            found[-1]["residual/0/0/v0"] = np.full(42, rank + 1, np.float32)
    return found


def test_of_another_number_of_ranks_every_update_that_waits_is_kept() -> None:
    weights, states = variables(), states_of(4)
    optimizer = wrapped(weights)
    optimizer._hvd_ext.reducer.restore({0: (None, lambda: iter(states))})
    apply(optimizer, nothing(), weights)  # a flush was asked for
    expected = [part.reshape(-1) for part in nothing()]
    for saved in states:
        for key, array in saved.items():
            if "/" in key:
                _, tensor, offset, _ = key.split("/")
                expected[int(tensor)][int(offset) : int(offset) + array.size] -= array / 4
    assert_equal([part.reshape(-1) for part in values(weights)], expected)
    assert policy_of(optimizer).feedback.steps == 8


def test_files_that_a_rank_cannot_read_are_named_and_training_begins_with_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def everyone() -> Any:
        if hvd.rank() == hvd.size() - 1:
            raise CheckpointError("checkpoint-000001: rank-00001.npz cannot be read")
        return iter(states_of(4))

    weights = variables()
    optimizer = wrapped(weights)
    optimizer._hvd_ext.reducer.restore({0: (None, everyone)})
    apply(optimizer, nothing(), weights)
    assert not any(np.any(weight) for weight in values(weights))
    if hvd.rank() == 0:
        assert "rank-00001.npz cannot be read; save to a disk that all ranks share" in caplog.text


def test_tapes_keep_what_waits_too_and_it_is_registered() -> None:
    variable = tf.Variable(np.zeros((4, 8), np.float32))

    def step(factor: np.ndarray) -> tf.Tensor:
        tape = hvd.DistributedGradientTape(tf.GradientTape(), compression=hvd.TopK(0.25, min_elements=1, wire="fp32"))
        with tape:
            loss = tf.reduce_sum(variable * factor)
        return tape.gradient(loss, [variable])[0]

    factor = (np.arange(32).reshape(4, 8) * (hvd.rank() + 1)).astype(np.float32)
    sent = step(factor)
    assert np.count_nonzero(sent) == (31 if hvd.size() == 1 else 8)
    again = step(np.zeros((4, 8), np.float32))
    assert np.count_nonzero(again) == (0 if hvd.size() == 1 else 8)
    (owner,) = [name for name in state.collect() if name.startswith("top-k: tape")]
    assert any(key.startswith("residual/0/") for key in state.collect()[owner])
    state.unregister(owner)


def test_what_a_tape_cannot_do_is_refused() -> None:
    with pytest.raises(InvalidError, match="momentum_correction takes over an optimizer's momentum"):
        hvd.DistributedGradientTape(tf.GradientTape(), compression=hvd.TopK(momentum_correction=True))
    with pytest.raises(InvalidError, match="check_every .*a tape does not see the weights change"):
        hvd.DistributedGradientTape(tf.GradientTape(), check_every=1)
    variable = tf.Variable([[2.0, 3.0]])
    carries: list[dict[str, Any]] = [{"compression": hvd.TopK(min_elements=1)}, {"delay": 1}, {"sync": "solo"}]
    for options in carries:
        with tf.GradientTape() as outer:
            tape = hvd.DistributedGradientTape(tf.GradientTape(), **options)
            with tape:
                loss = tf.reduce_sum(variable**3)
            gradient = tape.gradient(loss, [variable])[0]
        with pytest.raises(InvalidError, match="cannot be differentiated"):
            outer.gradient(gradient, variable)


def test_weights_that_differ_are_found_and_named() -> None:
    weights = variables()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), check_every=2)
    apply(optimizer, gradients(hvd.rank(), 0), weights)
    weights[1].assign(weights[1] + (1e-6 if hvd.rank() == 1 else 0.0))
    if hvd.size() == 1:
        apply(optimizer, gradients(hvd.rank(), 1), weights)
        return
    with pytest.raises(MismatchError, match="'v1' must have the same bits on all ranks; rank 1 has"):
        apply(optimizer, gradients(hvd.rank(), 1), weights)

    step, own = step_of(optimizer, weights), gradients(hvd.rank(), 2)
    step(own)
    with pytest.raises(tf.errors.InvalidArgumentError, match="'v1' must have the same bits on all ranks"):
        step(own)


def test_with_a_loss_scale_what_waits_is_in_plain_units() -> None:
    options = hvd.TopK(**OPTIONS, momentum_correction=True)
    trained = []
    for scale in (1.0, 8.0):
        inner = keras.optimizers.SGD(1.0, momentum=0.5)
        made = keras.optimizers.LossScaleOptimizer(inner, initial_scale=scale, dynamic_growth_steps=2)
        optimizer = hvd.DistributedOptimizer(made, compression=options)
        weights = variables()
        for number in range(5):
            own = [tf.constant(one) for one in gradients(hvd.rank(), number)]
            if number == 3:  # left out, and the scale is halved
                own = [part * np.inf for part in own]
            current = made.dynamic_scale if made.built else scale
            optimizer.apply([part * current for part in own], weights)
        assert not any(np.any(slot.numpy()) for slot in inner.momentums)
        assert (inner.get_config()["momentum"], int(inner.iterations.numpy())) == (0.5, 4)
        trained.append(values(weights))
    assert_equal(*trained)


def test_on_one_host_it_is_said_once_that_nothing_is_selected(caplog: pytest.LogCaptureFixture) -> None:
    restart([hvd.size()])
    with caplog.at_level(logging.WARNING, "hvd_ext"):
        for _ in range(2):
            weights = variables()
            apply(wrapped(weights), gradients(hvd.rank(), 0), weights)
    said = [one for one in caplog.messages if "TopK changes nothing in this job" in one]
    assert len(said) == (hvd.rank() == 0)
    assert all(f"there is one host ({hvd.size()} rank" in one for one in said)


def test_what_cannot_be_flushed_is_refused() -> None:
    with pytest.raises(InvalidError, match="flush .*other optimizers keep no gradients back"):
        hvd.flush(hvd.DistributedOptimizer(keras.optimizers.SGD()))


@pytest.mark.parametrize(("traced", "first"), [(False, "both"), (True, "both"), (True, "alone")])
def test_what_waits_is_applied_although_its_variable_has_no_gradient_now(traced: bool, first: str) -> None:
    """A flush holds for each traced function that has a channel of its own, as those that begin with one variable."""
    weights, given = variables()[::2], nothing()[::2]  # the vector would travel whole
    optimizer = wrapped(weights)
    step = step_of(optimizer, weights, traced)
    for number in range(6):
        there = (1, (number + (first == "both")) % 2)
        step([part if has else None for part, has in zip(gradients(hvd.rank(), number)[::2], there, strict=True)])
        for total, part, has in zip(given, averaged(number)[::2], there, strict=True):
            total += part * has
    assert len(channels(optimizer)) == 2 or first == "both"
    hvd.flush(optimizer)
    step(nothing()[::2])
    step([nothing()[0], None] if first == "alone" else nothing()[::2])
    assert_equal(weights, [-total for total in given])


def test_the_compression_of_the_job_does_not_round_what_is_selected_from() -> None:
    restart(hosts_of(hvd.size()), compression=Compression.fp16)
    weights = variables()[:1]
    optimizer = wrapped(weights)
    fine = np.float32(1 + 2**-16)  # float16 has no such value
    optimizer.apply([tf.constant(gradients(hvd.rank(), 0)[0] * fine)], weights)
    hvd.flush(optimizer)
    optimizer.apply([tf.zeros_like(weights[0])], weights)
    np.testing.assert_array_equal(-weights[0].numpy(), averaged(0)[0] * fine)


def test_accumulation_under_a_loss_scale_is_refused() -> None:
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    with pytest.raises(InvalidError, match="every pass of a gradient accumulation is reduced"):
        hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(inner), compression=hvd.TopK())


def test_a_clip_of_gradients_whose_norm_overflows_leaves_the_step_out(caplog: pytest.LogCaptureFixture) -> None:
    weights = variables()[:1]
    optimizer = wrapped(weights, clip=1.0)
    with caplog.at_level(logging.WARNING, "hvd_ext"):
        optimizer.apply([tf.fill(SHAPES[0], 3e19 if hvd.rank() == 0 else 0.0)], weights)
    assert ("all ranks have skipped the step" in caplog.text) == (hvd.rank() == 0)
    assert int(optimizer.iterations) == 0


def test_what_waits_at_a_shutdown_is_lost_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    weights = variables()[:1]
    optimizer = wrapped(weights)
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
    optimizer = wrapped(weights)
    step = step_of(optimizer, weights)
    first, second = gradients(hvd.rank(), 0)[::2]
    step([first, None])
    step([first, second])
    (kept,) = optimizer._hvd_ext.reducer.sets
    saved = kept.policy.save()
    step([first, None])
    assert len(kept.channels) == 2
    kept.policy.load(saved, lambda: iter(()))
    again = kept.policy.save()
    assert saved.keys() == again.keys()
    assert all(np.array_equal(saved[key], again[key]) for key in saved)


def test_a_save_before_the_first_step_says_what_it_cannot_have(caplog: pytest.LogCaptureFixture) -> None:
    made = model()
    made.compile(wrapped(variables()[:1]), "mse")
    made.optimizer._hvd_ext.reducer.restore({0: (None, lambda: iter(()))})  # of another number of ranks
    with caplog.at_level(logging.WARNING, "hvd_ext"):
        assert optimizer_states.collect(made) == {}
    said = "saved before its first step on another number of ranks: what the ranks carry over (top-k) is not in"
    assert (said in caplog.text) == (hvd.rank() == 0)
