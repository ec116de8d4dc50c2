"""What a distributed tape refuses, in words and before anything is sent."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import InvalidError, MismatchError


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "tf.function"])
def test_reduced_gradients_are_refused_by_a_wrapped_optimizer(traced: bool) -> None:
    variable = tf.Variable([1.0, 2.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))

    def step() -> None:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(variable)
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])

    with pytest.raises(InvalidError, match="has been reduced by a DistributedGradientTape already"):
        (tf.function(step, autograph=False) if traced else step)()
    assert variable.numpy().tolist() == [1.0, 2.0]


def test_what_cannot_be_is_refused_in_words() -> None:
    tape = hvd.DistributedGradientTape(tf.GradientTape())
    with pytest.raises(InvalidError, match="wrapped already"):
        hvd.DistributedGradientTape(tape)
    with pytest.raises(InvalidError, match=r"must be a tf\.GradientTape"):
        hvd.DistributedGradientTape(keras.optimizers.SGD())
    with pytest.raises(InvalidError, match="must be 1, because a tape does not accumulate gradients"):
        hvd.DistributedGradientTape(tf.GradientTape(), backward_passes_per_step=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'compresion'"):
        hvd.DistributedGradientTape(tf.GradientTape(), compresion=hvd.Compression.fp16)
    with pytest.raises(InvalidError, match="must be Keras layers"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=["dense"])
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        tape.watch(ragged)
        loss = tf.reduce_sum(ragged)
    with pytest.raises(InvalidError, match="source 0 .* must be a variable or a dense tensor"):
        tape.gradient(loss, [ragged])

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)], autograph=False)
    def unknown(x: tf.Tensor) -> tf.Tensor:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            tape.watch(x)
            loss = tf.reduce_sum(x)
        return tape.gradient(loss, x)

    with pytest.raises(InvalidError, match="must be known when the function is traced"):
        unknown(tf.ones(2))


def test_a_function_that_xla_compiles_is_refused() -> None:
    variable = tf.Variable([1.0, 2.0])

    @tf.function(jit_compile=True, autograph=False)
    def step() -> tf.Tensor:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(variable)
        return tape.gradient(loss, variable)

    with pytest.raises(InvalidError, match="XLA cannot communicate"):
        step()


def test_other_sources_on_one_rank_are_a_mismatch_on_all() -> None:
    if hvd.size() == 1:
        pytest.skip("needs two ranks")
    one, other = tf.Variable([1.0], name="one"), tf.Variable([1.0], name="other")
    with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        loss = tf.reduce_sum(one + other)
    with pytest.raises(MismatchError, match="same name on all ranks"):
        tape.gradient(loss, [one if hvd.rank() else other])
    assert tape.gradient(loss, [one])[0].numpy().tolist() == [1.0]
