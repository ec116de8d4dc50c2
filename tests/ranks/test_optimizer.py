"""What a wrapped optimizer does with the gradients it is given; pairs of its options are in test_pairs.py."""

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
from tests.ranks.compare import assert_close, assert_equal
from tests.ranks.steps import assert_equals_plain_training, averaged, gradients, variables
from tests.ranks.training import assert_same_bits_on_all_ranks, buckets_sent, data, fill, values

pytestmark = pytest.mark.ranks(1, 2)

OTHERS = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer"}  # no update step of their own
OPTIMIZERS = sorted(
    name
    for name, value in vars(keras.optimizers).items()
    if isinstance(value, type) and issubclass(value, keras.optimizers.Optimizer) and name not in OTHERS
)


def wrapped_sgd(rate: float = 1.0, **keywords: object) -> keras.optimizers.Optimizer:
    return hvd.DistributedOptimizer(keras.optimizers.SGD(rate), **keywords)


@pytest.mark.parametrize(
    "name", [name if name in ("Adam", "SGD") else pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS]
)
def test_every_optimizer_of_keras_equals_plain_training_on_averaged_gradients(name: str) -> None:
    make = getattr(keras.optimizers, name)
    assert_equals_plain_training(hvd.DistributedOptimizer(make(0.05)), make(0.05))


@pytest.mark.parametrize(
    "settings",
    [
        {"clipvalue": 0.125, "weight_decay": 0.1, "momentum": 0.9, "nesterov": True},
        {"loss_scale_factor": 4.0, "gradient_accumulation_steps": 3},
        {"learning_rate": keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5), "global_clipnorm": 0.25},
    ],
    ids=str,
)
def test_what_keras_does_to_gradients_sees_the_reduced_ones(settings: dict[str, object]) -> None:
    """Other settings are features of test_pairs.py."""
    settings = {"learning_rate": 0.5, **settings}
    make = keras.optimizers.SGD
    assert_equals_plain_training(hvd.DistributedOptimizer(make(**settings)), make(**settings))


@pytest.mark.parametrize(
    ("algorithm", "bucket_nbytes"), [("auto", 1), ("auto", None), *((name, 64) for name in registry.names())]
)
def test_algorithm_and_buckets_change_no_result(algorithm: str, bucket_nbytes: int | None) -> None:
    optimizer = wrapped_sgd(0.5, algorithm=algorithm, bucket_nbytes=bucket_nbytes)
    if algorithm != "auto" and registry.supports(registry.get(algorithm), runtime.current().tree) is not None:
        with pytest.raises(PlanError, match=algorithm):
            optimizer.apply(gradients(hvd.rank(), 0), variables())
        return
    assert_equals_plain_training(optimizer, keras.optimizers.SGD(0.5))
    (channel,) = channels(optimizer)
    assert channel.layout.sent_tensors == (0, 1, 2)
    assert len(channel.layout.buckets) == (1 if bucket_nbytes is None else 3)
    assert algorithm in ("auto", channel.layout.largest.choice.algorithm)


@pytest.mark.parametrize(("dtype", "rtol"), [("float64", 1e-12), ("float16", 4e-3), ("bfloat16", 3e-2)])
def test_variables_of_other_dtypes_are_reduced_in_their_own(dtype: str, rtol: float) -> None:
    optimizer = wrapped_sgd(0.5)
    assert_equals_plain_training(optimizer, keras.optimizers.SGD(0.5), dtype, rtol)
    assert {tensor.dtype for tensor in channels(optimizer)[0].layout.tensors} == {dtype}


def test_gradients_in_another_floating_dtype_are_cast_to_the_variables() -> None:
    ours, optimizer = variables(), wrapped_sgd()
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
    expected = [start[0] - gradients(0, 0)[0].numpy() / hvd.size(), start[1] - averaged(0)[1].numpy()]
    assert_close(ours[:2], expected)
    np.testing.assert_array_equal(ours[2], start[2])
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
    assert_close(ours, reference)


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer")
def test_wrapped_inner_optimizers_train_inside_a_multi_optimizer() -> None:
    def multi(wrap: object) -> keras.optimizers.Optimizer:
        inner = [wrap(keras.optimizers.Adam(0.1)), wrap(keras.optimizers.SGD(0.1))]
        return keras.optimizers.MultiOptimizer(lambda variable: inner[variable.name == "v1"])

    assert_equals_plain_training(multi(hvd.DistributedOptimizer), multi(lambda optimizer: optimizer))


def test_an_optimizer_applies_to_the_variables_it_was_built_with_and_to_no_others() -> None:
    ours, optimizer = variables(), wrapped_sgd()
    start = values(ours)
    optimizer.build(ours)
    optimizer.apply(gradients(hvd.rank(), 0))
    assert_close(ours, [before - gradient.numpy() for before, gradient in zip(start, averaged(0), strict=True)])
    before = buckets_sent()
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply(gradients(hvd.rank(), 0), variables())
    assert len(channels(optimizer)) == 1
    assert buckets_sent() == before


def test_no_gradients_at_all_is_left_to_keras() -> None:
    optimizer = wrapped_sgd()
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
    ours, optimizer = variables(), wrapped_sgd()
    optimizer.apply(gradients(hvd.rank(), 0), ours)
    before, last = values(ours), hvd.size() - 1
    given: list[tf.Tensor | tf.IndexedSlices] = [*gradients(hvd.rank(), 1)]
    for wrong in (tf.zeros(77), tf.IndexedSlices(tf.zeros([1, 77]), tf.constant([0]))):
        given[0] = wrong if hvd.rank() == last else given[0]
        with pytest.raises(InvalidError, match=r"must be of its shape; it is \(.*77,?\), not"):
            optimizer.apply(given, ours)
    assert_equal(ours, before)
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
    optimizer = wrapped_sgd()
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
    assert_close(ours, reference)
    assert_same_bits_on_all_ranks(ours)


def test_groups_are_buckets_one_for_each_of_their_dtypes_and_names_may_repeat() -> None:
    def weights() -> list[keras.Variable]:
        dtypes = ("float32", "float64", "float32", "float32")
        result = [keras.Variable(np.zeros(4), dtype=dtype, name="kernel") for dtype in dtypes]
        fill(result)
        return result

    gradient = tf.range(4.0) - hvd.rank()
    expected = [value - np.arange(4) + (hvd.size() - 1) / 2 for value in values(weights())]
    for groups, buckets in (
        (2, {(0,), (1,), (3, 2)}),  # equal bytes: v1 is of float64
        (lambda own: [[own[3], own[1].value, own[0]]], {(3, 0), (1,), (2,)}),
        (lambda own: [[own[2]], [variables()[0]]], {(2,), (3, 0), (1,)}),
    ):
        ours = weights()
        given = groups(ours) if callable(groups) else groups
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), groups=given)
        optimizer.apply([tf.cast(gradient, variable.dtype) for variable in ours], ours)
        (channel,) = channels(optimizer)
        assert {tuple(sorted(bucket.tensors, reverse=True)) for bucket in channel.layout.buckets} == buckets
        assert_close(ours, expected)


def test_local_variables_keep_their_gradients_and_may_differ_from_rank_to_rank() -> None:
    ours, missing = variables(), keras.Variable(np.ones(3), name="missing")
    own = keras.Variable(np.zeros((hvd.rank() + 1, 2)), dtype="float32", name=f"own{hvd.rank()}")
    start, mine, shared = values(ours), gradients(hvd.rank(), 0), averaged(0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, clipvalue=100.0))
    for local in (own, ours[1].value, missing):
        optimizer.register_local_var(local)
    rows = tf.IndexedSlices(tf.ones((1, 2)) * 8.0, [hvd.rank()], [hvd.rank() + 1, 2])
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([*mine, rows, None], [*ours, own, missing])
    assert_close(ours, [start[0] - shared[0], start[1] - mine[1] / hvd.size(), start[2] - shared[2]])
    expected = np.zeros((hvd.rank() + 1, 2))
    expected[-1] = -8.0 / hvd.size()
    assert_close([own, missing], [expected, np.ones(3)])


def test_a_global_norm_and_local_layers_are_refused_together_and_the_optimizer_stays_plain() -> None:
    layer = keras.layers.Dense(2)
    plain = keras.optimizers.SGD(1.0, global_clipnorm=1.0)
    with pytest.raises(InvalidError, match="local variables count in the norm"):
        hvd.PartialDistributedOptimizer(plain, local_layers=[layer])
    assert type(plain) is keras.optimizers.SGD


def test_a_partial_optimizer_leaves_its_layers_alone_and_shares_the_others() -> None:
    """The head is of another width on each rank; the body sees the mean of what the heads send back."""
    body, head = keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(hvd.rank() + 1)
    network = keras.Sequential([keras.layers.Input((6,)), body, head])
    fill(network.weights)
    start = values(network.weights)
    late = keras.layers.Dense(2)  # not built: it has no weights yet, and none are looked for before the first step
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=[head, late])
    x = data(hvd.rank(), 4)[0]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(network(x) - x[:, : hvd.rank() + 1]))
    given = tape.gradient(loss, network.trainable_variables)
    optimizer.apply(given, network.trainable_variables)
    every = hvd.allgather_object([part.numpy() for part in given[:2]])
    mean = [sum(parts) / hvd.size() for parts in zip(*every, strict=True)]
    steps = [*mean, *(part / hvd.size() for part in given[2:])]
    assert_close(network.weights, [before - step for before, step in zip(start, steps, strict=True)])
    assert_same_bits_on_all_ranks(body.weights)


@pytest.mark.parametrize("layers", ["head", [keras.layers.Dense], [3]])
def test_what_is_no_layer_is_refused(layers: object) -> None:
    with pytest.raises(InvalidError, match="must be a layer of Keras"):
        hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=layers)
