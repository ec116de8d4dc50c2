"""Ways of training that cannot be synchronised are refused in words, before anything is sent."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import InvalidError
from tests.ranks.training import data, model

pytestmark = pytest.mark.ranks(1, 2)

ROWS = 4


def test_xla_is_refused_in_a_step_inside_a_compiled_function() -> None:
    variable = keras.Variable(np.zeros(3, np.float32))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))

    @tf.function(jit_compile=True, autograph=False)
    def outer(x: tf.Tensor) -> None:
        tf.function(lambda: optimizer.apply([x], [variable]), autograph=False)()

    with pytest.raises(InvalidError, match="XLA cannot communicate"):
        outer(tf.ones(3))


@pytest.mark.parametrize("eagerly", [False, True], ids=["graph", "eager"])
def test_a_loss_scale_optimizer_around_ours_is_refused_with_the_advice(eagerly: bool) -> None:
    """The model's own policy is mixed_float16 and the global one is not, so that `compile` puts it around."""
    ours = model()
    ours.dtype_policy = keras.dtype_policies.DTypePolicy("mixed_float16")
    ours.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", run_eagerly=eagerly)
    assert isinstance(ours.optimizer, keras.optimizers.LossScaleOptimizer)
    with pytest.raises(InvalidError, match=r"mixed_float16.*DistributedOptimizer\(keras\.optimizers\.LossScaleOptim"):
        ours.train_on_batch(*data(hvd.rank(), ROWS))


def test_a_distribution_strategy_is_refused_in_words() -> None:
    variable = keras.Variable(np.zeros(3, np.float32))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with (
        tf.distribute.OneDeviceStrategy("/cpu:0").scope(),
        pytest.raises(InvalidError, match=r"tf\.distribute strategy"),
    ):
        optimizer.apply([tf.ones(3)], [variable])


@pytest.mark.parametrize(
    ("dtype", "overwritten", "words"),
    [
        ("int32", False, "gradient of 'weights' must be of a floating dtype; it is int32"),
        ("complex64", False, "gradient of 'weights' must be of a floating dtype; it is complex64"),
        ("float32", True, "'weights' is overwritten with its gradient"),
    ],
)
def test_gradients_that_have_no_average_are_refused_with_the_variables_name(
    dtype: str, overwritten: bool, words: str
) -> None:
    variable = keras.Variable(np.zeros(3, np.float32), name="weights")
    variable.overwrite_with_gradient = overwritten
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(InvalidError, match=words):
        optimizer.apply([tf.ones(3, dtype)], [variable])
