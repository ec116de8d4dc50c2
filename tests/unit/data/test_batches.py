"""Whether a data set's elements are batches, told by how it was made; workers of a part of a `PyDataset`."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_ext.data import batches
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


class Shuffled(keras.utils.PyDataset):
    """Batches whose order changes where an epoch begins."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.order, self.epochs = np.arange(8), 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return int(self.order[index])

    def on_epoch_begin(self) -> None:
        self.epochs += 1
        self.order = order_of(self.epochs)


def order_of(epoch: int) -> np.ndarray:
    return np.random.default_rng(epoch).permutation(8)


def test_the_first_worker_that_fetches_begins_the_epoch() -> None:
    whole = Shuffled(workers=2)
    part = batches.part_of(whole, 1, 2, 4)
    assert [part[index] for index in range(4)] == [1, 3, 5, 7]  # not by a worker: Keras looks at the shapes so
    for epoch in (1, 2):
        with ThreadPool(2) as pool:  # Keras starts its workers before it calls on_epoch_begin
            assert pool.map(part.__getitem__, range(4)) == order_of(epoch)[1::2].tolist()
            part.on_epoch_begin()
            assert pool.map(part.__getitem__, range(4)) == order_of(epoch)[1::2].tolist()
        part.on_epoch_end()
    part.on_epoch_begin()
    part.on_epoch_begin()  # a loop of one's own may leave the ends out
    assert whole.epochs == 4


def test_worker_processes_fetch_in_the_order_of_their_epoch() -> None:
    whole = Shuffled(workers=2, use_multiprocessing=True)
    part = batches.part_of(whole, 0, 2, 4)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(part.__getitem__, range(4)) == order_of(1)[::2].tolist()
    part.on_epoch_begin()
    assert (whole.epochs, [part[index] for index in range(4)]) == (1, order_of(1)[::2].tolist())
    assert pickle.loads(pickle.dumps(part))[0] == part[0]  # for workers that are not forked
