"""What a process frees of the worlds that it has been in."""

from __future__ import annotations

import gc
import tracemalloc
import types
import weakref
import zlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.tensorflow.gradients import same_start, succession


class Array(np.ndarray):
    """An array that can be referred to weakly."""


@pytest.fixture(autouse=True)
def running():
    """Starts and ends a job of one rank."""
    hvd.init()
    yield
    hvd.shutdown()


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets channels have successors, as in a supervised job; models of other tests may have some, too."""
    monkeypatch.setattr(succession, "_registrations", weakref.WeakValueDictionary())
    monkeypatch.setattr(succession, "membership", types.SimpleNamespace(session=object))


def trained(traces: list[int]) -> Any:
    """Gives a model that has trained in three worlds with one trace."""
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))

    def loss(y: tf.Tensor, out: tf.Tensor) -> tf.Tensor:
        traces.append(1)
        return tf.reduce_mean((y - out) ** 2)

    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss=loss, jit_compile=False)
    for world in range(3):
        if world:
            hvd.shutdown()
            hvd.init()
        model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, verbose=0)
    return model


@pytest.mark.usefixtures("supervised")
def test_a_graph_that_outlives_worlds_is_freed_with_its_model() -> None:
    traces: list[int] = []
    model = trained(traces)
    assert len(traces) == 1
    assert len(succession._registrations) == 1
    gone = [weakref.ref(one) for one in (model, model.optimizer, model.optimizer._hvd_ext.reducer)]
    del model
    for _ in range(2):  # the optimizer is collected first, which holds the reducer in a finalizer
        gc.collect()
    assert not succession._registrations
    assert not any(reference() for reference in gone)


@pytest.mark.parametrize("behind", [False, True])
def test_a_data_set_of_arrays_frees_them(behind: bool) -> None:
    x = np.arange(80.0)[:, None].view(Array)
    array = weakref.ref(x)
    dataset = hvd.shard((x, np.zeros((80, 1))), 4, shuffle=True)
    if behind:
        dataset = dataset.map(lambda x, y: (x, y)).repeat(2)
    iterator = iter(dataset)
    del x, dataset
    gc.collect()
    assert len(list(iterator)) == 20 * (1 + behind)  # the iterator keeps them
    del iterator
    gc.collect()
    assert array() is None


def test_the_tensor_of_a_data_set_keeps_its_arrays() -> None:
    dataset = hvd.shard((np.arange(80.0)[:, None],), 4, shuffle=True)
    variant, spec = tf.data.experimental.to_variant(dataset), dataset.element_spec
    del dataset
    gc.collect()
    assert len(list(tf.data.experimental.from_variant(variant, spec))) == 20


def test_a_comparison_of_weights_copies_none_of_them() -> None:
    weights = [tf.Variable(tf.random.uniform([1 << 20])), tf.Variable(1.0), tf.Variable(tf.ones([3], tf.bfloat16))]
    tensors = [tf.convert_to_tensor(weight) for weight in weights]
    tracemalloc.start()
    try:
        sums = same_start.checksums(tensors)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sums == [zlib.crc32(tensor.numpy().tobytes()) for tensor in tensors]
    assert peak < 1 << 20
