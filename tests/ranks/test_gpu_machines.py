"""A machine with a GPU, as far as one can pretend: XLA runs on CPUs too, so "auto" really becomes True here."""

from __future__ import annotations

import dataclasses
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.job import runtime
from hvd_ext.keras.optimizers import models
from hvd_ext.tensorflow import devices
from tests import pages
from tests.ranks.training import assert_same_bits_on_all_ranks

pytestmark = pytest.mark.ranks(2)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow lists a GPU when it is asked for all devices; it computes on the CPU."""
    real = tf.config.list_physical_devices

    def listed(kind: str | None = None) -> list[tf.config.PhysicalDevice]:
        pretended = [tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")] if kind in (None, "GPU") else []
        return [*real(kind), *pretended]

    monkeypatch.setattr(tf.config, "list_physical_devices", listed)


class OwnStep(keras.Sequential):
    """A model with a training step of its own, which nobody can divide."""

    def train_step(self, data: tuple[tf.Tensor, ...]) -> dict[str, tf.Tensor]:
        """Train a batch."""
        return super().train_step(data)


def compiled(
    optimizer: keras.optimizers.Optimizer, kind: type[keras.Sequential] = keras.Sequential, **how: object
) -> keras.Model:
    keras.utils.set_random_seed(7)
    model = kind([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", **how)
    return model


def ours(kind: type[keras.Sequential] = keras.Sequential, **how: object) -> keras.Model:
    return compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), kind, **how)


def trains(model: keras.Model, rank: int) -> None:
    x = np.array([[1.0, 2.0], [3.0, -1.0]], np.float32) * (rank + 1)
    model.train_on_batch(x, np.ones((2, 1), np.float32))
    assert_same_bits_on_all_ranks(model.weights)


def test_xla_is_switched_off_for_a_step_that_cannot_be_divided(
    gpu: None, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    plain = compiled(keras.optimizers.SGD(0.1))
    assert plain.jit_compile  # so the pretended GPU works
    with caplog.at_level(logging.INFO, "hvd_ext"):
        divided, whole, asked = ours(), ours(OwnStep), ours(OwnStep, jit_compile=True)
        for model in (divided, whole, whole, asked):
            trains(model, rank)
        assert divided.jit_compile and not whole.jit_compile and not asked.jit_compile
    lines = [record for record in caplog.records if "jit_compile is switched off" in record.message]
    assert len(lines) == (2 if rank == 0 else 0)  # once for each model
    other = compiled(keras.optimizers.SGD(0.1), OwnStep)
    other.make_train_function()
    assert other.jit_compile  # other models keep theirs


class Pair(keras.Model):
    """A model with optimizers of its own, as a GAN has them."""

    def compile(self, **how: object) -> None:
        """Make the model and its optimizers."""
        super().compile(**how)
        self.inner = ours(jit_compile=False)

    def train_step(self, data: tuple[tf.Tensor, ...]) -> dict[str, tf.Tensor]:
        """Train a batch."""
        x, y, *_ = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.inner(x) - y))
        self.one.apply(tape.gradient(loss, self.inner.trainable_variables), self.inner.trainable_variables)
        return {"loss": loss}


def test_xla_is_switched_off_for_a_model_with_optimizers_of_its_own(gpu: None, rank: int) -> None:
    model = Pair()
    model.compile()
    assert model.jit_compile
    model.one = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    trains(model, rank)
    assert not model.jit_compile


@pytest.mark.parametrize("kind", [keras.Sequential, OwnStep])
def test_a_model_compiled_before_its_optimizer_is_wrapped_is_no_other(
    gpu: None, rank: int, kind: type[keras.Sequential]
) -> None:
    model = compiled(keras.optimizers.SGD(0.1), kind)
    assert model.jit_compile
    model.optimizer = hvd.DistributedOptimizer(model.optimizer)
    trains(model, rank)
    assert model.jit_compile == (kind is not OwnStep)


def test_sync_batch_normalization_is_not_compiled_and_watching_twice_changes_nothing(gpu: None) -> None:
    model = keras.Sequential([keras.Input((2,)), hvd.SyncBatchNormalization()])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    assert not model.jit_compile
    models.watch(keras.Model)
    models.watch(keras.Model)
    again = ours(OwnStep)
    again.make_train_function()
    assert not again.jit_compile
    assert not models.wrapped(None) and not models.wrapped(keras.optimizers.SGD(0.1))


def test_the_example_of_the_page_trains(rank: int) -> None:
    model = pages.run("docs/gpu.md", 1)["model"]
    model.train_on_batch(np.ones((2, 3), np.float32) * rank, np.ones((2, 10), np.float32))
    assert_same_bits_on_all_ranks(model.weights)


def test_without_gpus_there_is_nothing_to_pin() -> None:
    assert hvd.pin_gpu() is None
    assert not devices.on_gpu([keras.Variable(np.zeros(3)), tf.Variable(1.0)])
    assert not devices.on_gpu([tf.TensorSpec([3])])


def test_more_ranks_than_gpus_are_refused_on_all_ranks(gpu: None, size: int) -> None:
    if size == 1:
        pytest.skip("one rank has the pretended GPU for itself: run under mpirun -np 2 or more")
    with pytest.raises(hvd.errors.InvalidError, match=r"pin_gpu: host .* has 1 GPUs for .* none for rank 1"):
        hvd.pin_gpu()
    assert hvd.allgather_object(1) == [1] * size


def test_ranks_that_share_several_gpus_are_warned_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    monkeypatch.setattr(devices, "_logged", set())
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind=None: [0, 1])
    for _ in range(2):
        devices.warn_of_shared()
    lines = [record.message for record in caplog.records if "sees 2 GPUs" in record.message]
    assert len(lines) == (1 if size > 1 else 0)
    assert all("hvd_ext.pin_gpu()" in line for line in lines)


def test_gradients_of_a_job_with_one_rank_stay_on_its_gpu(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    def traced(**options: object) -> list[str]:
        variable = keras.Variable(np.zeros(3, np.float32))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options)
        step = tf.function(lambda x: optimizer.apply([x], [variable]))
        step(tf.ones(3))
        np.testing.assert_allclose(variable, -0.1, rtol=1e-3)
        operations = step.get_concrete_function(tf.TensorSpec([3])).graph.get_operations()
        return [one.type for one in operations if one.type.startswith("HvdExt>")]

    assert traced()  # the variables are on the CPU
    monkeypatch.setattr(devices, "on_gpu", lambda variables: True)
    assert bool(traced()) == (size > 1)
    assert traced(compression=hvd.Compression.fp16)
    assert traced(compression=hvd.TopK(0.5, min_elements=0))


def test_gradients_are_handed_over_on_the_gpu_that_has_the_buckets(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Traced only: there is no GPU here. Other options take their gradients where the buckets are, too."""
    gpu = "/job:localhost/replica:0/task:0/device:GPU:0"
    monkeypatch.setattr(devices, "device_of", lambda variable: gpu)
    job = runtime.current()
    monkeypatch.setattr(job, "options", dataclasses.replace(job.options, gpu_buckets=True))

    def placed(**options: object) -> dict[str, bool]:
        variables = [keras.Variable(np.zeros(3, np.float32)) for _ in range(2)]
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=hvd.Compression.fp16, **options)
        step = tf.function(lambda *x: optimizer.apply(x, variables))
        graph = step.get_concrete_function(*[tf.TensorSpec([3])] * 2).graph
        ours = [one for one in graph.get_operations() if one.type.startswith("HvdExt>")]
        return {one.type.removeprefix("HvdExt>"): "GPU:0" in one.device.upper() for one in ours}

    one_op = placed()
    assert one_op.pop("ReduceStep") and not any(one_op.values())
    several = placed(bucket_nbytes=4)
    assert several.pop("Submit") and several.pop("Collect") and several and not any(several.values())
    for options in ({"delay": 1}, {"sync": "solo"}):  # results that a later step takes lie on the host
        late = placed(**options)
        assert "Collect" in late and not any(late.values())


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
