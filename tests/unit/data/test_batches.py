"""Whether a data set's elements are batches, told by how it was made."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from hvd_ext.data.batches import is_batched

Data = tf.data.Dataset
PAIRS = (np.zeros((8, 3), np.float32), np.zeros((8, 1), np.float32))


@pytest.mark.parametrize(
    ("make", "batched"),
    [
        (lambda: Data.range(8), False),
        (lambda: Data.from_tensor_slices(PAIRS).shuffle(4).map(lambda x, y: (x, y)).prefetch(1), False),
        (lambda: Data.range(8).batch(2), True),
        (lambda: Data.from_tensor_slices(PAIRS).batch(2).map(lambda x, y: (x, y)).repeat().take(3), True),
        (lambda: Data.range(8).padded_batch(2).with_options(tf.data.Options()), True),
        (lambda: Data.range(8).batch(2, num_parallel_calls=2, drop_remainder=True).cache().prefetch(1), True),
        (lambda: Data.range(8).batch(2).rebatch(4), True),
        (lambda: Data.zip((Data.range(8).batch(2), Data.range(8).batch(2))), True),
        (lambda: Data.range(8).batch(2).unbatch(), False),
        (lambda: Data.range(8).window(2).flat_map(lambda window: window.batch(2)), None),
        (lambda: Data.from_generator(lambda: iter([1]), output_signature=tf.TensorSpec([], tf.int32)), False),
        (lambda: Data.from_generator(lambda: iter([[1]]), output_signature=tf.TensorSpec([None], tf.int32)), None),
        (lambda: Data.from_tensors(PAIRS), None),
    ],
)
def test_batches_are_told_from_elements_where_that_can_be_known(make: Callable[[], Data], batched: bool | None) -> None:
    assert is_batched(make()) is batched
