"""What the tests of optimizers share: variables and gradients without a model, and plain training to compare with."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import hvd_ext as hvd
from tests.ranks.compare import assert_close
from tests.ranks.training import assert_same_bits_on_all_ranks, fill, values

SHAPES = ((3, 5), (5,), (4, 4))
STEPS = 3


def variables(dtype: str = "float32") -> list[keras.Variable]:
    """Three variables with equal values on all ranks."""
    result = [keras.Variable(np.zeros(shape), dtype=dtype, name=f"v{n}") for n, shape in enumerate(SHAPES)]
    fill(result)
    return result


def gradients(rank: int, step: int, dtype: str = "float32") -> list[tf.Tensor]:
    """Eighths, so that sums over ranks are exact in every dtype."""
    return [
        tf.cast((np.arange(np.prod(shape)).reshape(shape) * 3 + rank * 5 + step * 7) % 16 - 7, dtype) / 8
        for shape in SHAPES
    ]


def averaged(step: int, dtype: str = "float32") -> list[tf.Tensor]:
    """Give what the joined batch's gradients would be."""
    every = [gradients(rank, step, dtype) for rank in range(hvd.size())]
    return [tf.add_n(list(parts)) / hvd.size() for parts in zip(*every, strict=True)]


def assert_equals_plain_training(
    optimizer: keras.optimizers.Optimizer, plain: keras.optimizers.Optimizer, dtype: str = "float32", rtol: float = 2e-5
) -> None:
    """Apply the ranks' gradients to one, their averages to the other."""
    ours, reference = variables(dtype), variables(dtype)
    for step in range(STEPS):
        optimizer.apply(gradients(hvd.rank(), step, dtype), ours)
        plain.apply(averaged(step, dtype), reference)
    assert_close(*([value.astype(np.float64) for value in values(one)] for one in (ours, reference)), rtol, rtol / 10)
    assert_same_bits_on_all_ranks(ours)
