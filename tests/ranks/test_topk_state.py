"""What sparse steps leave survives: in checkpoints, on other shapes of the job, and when channels change."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext import state
from hvd_ext.errors import CheckpointError, InvalidError, MismatchError
from hvd_ext.keras.optimizers.optimizer import channels
from hvd_ext.state import arrays, folder, manifest
from tests.ranks.conftest import LAUNCHED_SIZE
from tests.ranks.topk_jobs import OPTIONS, SHAPES, apply, gradients, restart, variables
from tests.ranks.training import FEATURES, TARGETS, data, fill, values

pytestmark = [
    pytest.mark.skipif(LAUNCHED_SIZE > 2, reason="the same on any number of ranks"),
    pytest.mark.usefixtures("apart"),
]


def model(**options: Any) -> keras.Model:
    made = keras.Sequential([keras.layers.Input((FEATURES,)), keras.layers.Dense(8), keras.layers.Dense(TARGETS)])
    fill(made.weights)
    momentum = 0.5 if options.get("momentum_correction") else 0.0
    optimizer = keras.optimizers.SGD(0.125, momentum=momentum)
    made.compile(
        hvd.DistributedOptimizer(optimizer, compression=hvd.TopK(**{**OPTIONS, **options})), "mse", run_eagerly=True
    )
    return made


def train(made: keras.Model, steps: int, salt: int = 0) -> None:
    for step in range(steps):
        made.train_on_batch(*data(hvd.rank(), 4, salt + step))


def checkpoint(made: keras.Model, folder: Path) -> hvd.callbacks.Checkpoint:
    found = hvd.callbacks.Checkpoint(folder)
    found.set_model(made)
    return found


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """One directory for all ranks."""
    return Path(hvd.broadcast_object(str(tmp_path / "job")))


def test_on_the_same_shape_training_goes_on_bit_for_bit(shared: Path) -> None:
    options = {"momentum_correction": True, "warmup": hvd.Warmup(3, densities=(0.5, 0.25))}
    whole = model(**options)
    train(whole, 4)
    saved = checkpoint(whole, shared)
    assert saved.restore() == (0, 0)
    saved.save(1)
    train(whole, 2, salt=4)
    second = model(**options)
    fill(second.weights, salt=3)
    assert checkpoint(second, shared).restore() == (1, 0)
    train(second, 2, salt=4)
    for got, wanted in zip(values(second.weights), values(whole.weights), strict=True):
        np.testing.assert_array_equal(got, wanted)
    # a model that begins at the same weights with nothing waiting becomes another
    third = model(**options)
    assert checkpoint(third, shared).restore() == (1, 0)
    third.optimizer._hvd_ext_reducer.restore({})
    third.optimizer._hvd_ext_reducer._sets.clear()
    train(third, 2, salt=4)
    same = [np.array_equal(*pair) for pair in zip(values(third.weights), values(whole.weights), strict=True)]
    assert hvd.size() == 1 or not all(same)


def test_on_other_hosts_the_sum_of_what_waits_is_the_same(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = model()
    train(first, 3)
    checkpoint(first, shared).save(1)
    zeros = [np.zeros(weight.shape, np.float32) for weight in first.trainable_weights]
    hvd.flush(first.optimizer)
    first.optimizer.apply([tf.constant(zero) for zero in zeros], first.trainable_weights)
    restart([hvd.size()])  # all ranks on one host: other shares
    second = model()
    with caplog.at_level(logging.INFO, "hvd_ext"):
        assert checkpoint(second, shared).restore() == (1, 0)
        # nothing is dropped on one host: what waits is applied at once
        second.optimizer.apply([tf.constant(zero) for zero in zeros], second.trainable_weights)
    for got, wanted in zip(values(second.weights), values(first.weights), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-7)
    if hvd.size() > 1 and hvd.rank() == 0:
        assert "residuals and velocities are redistributed over 2 ranks" in caplog.text


def test_what_was_restored_is_saved_again_before_a_step(shared: Path) -> None:
    first = model()
    train(first, 3)
    checkpoint(first, shared).save(1)
    for epoch in (1, 2):
        made = model()
        one = checkpoint(made, shared)
        assert one.restore() == (epoch, 0)
        one.save(epoch + 1)
    train(first, 1, salt=3)
    train(made, 1, salt=3)
    for got, wanted in zip(values(made.weights), values(first.weights), strict=True):
        np.testing.assert_array_equal(got, wanted)
    last = model()
    assert checkpoint(last, shared).restore() == (3, 0)
    train(last, 1, salt=3)
    for got, wanted in zip(values(last.weights), values(first.weights), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_a_checkpoint_of_twice_as_many_ranks_is_read_by_all(shared: Path) -> None:
    first = model()
    train(first, 3)
    checkpoint(first, shared).save(1)
    if hvd.rank() == 0:  # every old rank has a twin
        path = folder.path_of(shared, 1)
        found, size = manifest.read(path), hvd.size()
        for rank in range(size):
            with (path / manifest.rank_file(rank)).open("rb") as file:
                sections = arrays.read(file)
            sections["state:top-k: optimizer 0, variables 0"]["ranks"] = np.array(2 * size)
            for twin in (rank, rank + size):
                with (path / manifest.rank_file(twin)).open("wb") as file:
                    arrays.write(file, sections)
        files = [manifest.described(path / manifest.rank_file(rank)) for rank in range(2 * size)]
        twice = found.model_copy(update={"ranks": 2 * size, "files": [found.files[0], *files]})
        (path / manifest.FILE).write_text(twice.text(), encoding="utf-8")
    hvd.barrier()
    second = model()
    assert checkpoint(second, shared).restore() == (1, 0)
    for made in (first, second):  # twice the sum for half as many ranks is the same update
        hvd.flush(made.optimizer)
        zeros = [tf.zeros(weight.shape) for weight in made.trainable_weights]
        made.optimizer.apply(zeros, made.trainable_weights)
    for got, wanted in zip(values(second.weights), values(first.weights), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-7)
    assert not any(np.array_equal(*pair) for pair in zip(values(first.weights), values(model().weights), strict=True))


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
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=hvd.TopK(**OPTIONS))
    optimizer._hvd_ext_reducer.restore({0: (None, lambda: iter(states))})
    apply(optimizer, [np.zeros(shape, np.float32) for shape in SHAPES], weights)  # a flush was asked for
    expected = [np.zeros(shape, np.float32).reshape(-1) for shape in SHAPES]
    for saved in states:
        for key, array in saved.items():
            if "/" in key:
                _, tensor, offset, _ = key.split("/")
                expected[int(tensor)][int(offset) : int(offset) + array.size] -= array / 4
    for got, wanted in zip(values(weights), expected, strict=True):
        np.testing.assert_array_equal(got.reshape(-1), wanted)
    assert optimizer._hvd_ext_reducer.sets[0].feedback.steps == 8


def test_files_that_a_rank_cannot_read_are_named_and_training_begins_with_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def everyone() -> Any:
        if hvd.rank() == hvd.size() - 1:
            raise CheckpointError("checkpoint-000001: rank-00001.npz cannot be read")
        return iter(states_of(4))

    weights = variables()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=hvd.TopK(**OPTIONS))
    optimizer._hvd_ext_reducer.restore({0: (None, everyone)})
    apply(optimizer, [np.zeros(shape, np.float32) for shape in SHAPES], weights)
    assert not any(np.any(weight) for weight in values(weights))
    if hvd.rank() == 0:
        assert "rank-00001.npz cannot be read; save to a disk that all ranks share" in caplog.text


def test_a_variable_whose_gradient_comes_later_takes_nothing_from_the_others() -> None:
    weights = variables()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=hvd.TopK(**OPTIONS))
    total = [np.zeros(shape, np.float64) for shape in SHAPES]
    for step in range(3):
        present = (0,) if step == 0 else (0, 1, 2)
        own = gradients(hvd.rank(), step)
        optimizer.apply([tf.constant(own[index]) if index in present else None for index in range(3)], weights)
        for rank in range(hvd.size()):
            for index in present:
                total[index] += gradients(rank, step)[index]
    assert len(channels(optimizer)) == 2
    hvd.flush(optimizer)
    apply(optimizer, [np.zeros(shape, np.float32) for shape in SHAPES], weights)
    for got, wanted in zip(values(weights), total, strict=True):
        np.testing.assert_allclose(got, -wanted / hvd.size(), rtol=1e-6)


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

    @tf.function(autograph=False)
    def step(*own: tf.Tensor) -> None:
        optimizer.apply(list(own), weights)

    own = [tf.constant(one) for one in gradients(hvd.rank(), 2)]
    step(*own)
    with pytest.raises(tf.errors.InvalidArgumentError, match="'v1' must have the same bits on all ranks"):
        step(*own)


def test_with_a_loss_scale_what_waits_is_in_plain_units() -> None:
    options = hvd.TopK(0.125, min_elements=10, wire="fp32", momentum_correction=True)
    found = []
    for scale in (1.0, 8.0):
        inner = keras.optimizers.SGD(1.0, momentum=0.5)
        made = keras.optimizers.LossScaleOptimizer(inner, initial_scale=scale, dynamic_growth_steps=2)
        optimizer = hvd.DistributedOptimizer(made, compression=options)
        weights = variables()
        for number in range(5):
            own = [tf.constant(one) for one in gradients(hvd.rank(), number)]
            if number == 3:  # left out, and the scale is halved
                own = [one * np.inf for one in own]
            current = made.dynamic_scale if made.built else scale
            optimizer.apply([one * current for one in own], weights)
        assert not any(np.any(slot.numpy()) for slot in inner.momentums)
        assert (inner.get_config()["momentum"], int(inner.iterations.numpy())) == (0.5, 4)
        found.append(values(weights))
    for got, wanted in zip(*found, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_on_one_host_it_is_said_once_that_nothing_is_selected(caplog: pytest.LogCaptureFixture) -> None:
    restart([hvd.size()])
    with caplog.at_level(logging.WARNING, "hvd_ext"):
        for _ in range(2):
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=hvd.TopK(**OPTIONS))
            apply(optimizer, gradients(hvd.rank(), 0), variables())
    said = [one for one in caplog.messages if "TopK changes nothing in this job" in one]
    assert len(said) == (hvd.rank() == 0)
    assert all(f"there is one host ({hvd.size()} rank" in one for one in said)


def test_what_cannot_be_flushed_is_refused() -> None:
    with pytest.raises(InvalidError, match="flush .*other optimizers keep no gradients back"):
        hvd.flush(hvd.DistributedOptimizer(keras.optimizers.SGD()))
