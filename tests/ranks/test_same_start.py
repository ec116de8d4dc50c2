"""The ranks compare their weights before the first update: a forgotten broadcast is an error in words on all ranks."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import InvalidError, MismatchError
from tests.ranks.compare import assert_equal
from tests.ranks.conftest import LAUNCHED_SIZE
from tests.ranks.training import assert_same_bits_on_all_ranks, data, fill, model, values

pytestmark = [
    pytest.mark.ranks(2),
    pytest.mark.skipif(LAUNCHED_SIZE == 1, reason="one rank has no other rank to differ from"),
]

BATCH = 4
SGD = keras.optimizers.SGD


def unequal() -> keras.Model:
    """A model whose second kernel differs on the last rank."""
    made = model()
    fill(made.weights[2:3], salt=int(hvd.rank() == hvd.size() - 1))
    return made


def batch(salt: int = 0) -> list[tf.Tensor]:
    return [tf.constant(part) for part in data(hvd.rank(), BATCH, salt)]


def loss_of(network: Any, x: Any, y: Any) -> tf.Tensor:
    return tf.reduce_mean(tf.square(network(x, training=True) - y))


def refused(call: Callable[[], Any], *kinds: type[Exception]) -> str:
    """Give the words, which are the same on all ranks, and see that the next collective works."""
    with pytest.raises(kinds or MismatchError) as caught:
        call()
    words = str(caught.value)
    assert hvd.allgather_object("must have the same bits" in words) == [True] * hvd.size()
    if not kinds:  # TensorFlow adds places of the script; a rank's names have the numbers of its own models
        plain = re.sub(r"_\d+(?=[/'])", "", words)
        assert hvd.allgather_object(plain) == [plain] * hvd.size()
    return words


def by_fit(made: Any, optimizer: Any, **how: Any) -> Callable[[], Any]:
    made.compile(optimizer, "mse", **how)
    return lambda: made.fit(*data(hvd.rank(), BATCH), batch_size=2, verbose=0)


def by_batch(made: Any, optimizer: Any) -> Callable[[], Any]:
    made.compile(optimizer, "mse", run_eagerly=True)
    return lambda: made.train_on_batch(*data(hvd.rank(), BATCH))


def in_loop(made: Any, optimizer: Any, traced: bool = False) -> Callable[[], Any]:
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(made, x, y)
        gradients = tape.gradient(loss, made.trainable_variables)
        if traced:
            optimizer.apply_gradients(zip(gradients, made.trainable_variables, strict=True))
        else:
            optimizer.apply(gradients, made.trainable_variables)

    step = tf.function(step) if traced else step
    return lambda: step(*batch())


def wrapped(scaled: bool = False, **options: Any) -> Any:
    plain = SGD(0.05)
    return hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(plain) if scaled else plain, **options)


# a way to train, and options of the optimizer
WAYS: dict[str, tuple[Callable[..., Callable[[], Any]], dict[str, Any]]] = {
    "fit": (by_fit, {}),
    "apply": (in_loop, {}),
    "apply_gradients in a function": (functools.partial(in_loop, traced=True), {}),
    "train_on_batch, accumulation": (by_batch, {"backward_passes_per_step": 2}),
    "train_on_batch, loss scale": (by_batch, {"scaled": True}),
    "train_on_batch, TopK": (by_batch, {"compression": hvd.TopK(min_elements=1)}),
}


@pytest.mark.parametrize(("way", "options"), WAYS.values(), ids=WAYS)
def test_unequal_weights_are_refused_on_all_ranks_until_they_are_broadcast(
    way: Callable[..., Callable[[], Any]], options: dict[str, Any]
) -> None:
    made = unequal()
    before, optimizer = values(made.weights), wrapped(**options)
    words = refused(way(made, optimizer))
    assert f"/kernel' must have the same bits on all ranks before the first step; rank {hvd.size() - 1} has" in words
    assert "broadcast_variables" in words and "synchronized" in words and "set_random_seed" in words
    assert_equal(made.weights, before)
    hvd.broadcast_variables(made.variables, root_rank=0)
    way(made, optimizer)()
    assert_same_bits_on_all_ranks(made.weights)


@pytest.mark.parametrize("legacy", [False, True])
def test_optimizers_of_keras_2_compare_too(legacy: bool) -> None:
    keras2 = pytest.importorskip("tf_keras")
    made = keras2.Sequential([keras2.layers.Dense(2, name="dense")])
    made.build((None, 6))
    fill(made.weights, salt=hvd.rank())
    optimizer = hvd.DistributedOptimizer((keras2.optimizers.legacy if legacy else keras2.optimizers).SGD(0.05))
    assert "'dense/kernel:0' must have the same bits" in refused(by_fit(made, optimizer, run_eagerly=legacy))
    hvd.broadcast_variables(made.variables, root_rank=0)
    by_fit(made, optimizer, run_eagerly=legacy)()
    assert_same_bits_on_all_ranks(made.weights)


def test_it_can_be_left_out_and_local_variables_and_other_process_sets_are() -> None:
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    local = unequal()
    for made, optimizer in (
        (unequal(), wrapped(check_start=False)),
        (unequal(), wrapped(process_set=sets[hvd.rank()])),
        (local, hvd.PartialDistributedOptimizer(SGD(0.05), local_layers=local.layers[1])),
    ):
        by_batch(made, optimizer)()
    for each in sets:
        hvd.remove_process_set(each)
    different = wrapped(check_start=hvd.rank() == 0)
    with pytest.raises(MismatchError, match="check_start must be the same on all ranks"):
        by_batch(model(), different)()
    with pytest.raises(InvalidError, match="check_start .'no'.: must be True or False"):
        wrapped(check_start="no")


def test_a_function_may_broadcast_in_front_of_its_first_update() -> None:
    made = unequal()
    optimizer = wrapped()

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor, root: int) -> None:
        hvd.broadcast_variables(made.variables[root:], root_rank=0)
        with tf.GradientTape() as tape:
            loss = loss_of(made, x, y)
        optimizer.apply(tape.gradient(loss, made.trainable_variables), made.trainable_variables)

    words = refused(lambda: step(*batch(), 3), tf.errors.InvalidArgumentError)  # the unequal one is not among them
    assert "/kernel' must have the same bits on all ranks before the first step" in words
    for _ in range(2):
        step(*batch(), 0)
    assert_same_bits_on_all_ranks(made.weights)


@pytest.mark.parametrize("traced", [False, True])
def test_with_a_tape_unequal_weights_are_refused_after_the_first_step(traced: bool) -> None:
    """Horovod's loops broadcast after the first batch: before it nobody can know. Until an update nothing is said."""
    made = unequal()
    optimizer = SGD(0.05)

    def gradients(x: tf.Tensor, y: tf.Tensor) -> Any:
        tape = hvd.DistributedGradientTape(tf.GradientTape())
        with tape:
            loss = loss_of(made, x, y)
        return tape.gradient(loss, made.trainable_variables)

    gradients = tf.function(gradients) if traced else gradients
    for salt in range(2):
        found = gradients(*batch(salt))
    optimizer.apply(found, made.trainable_variables)
    words = refused(lambda: gradients(*batch(3)), *([tf.errors.InvalidArgumentError] if traced else []))
    assert "/kernel' must have the same bits on all ranks after the first step; rank" in words
    hvd.broadcast_variables(made.variables, root_rank=0)
    for salt in range(2):
        optimizer.apply(gradients(*batch(salt)), made.trainable_variables)
    assert_same_bits_on_all_ranks(made.weights)


def test_with_a_tape_the_variables_may_be_arguments_of_the_function() -> None:
    weight = tf.Variable([1.0 + hvd.rank(), 2.0])

    def descend(variable: tf.Variable, **options: bool) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable**2)
        tape = hvd.DistributedGradientTape(tape, **options)
        variable.assign_sub(0.25 * tape.gradient(loss, variable))

    step = tf.function(descend)
    step(weight)
    refused(lambda: step(weight), tf.errors.InvalidArgumentError)
    descend(weight, check_start=False)
    hvd.broadcast_variables([weight], root_rank=0)
    step(weight)
    assert_same_bits_on_all_ranks([weight])


def test_a_second_compile_with_a_plain_optimizer_is_said_and_refused_by_callbacks(
    caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    made = model()
    made.compile(wrapped(), "mse")
    with caplog.at_level(logging.WARNING, "hvd_ext"):
        made.compile(wrapped(), "mse")
        assert not caplog.records
        made.compile(keras.optimizers.Adam(0.05), "mse")
    words = "now with a plain one (Adam): in fit each of the"
    assert (words in caplog.text) == (hvd.rank() == 0)
    for callback in (
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5),
        hvd.callbacks.BestModelCheckpoint(filepath=tmp_path / "best.keras"),
        hvd.callbacks.Checkpoint(tmp_path / "job"),
    ):
        with pytest.raises(InvalidError, match="it is not wrapped, so each rank would train alone"):
            made.fit(*data(hvd.rank(), BATCH), verbose=0, callbacks=[callback])


class Two(keras.Model):
    """A model that its first batch builds, whose step uses optimizers in containers."""

    def __init__(self, keep: Callable[[Any, list[Any]], None], optimizers: list[Any]) -> None:
        super().__init__()
        self.first, self.last = keras.layers.Dense(3), keras.layers.Dense(2)
        keep(self, optimizers)
        self.used = lambda: optimizers

    def call(self, x: Any) -> Any:
        return self.last(self.first(x))

    def train_step(self, batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(self, *batch)
        gradients = tape.gradient(loss, self.trainable_variables)
        for optimizer, part in zip(self.used(), (slice(0, 2), slice(2, 4)), strict=True):
            optimizer.apply(gradients[part], self.trainable_variables[part])
        return {"loss": loss}


class Part(keras.Model):
    """A model inside of another that keeps an optimizer."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.own = {"optimizer": (optimizer,)}


PLACES: dict[str, Callable[[Any, list[Any]], None]] = {
    "list": lambda model, optimizers: setattr(model, "kept", optimizers),
    "dict of tuples": lambda model, optimizers: setattr(model, "kept", {"a": ((optimizers[0],), optimizers[1])}),
    "models": lambda model, optimizers: setattr(model, "parts", [Part(one) for one in optimizers]),
}


@pytest.mark.parametrize("place", PLACES)
def test_fit_finds_the_optimizers_of_a_model_that_is_not_built(place: str) -> None:
    keras.utils.set_random_seed(hvd.rank())
    optimizers = [hvd.DistributedOptimizer(SGD(0.05, momentum=0.5), name=name) for name in "ab"]
    made = Two(PLACES[place], optimizers)
    made.compile(run_eagerly=place != "list")
    made.fit(*data(hvd.rank(), BATCH), batch_size=2, verbose=0, callbacks=hvd.callbacks.synchronized())
    assert_same_bits_on_all_ranks([*made.weights, *(slot for one in optimizers for slot in one.variables)])
