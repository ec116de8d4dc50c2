"""What layers have besides variables: ranks get it with the weights or a checkpoint, or an error names the layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import hvd_ext as hvd
from hvd_ext.errors import InvalidError, MismatchError
from hvd_ext.tensorflow import layers
from tests.ranks.compare import assert_equal
from tests.ranks.conftest import LAUNCHED_SIZE
from tests.ranks.training import assert_same_bits_on_all_ranks, fill

pytestmark = pytest.mark.ranks(2)

ROWS, FEATURES = 8, 3
NUMBERS = (np.arange(ROWS * FEATURES, dtype=np.float32).reshape(ROWS, FEATURES) * 7) % 5
WORDS = np.array([["a b c"], ["b c"], ["c d"], ["e"], ["d d a"], ["f"], ["a"], ["c c"]])
BOTH = pytest.mark.parametrize("library", [keras, tf_keras], ids=["Keras 3", "Keras 2"])

# Each makes a layer whose state does not depend on the data's size, and gives the data that it is adapted to.
ADAPTED: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "Normalization": lambda layers: (layers.Normalization(), NUMBERS),
    "Discretization": lambda layers: (layers.Discretization(num_bins=4), NUMBERS),
    "StringLookup": lambda layers: (layers.StringLookup(), np.char.partition(WORDS, " ")[:, 0, 0]),
    "IntegerLookup": lambda layers: (layers.IntegerLookup(), NUMBERS.astype(np.int64)),
    "TextVectorization": lambda layers: (layers.TextVectorization(output_sequence_length=3), WORDS),
    "tf_idf": lambda layers: (layers.TextVectorization(output_mode="tf_idf"), WORDS),
}
KINDS = pytest.mark.parametrize("kind", ADAPTED)


def outputs(layer: Any, data: np.ndarray) -> list[Any]:
    """Give what a layer makes of data, as plain values."""
    return np.asarray(layer(tf.constant(data))).tolist()


def normalized(library: Any, adapted: bool, *, traced: bool = True) -> tuple[Any, Any]:
    """Make a model whose first layer is adapted to numbers, or not."""
    layer = library.layers.Normalization()
    layer.build((None, FEATURES))
    if adapted:
        layer.adapt(NUMBERS * 3 + 10)
    made = library.Sequential([library.layers.Input((FEATURES,)), layer, library.layers.Dense(1)])
    fill(made.trainable_weights)
    made.compile(hvd.DistributedOptimizer(library.optimizers.SGD(0.01)), "mse", run_eagerly=not traced)
    return made, layer


def fit(made: Any, callbacks: Any, epochs: int = 1, **more: Any) -> Any:
    rows = NUMBERS + hvd.rank()
    more = {"batch_size": 4, "shuffle": False, "verbose": 0, **more}
    return made.fit(rows, rows[:, :1], epochs=epochs, callbacks=callbacks, **more)


@BOTH
@KINDS
def test_a_model_or_layer_is_sent_with_what_it_has_besides_variables(kind: str, library: Any) -> None:
    layer, data = ADAPTED[kind](library.layers)
    if hvd.rank() == 0:
        layer.adapt(data)
    if kind == "tf_idf" and library is keras and keras.__version__.startswith("3.8."):  # which cannot read its own file
        with pytest.raises(MismatchError, match=r"rank 1: layer .* cannot be copied .*idf_weights"):
            hvd.broadcast_variables(layer, root_rank=0)
        return
    hvd.broadcast_variables(layer, root_rank=0)
    alone, _ = ADAPTED[kind](library.layers)
    alone.adapt(data)
    assert outputs(layer, data) == outputs(alone, data)
    assert_same_bits_on_all_ranks(layers.weights(layer))


@BOTH
def test_a_broadcast_in_fit_gives_all_ranks_the_constants_of_the_root_also_in_traced_functions(library: Any) -> None:
    made, layer = normalized(library, adapted=hvd.rank() == 0)
    before = made.predict(NUMBERS, verbose=0)
    fit(made, hvd.callbacks.synchronized())
    expected, _ = normalized(library, adapted=True)
    got = outputs(layer, NUMBERS)
    assert got == outputs(expected.layers[0], NUMBERS)
    assert_same_bits_on_all_ranks(made.weights)
    np.testing.assert_array_equal(made.predict(NUMBERS, verbose=0), made(tf.constant(NUMBERS)).numpy())
    assert hvd.rank() == 0 or not np.array_equal(before, made.predict(NUMBERS, verbose=0))


class Deferred(keras.Model):
    """A model that its first batch builds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = keras.layers.Normalization(), keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, x: Any) -> Any:
        return self.last(self.first(x))


def test_a_model_that_is_not_built_makes_its_first_step_with_the_roots_constants() -> None:
    made, alone = Deferred(), Deferred()
    for one, adapts in ((made, hvd.rank() == 0), (alone, True)):
        if adapts:
            one.first.adapt(NUMBERS * 100)
        one.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
        fit(one, hvd.callbacks.synchronized())
    assert_equal(made.get_weights(), alone.get_weights())


@pytest.mark.skipif(LAUNCHED_SIZE == 1, reason="one rank has no other rank to differ from")
@BOTH
@pytest.mark.parametrize("kind", ["Normalization", "Discretization", "IntegerLookup", "given mean"])
def test_ranks_that_adapt_to_their_own_data_are_refused_before_the_first_step(kind: str, library: Any) -> None:
    salt = int(hvd.rank() == hvd.size() - 1)
    if kind == "given mean":
        layer = library.layers.Normalization(mean=float(salt), variance=1.0)
    else:
        layer, data = ADAPTED[kind](library.layers)
        layer.adapt(data * (1 + salt) + salt)
    integers = kind == "IntegerLookup"
    inputs = library.layers.Input((FEATURES,), dtype="int64" if integers else "float32")
    cast = library.layers.Lambda(lambda x: tf.cast(x, tf.float32))
    made = library.Sequential([inputs, layer, cast, library.layers.Dense(1)])
    fill(made.trainable_weights)
    traced = kind == "Discretization"  # a traced step takes long to make
    made.compile(hvd.DistributedOptimizer(library.optimizers.SGD(0.01)), "mse", run_eagerly=not traced)
    with pytest.raises(MismatchError) as caught:
        made.train_on_batch(NUMBERS.astype(np.int64 if integers else np.float32), NUMBERS[:, :1])
    words = (
        f"SGD: layer '{hvd.allgather_object(layer.name)[0]}' must have the same vocabulary, bin boundaries, constants"
    )
    assert words in str(caught.value)
    assert f"before the first step; those of rank {hvd.size() - 1} and rank 0 differ" in str(caught.value)
    if kind == "Normalization":
        hvd.broadcast_variables(made, root_rank=0)
        made.compile(made.optimizer, "mse", run_eagerly=True)
        made.train_on_batch(NUMBERS, NUMBERS[:, :1])
        layer.adapt(NUMBERS + salt)
        optimizer = hvd.PartialDistributedOptimizer(library.optimizers.SGD(0.01), local_layers=[layer])
        made.compile(optimizer, "mse", run_eagerly=True)
        made.train_on_batch(NUMBERS, NUMBERS[:, :1])


@pytest.mark.skipif(LAUNCHED_SIZE == 1, reason="one rank has nobody to get a vocabulary from")
def test_a_layer_that_cannot_take_the_roots_vocabulary_is_named_on_all_ranks() -> None:
    words = ["a", "b", "c"] if hvd.rank() == 0 else ["a", "b"]
    layer = keras.layers.StringLookup(vocabulary=words, output_mode="int")
    made = keras.Sequential([keras.layers.Input((1,), dtype="string"), layer])
    with pytest.raises(MismatchError, match="broadcast_variables: layer 'string_lookup.*' must have the same vocab"):
        hvd.broadcast_variables(made, root_rank=0)
    assert hvd.allgather_object("next") == ["next"] * hvd.size()


def test_what_cannot_be_sent_is_refused_in_words() -> None:
    lookup = tf_keras.layers.StringLookup()
    with pytest.raises(InvalidError, match="pass the model or layer itself"):
        hvd.broadcast_variables(lookup.weights, root_rank=0)
    layer = keras.layers.Normalization()
    layer.build((None, FEATURES))
    send = tf.function(lambda: hvd.broadcast_variables(layer, root_rank=0))
    with pytest.raises(InvalidError, match="a model or layer must be sent in eager mode"):
        send()


class Halved(keras.layers.Layer):
    """A layer of a user's own that computes a constant from its variable."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer="ones", trainable=False, name="scale")
        self.finalize_state()

    def finalize_state(self) -> None:
        self.half = tf.identity(self.scale) / 2

    def call(self, x: Any) -> Any:
        return x * self.half


def test_layers_of_the_users_own_take_part_also_inside_of_containers_and_losses() -> None:
    inner, in_loss = Halved(), Halved()

    class Measure(keras.losses.Loss):
        def __init__(self) -> None:
            super().__init__()
            self.parts = {"layers": [in_loss]}

        def call(self, y_true: Any, y_pred: Any) -> Any:
            return tf.reduce_mean(tf.square(in_loss(y_true) - y_pred), -1)

    nested = keras.Sequential([keras.layers.Input((FEATURES,)), inner])
    made = keras.Sequential([keras.layers.Input((FEATURES,)), nested, keras.layers.Dense(1)])
    fill(made.trainable_weights)
    in_loss.build((1,))
    for layer in (inner, in_loss):
        layer.scale.assign(4.0 + hvd.rank())
        layer.finalize_state()
    made.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), Measure(), run_eagerly=True)
    fit(made, hvd.callbacks.synchronized())
    assert hvd.allgather_object([float(layer.half) for layer in (inner, in_loss)]) == [[2.0, 2.0]] * hvd.size()


def text_model(adapted: bool) -> tuple[Any, list[Any]]:
    """Make a model of words and numbers with layers of all kinds, adapted or not."""
    text = keras.layers.TextVectorization(output_sequence_length=2)
    number, bins = keras.layers.Normalization(), keras.layers.Discretization(num_bins=3)
    words, numbers = keras.Input((1,), dtype="string"), keras.Input((FEATURES,))
    number.build((None, FEATURES))
    if adapted:
        number.adapt(NUMBERS * 3)
    # these two cannot be called without
    text.adapt(WORDS if adapted else WORDS[:2])
    bins.adapt(NUMBERS * (2 if adapted else 1))
    parts = [text(words), number(numbers), bins(numbers)]
    joined = keras.layers.Concatenate()([keras.ops.cast(part, "float32") for part in parts])
    made = keras.Model([words, numbers], keras.layers.Dense(1)(joined))
    fill(made.trainable_weights)
    made.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    return made, [text, number, bins]


def test_a_checkpoint_brings_what_layers_have_besides_variables(tmp_path: Path) -> None:
    folder = hvd.broadcast_object(str(tmp_path), 0)
    data = {"x": [tf.constant(WORDS), tf.constant(NUMBERS)], "y": NUMBERS[:, :1]}
    how = {"batch_size": 4, "shuffle": False, "verbose": 0}
    made, _ = text_model(adapted=True)
    made.fit(**data, **how, callbacks=hvd.callbacks.synchronized(hvd.callbacks.Checkpoint(folder)))
    again, ours = text_model(adapted=False)
    again.predict(data["x"], verbose=0)  # traces the model with other constants
    again.fit(**data, **how, callbacks=hvd.callbacks.synchronized(hvd.callbacks.Checkpoint(folder)))
    expected = made.predict(data["x"], verbose=0)
    np.testing.assert_array_equal(again.predict(data["x"], verbose=0), expected)
    _, theirs = text_model(adapted=True)
    for layer, other in zip(ours, theirs, strict=True):
        given = WORDS if layer is ours[0] else NUMBERS
        assert outputs(layer, given) == outputs(other, given)
    loop, _ = text_model(adapted=False)
    checkpoint = hvd.callbacks.Checkpoint(folder)
    checkpoint.set_model(loop)
    checkpoint.restore()
    np.testing.assert_array_equal(loop.predict(data["x"], verbose=0), expected)


def test_backup_and_restore_gives_all_ranks_the_constants(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"), delete_checkpoint=False)
        return hvd.callbacks.synchronized(backup)

    made, _ = normalized(keras, adapted=True, traced=False)
    fit(made, callbacks())
    again, layer = normalized(keras, adapted=False, traced=False)
    fit(again, callbacks(), epochs=2)
    fit(made, hvd.callbacks.synchronized(), epochs=2, initial_epoch=1)
    assert_same_bits_on_all_ranks(again.weights)
    assert_equal(again.get_weights(), made.get_weights())
    assert hvd.allgather_object(outputs(layer, NUMBERS)) == [outputs(made.layers[0], NUMBERS)] * hvd.size()
