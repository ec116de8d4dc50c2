"""A machine with a GPU, as far as one can pretend: XLA runs on CPUs too, so "auto" really becomes True here."""

from __future__ import annotations

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.keras.optimizers import models
from hvd_ext.tensorflow import devices


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow lists a GPU when it is asked for all devices; it computes on the CPU."""
    real = tf.config.list_physical_devices

    def listed(kind: str | None = None) -> list[tf.config.PhysicalDevice]:
        pretended = [tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")] if kind in (None, "GPU") else []
        return [*real(kind), *pretended]

    monkeypatch.setattr(tf.config, "list_physical_devices", listed)


def compiled(optimizer: keras.optimizers.Optimizer, **how: object) -> keras.Model:
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", **how)
    return model


def trains(model: keras.Model, rank: int) -> None:
    x = np.array([[1.0, 2.0], [3.0, -1.0]], np.float32) * (rank + 1)
    model.train_on_batch(x, np.ones((2, 1), np.float32))


def test_auto_is_switched_off_for_a_model_whose_optimizer_communicates(
    gpu: None, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    plain = compiled(keras.optimizers.SGD(0.1))
    assert plain.jit_compile  # so the pretended GPU works
    with caplog.at_level(logging.INFO, "hvd_ext"):
        ours = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
        assert not ours.jit_compile
        trains(ours, rank)
        weights = hvd.allgather_object([weight.tolist() for weight in ours.get_weights()])
        assert all(theirs == weights[0] for theirs in weights)
    lines = [record for record in caplog.records if "jit_compile is switched off" in record.message]
    assert len(lines) == (1 if rank == 0 else 0)
    assert compiled(keras.optimizers.SGD(0.1)).jit_compile  # other models keep theirs


def test_a_model_compiled_before_its_optimizer_is_wrapped_is_switched_off_too(gpu: None, rank: int) -> None:
    model = compiled(keras.optimizers.SGD(0.1))
    assert model.jit_compile
    model.optimizer = hvd.DistributedOptimizer(model.optimizer)
    assert not model.jit_compile
    trains(model, rank)


def test_jit_compile_that_a_user_asks_for_is_refused_in_words_and_the_next_step_works(rank: int) -> None:
    ours = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), jit_compile=True)
    with pytest.raises(hvd.errors.InvalidError, match=r"XLA.*jit_compile=False"):
        trains(ours, rank)
    ours.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
    trains(ours, rank)


def test_watching_twice_changes_nothing(gpu: None) -> None:
    models.watch(keras.Model)
    models.watch(keras.Model)
    assert not compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))).jit_compile
    assert not models.wrapped(None) and not models.wrapped(keras.optimizers.SGD(0.1))


def test_without_gpus_there_is_nothing_to_pin() -> None:
    assert hvd.pin_gpu() is None


def test_more_ranks_than_gpus_are_refused_on_all_ranks(gpu: None, size: int) -> None:
    if size == 1:
        pytest.skip("one rank has the pretended GPU for itself: run under mpirun -np 2 or more")
    with pytest.raises(hvd.errors.InvalidError, match=r"pin_gpu: host .* has 1 GPUs for .* none for rank 1"):
        hvd.pin_gpu()
    assert hvd.allgather_object(1) == [1] * size


def test_ranks_that_share_several_gpus_are_warned_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    monkeypatch.setattr(devices, "_said", set())
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind=None: [0, 1])
    for _ in range(2):
        devices.warn_of_shared()
    lines = [record.message for record in caplog.records if "sees 2 GPUs" in record.message]
    assert len(lines) == (1 if size > 1 else 0)
    assert all("hvd_ext.pin_gpu()" in line for line in lines)


def test_our_ops_are_on_the_cpu_whatever_device_the_caller_is_on(rank: int, size: int) -> None:
    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.device("GPU:0"):
            return hvd.allreduce(x, op=hvd.Sum)

    graph = step.get_concrete_function(tf.TensorSpec([2])).graph
    placed = {op.type: op.device for op in graph.get_operations() if op.type.startswith("HvdExt>")}
    assert placed
    assert all("CPU" in device.upper() for device in placed.values()), placed
    sums = step(tf.constant([1.0, 2.0]) * (rank + 1)).numpy()
    np.testing.assert_array_equal(sums, np.array([1.0, 2.0]) * size * (size + 1) / 2)
