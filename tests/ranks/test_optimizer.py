"""What a wrapped optimizer does with the gradients it is given, without any model around it."""

from __future__ import annotations

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import HvdExtError, InvalidError, NotInitializedError, PlanError
from hvd_ext.job import runtime
from hvd_ext.keras.optimizers.optimizer import channels
from hvd_ext.planning import registry
from tests.ranks.steps import assert_equals_plain_training, averaged, gradients, variables
from tests.ranks.training import assert_same_bits_on_all_ranks, buckets_sent, values

OTHERS = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer"}  # no update step of their own
OPTIMIZERS = sorted(
    name
    for name, value in vars(keras.optimizers).items()
    if isinstance(value, type) and issubclass(value, keras.optimizers.Optimizer) and name not in OTHERS
)


@pytest.mark.parametrize(
    "name", [name if name in ("Adam", "SGD") else pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS]
)
def test_every_optimizer_of_keras_equals_plain_training_on_averaged_gradients(name: str) -> None:
    make = getattr(keras.optimizers, name)
    assert_equals_plain_training(hvd.DistributedOptimizer(make(0.05)), make(0.05))


@pytest.mark.parametrize(
    "settings",
    [
        {"global_clipnorm": 0.25},
        {"clipnorm": 0.25},
        {"clipvalue": 0.125},
        {"weight_decay": 0.1},
        {"use_ema": True, "ema_overwrite_frequency": 2},
        {"loss_scale_factor": 4.0},
        {"gradient_accumulation_steps": 3},
        {"momentum": 0.9, "nesterov": True},
    ],
    ids=str,
)
def test_what_keras_does_to_gradients_sees_the_reduced_ones(settings: dict[str, object]) -> None:
    make = keras.optimizers.SGD
    assert_equals_plain_training(hvd.DistributedOptimizer(make(0.5, **settings)), make(0.5, **settings))


def test_a_learning_rate_schedule_counts_steps_as_in_plain_training() -> None:
    def make() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5))

    assert_equals_plain_training(hvd.DistributedOptimizer(make()), make())


@pytest.mark.parametrize(
    ("algorithm", "bucket_nbytes"), [("auto", 1), ("auto", None), *((name, 64) for name in registry.names())]
)
def test_algorithm_and_buckets_change_no_result(algorithm: str, bucket_nbytes: int | None) -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5), algorithm=algorithm, bucket_nbytes=bucket_nbytes)
    if algorithm != "auto" and registry.supports(registry.get(algorithm), runtime.current().tree) is not None:
        with pytest.raises(PlanError, match=algorithm):
            optimizer.apply(gradients(hvd.rank(), 0), variables())
        return
    assert_equals_plain_training(optimizer, keras.optimizers.SGD(0.5))
    (channel,) = channels(optimizer)
    assert channel.layout.travelling == (0, 1, 2)
    assert len(channel.layout.buckets) == (1 if bucket_nbytes is None else 3)
    assert algorithm in ("auto", channel.layout.largest.choice.algorithm)


@pytest.mark.parametrize(("dtype", "rtol"), [("float64", 1e-12), ("float16", 4e-3), ("bfloat16", 3e-2)])
def test_variables_of_other_dtypes_are_reduced_in_their_own(dtype: str, rtol: float) -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
    assert_equals_plain_training(optimizer, keras.optimizers.SGD(0.5), dtype, rtol)
    assert {tensor.dtype for tensor in channels(optimizer)[0].layout.tensors} == {dtype}


def test_sum_adds_the_gradients() -> None:
    ours = variables()
    start = values(ours)
    hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum).apply(gradients(hvd.rank(), 0), ours)
    for before, after, gradient in zip(start, values(ours), averaged(0), strict=True):
        np.testing.assert_allclose(after, before - gradient.numpy() * hvd.size(), rtol=1e-6)


def test_gradients_in_another_floating_dtype_are_cast_to_the_variables() -> None:
    ours = variables()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.apply([tf.cast(gradient, tf.float64) for gradient in gradients(hvd.rank(), 0)], ours)
    assert {tensor.dtype for tensor in channels(optimizer)[0].layout.tensors} == {"float32"}
    assert_same_bits_on_all_ranks(ours)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "tf.function"])
def test_a_gradient_missing_on_some_ranks_counts_as_zero_and_missing_on_all_leaves_its_variable(traced: bool) -> None:
    ours = variables()
    start = values(ours)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, global_clipnorm=1e6))

    def step() -> None:
        first, second, _ = gradients(hvd.rank(), 0)
        optimizer.apply([first if hvd.rank() == 0 else None, second, None], ours)

    step = tf.function(step) if traced else step
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        step()
    first, second, third = values(ours)
    np.testing.assert_allclose(first, start[0] - gradients(0, 0)[0].numpy() / hvd.size(), rtol=1e-6)
    np.testing.assert_allclose(second, start[1] - averaged(0)[1].numpy(), rtol=1e-6)
    np.testing.assert_array_equal(third, start[2])
    assert_same_bits_on_all_ranks(ours)


def test_parts_of_the_variables_may_be_applied_in_turn() -> None:
    ours, reference = variables(), variables()
    optimizer, plain = hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), keras.optimizers.Adam(0.1)
    optimizer.build(ours)
    plain.build(reference)
    for step in range(2):
        for part in (slice(0, 1), slice(1, 3)):
            optimizer.apply(gradients(hvd.rank(), step)[part], ours[part])
            plain.apply(averaged(step)[part], reference[part])
    assert len(channels(optimizer)) == 2
    for got, expected in zip(values(ours), values(reference), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5)


def test_apply_without_variables_uses_those_the_optimizer_was_built_with() -> None:
    ours = variables()
    start = values(ours)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build(ours)
    optimizer.apply(gradients(hvd.rank(), 0))
    for before, after, gradient in zip(start, values(ours), averaged(0), strict=True):
        np.testing.assert_allclose(after, before - gradient.numpy(), rtol=1e-6)


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer")
def test_wrapped_inner_optimizers_train_inside_a_multi_optimizer() -> None:
    def multi(wrap: object) -> keras.optimizers.Optimizer:
        inner = [wrap(keras.optimizers.Adam(0.1)), wrap(keras.optimizers.SGD(0.1))]
        return keras.optimizers.MultiOptimizer(lambda variable: inner[variable.name == "v1"])

    assert_equals_plain_training(multi(hvd.DistributedOptimizer), multi(lambda optimizer: optimizer))


def test_an_optimizer_built_for_one_model_is_refused_by_keras_for_another_and_nothing_is_sent() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.apply(gradients(hvd.rank(), 0), variables())
    before = buckets_sent()
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply(gradients(hvd.rank(), 0), variables())
    assert len(channels(optimizer)) == 1
    assert buckets_sent() == before


def test_variables_of_tensorflow_train_too() -> None:
    variable = tf.Variable([1.0, 2.0, 3.0], name="weights")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    tf.function(lambda: optimizer.apply_gradients([(tf.constant([8.0, 4.0, 2.0]) * hvd.rank(), variable)]))()
    mean_rank = (hvd.size() - 1) / 2
    np.testing.assert_allclose(variable.numpy(), [1 - 8 * mean_rank, 2 - 4 * mean_rank, 3 - 2 * mean_rank], rtol=1e-6)


def test_no_gradients_at_all_is_left_to_keras() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.apply([], [])
    assert channels(optimizer) == ()
    with pytest.raises(ValueError, match="must already be built"):
        optimizer.apply(gradients(0, 0))
    ours = variables()
    with pytest.raises(ValueError, match="No gradients provided"):
        optimizer.apply([None, None, None], ours)
    with pytest.raises(InvalidError, match="got 2 gradients and 3 variables"):
        optimizer.apply(gradients(0, 0)[:2], ours)


def test_a_gradient_of_another_shape_on_one_rank_is_refused_on_all() -> None:
    ours = variables()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.apply(gradients(hvd.rank(), 0), ours)
    before, last = values(ours), hvd.size() - 1
    given: list[tf.Tensor | tf.IndexedSlices] = [*gradients(hvd.rank(), 1)]
    for wrong in (tf.zeros(77), tf.IndexedSlices(tf.zeros([1, 77]), tf.constant([0]))):
        given[0] = wrong if hvd.rank() == last else given[0]
        with pytest.raises(InvalidError, match=r"must be of its shape; it is \(.*77,?\), not"):
            optimizer.apply(given, ours)
    for got, expected in zip(values(ours), before, strict=True):
        np.testing.assert_array_equal(got, expected)
    optimizer.apply(gradients(hvd.rank(), 1), ours)
    assert_same_bits_on_all_ranks(ours)


def test_an_optimizer_that_never_asks_for_the_reduction_is_refused() -> None:
    class Silent(keras.optimizers.SGD):
        def _backend_apply_gradients(self, grads: list[tf.Tensor], trainable_variables: list[keras.Variable]) -> None:
            self._backend_update_step(grads, trainable_variables, self.learning_rate)

    optimizer = hvd.DistributedOptimizer(Silent(1.0))
    with pytest.raises(HvdExtError, match="did not call _clip_gradients"):
        optimizer.apply(gradients(hvd.rank(), 0), variables())


def test_the_channel_is_closed_with_its_optimizer() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.apply(gradients(hvd.rank(), 0), variables())
    (channel,) = channels(optimizer)
    assert channel.is_open
    del optimizer
    gc.collect()
    assert not channel.is_open


def test_after_shutdown_and_init_the_optimizer_goes_on_and_keeps_its_state() -> None:
    ours, reference = variables(), variables()
    optimizer, plain = hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), keras.optimizers.Adam(0.1)
    settings = runtime.current().options
    for step in range(2):
        optimizer.apply(gradients(hvd.rank(), step), ours)
        plain.apply(averaged(step), reference)
        hvd.shutdown()
        with pytest.raises(NotInitializedError, match="init"):
            optimizer.apply(gradients(0, step), ours)
        hvd.init(settings)
    for got, expected in zip(values(ours), values(reference), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5)
    assert_same_bits_on_all_ranks(ours)
