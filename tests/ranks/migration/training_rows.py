"""Checks of the rows of optimizers and tapes: one step of a small variable, with Horovod's argument names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import InvalidError
from tests.ranks.migration.registry import check, compare, evens, refused


def gradient(rank: int) -> np.ndarray:
    return np.array([1.0, -2.0], np.float32) * (rank + 1)


def total(ranks: list[int] | None = None) -> np.ndarray:
    return np.sum([gradient(rank) for rank in (range(hvd.size()) if ranks is None else ranks)], axis=0)


def mean(ranks: list[int] | None = None) -> np.ndarray:
    return total(ranks) / (hvd.size() if ranks is None else len(ranks))


def in_set() -> np.ndarray:
    """What a reduction in the set of the even ranks gives this rank: outsiders keep their own gradient."""
    return mean(list(evens().ranks)) if evens().included() else gradient(hvd.rank())


def zeros() -> keras.Variable:
    return keras.Variable(np.zeros(2, np.float32))


def stepped(wrap: Callable[..., Any] = hvd.DistributedOptimizer, passes: int = 1, **keywords: Any) -> np.ndarray:
    """Take one update of SGD with rate 1, and give what was subtracted."""
    variable = zeros()
    optimizer = wrap(optimizer=keras.optimizers.SGD(1.0), **keywords)
    for _ in range(passes):
        optimizer.apply([tf.constant(gradient(hvd.rank()))], [variable])
    return -variable.numpy()


def stepped_sparse(wrap: Callable[..., Any] = hvd.DistributedOptimizer, **keywords: Any) -> np.ndarray:
    """As `stepped`, with slices; both are of row 0, which the ranks touch twice."""
    variable = keras.Variable(np.zeros((3, 2), np.float32))
    optimizer = wrap(keras.optimizers.SGD(1.0), **keywords)
    rows = tf.constant(np.stack([gradient(hvd.rank())] * 2))
    optimizer.apply([tf.IndexedSlices(rows, tf.constant([0, 0]), tf.constant([3, 2]))], [variable])
    return -variable.numpy()


def one_row() -> np.ndarray:
    return np.stack([2 * mean(), 0 * mean(), 0 * mean()])


def grouped(wrap: Callable[..., Any] = hvd.DistributedOptimizer, by: str = "lists", **keywords: Any) -> np.ndarray:
    """Two variables of one name and two dtypes, each in a group of its own."""
    pair = [keras.Variable(np.zeros(2), dtype=dtype, name="kernel") for dtype in ("float32", "float64")]
    groups = [[pair[0]], [pair[1]]] if by == "lists" else 1
    optimizer = wrap(keras.optimizers.SGD(1.0), groups=groups, **keywords)
    optimizer.apply([tf.cast(gradient(hvd.rank()), variable.dtype) for variable in pair], pair)
    return -np.stack([variable.numpy() for variable in pair])


def local_step(scale: bool) -> np.ndarray:
    """One step with a second, local variable."""
    shared, local = zeros(), zeros()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), scale_local_gradients=scale)
    optimizer.register_local_var(local)
    optimizer.apply([tf.constant(gradient(hvd.rank()))] * 2, [shared, local])
    return -np.stack([shared.numpy(), local.numpy()])


def own(scale: bool) -> np.ndarray:
    return np.stack([mean(), gradient(hvd.rank()) / (hvd.size() if scale else 1)])


def deprecated(call: Callable[[], Any]) -> Any:
    with pytest.warns(DeprecationWarning, match="num_groups"):
        return call()


# What changes no result, in one call.
TAKEN = {"device_dense": "/cpu:0", "device_sparse": "/cpu:0", "compression": hvd.Compression.none}


@functools.cache
def plain() -> tuple[np.ndarray, np.ndarray]:
    return stepped(name="a name", use_locking=True, op=hvd.Average, **TAKEN), mean()


@functools.cache
def compressed() -> tuple[np.ndarray, np.ndarray]:
    return stepped(compression=hvd.Compression.fp16), mean()


@functools.cache
def summed() -> tuple[np.ndarray, np.ndarray]:
    return stepped(op=hvd.Sum), total()


D = "DistributedOptimizer"
compare(
    {
        D: plain,
        f"{D}(optimizer)": plain,
        f"{D}(name)": plain,
        f"{D}(use_locking)": plain,
        f"{D}(device_dense)": plain,
        f"{D}(device_sparse)": plain,
        f"{D}(compression)": compressed,
        f"{D}(sparse_as_dense)": lambda: (stepped_sparse(sparse_as_dense=True), one_row()),
        f"{D}(backward_passes_per_step)": lambda: (stepped(passes=2, backward_passes_per_step=2), 2 * mean()),
        f"{D}(op)": summed,
        f"{D}(gradient_predivide_factor)": lambda: (stepped(gradient_predivide_factor=2.0), mean()),
        f"{D}(average_aggregated_gradients)": lambda: (
            stepped(passes=2, backward_passes_per_step=2, average_aggregated_gradients=True),
            mean(),
        ),
        f"{D}(num_groups)": lambda: (deprecated(lambda: stepped(num_groups=1)), mean()),
        f"{D}(groups)": lambda: (grouped(), np.stack([mean()] * 2)),
        f"{D}(process_set)": lambda: (stepped(process_set=evens()), in_set()),
        f"{D}(scale_local_gradients)": lambda: (local_step(False), own(False)),
        f"{D}.register_local_var": lambda: (local_step(True), own(True)),
        "Average": plain,
        "Sum": summed,
        "Compression.none": plain,
        "Compression.fp16": compressed,
    }
)


@check("Min", "Max", "Product")
def other_ops() -> None:
    """Of a collective, and refused by an optimizer and a tape."""
    everyone = np.arange(hvd.size()) + 2
    for name in ("Min", "Max", "Product"):
        op = getattr(hvd, name)
        reduce = {"Min": np.min, "Max": np.max, "Product": np.prod}[name]
        assert hvd.allreduce(np.float32(hvd.rank() + 2), op=op).numpy() == reduce(everyone)
        for call in (stepped, lambda op: hvd.DistributedGradientTape(tf.GradientTape(), op=op)):
            with pytest.raises(InvalidError, match="the others are for hvd_ext.allreduce"):
                call(op=op)


@check("Adasum")
def refused_ops() -> None:
    """Refused by a collective, an optimizer and a tape."""
    refused("Adasum", lambda: hvd.allreduce(np.ones(2, np.float32), op=hvd.Adasum))
    refused("Adasum", lambda: stepped(op=hvd.Adasum))
    refused("Adasum", lambda: hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Adasum))


def layers() -> list[keras.layers.Layer]:
    """Two layers that multiply: the first is local to its rank."""
    result = [keras.layers.Dense(1, use_bias=False, kernel_initializer="ones") for _ in range(2)]
    for layer in result:
        layer.build((None, 2))
    return result


def partial_optimizer(**keywords: Any) -> np.ndarray:
    local, shared = layers()
    keywords.setdefault("local_layers", [local])
    optimizer = hvd.PartialDistributedOptimizer(optimizer=keras.optimizers.SGD(1.0), **keywords)
    optimizer.apply([tf.constant(gradient(hvd.rank())[:, None])] * 2, [shared.kernel, local.kernel])
    return 1 - np.stack([shared.kernel.numpy()[:, 0], local.kernel.numpy()[:, 0]])


def partial_groups() -> np.ndarray:
    local, shared = layers()
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(1.0), groups=[[shared.kernel]], local_layers=[local]
    )
    optimizer.apply([tf.constant(gradient(hvd.rank())[:, None])] * 2, [shared.kernel, local.kernel])
    return 1 - np.stack([shared.kernel.numpy()[:, 0], local.kernel.numpy()[:, 0]])


@functools.cache
def partly() -> tuple[np.ndarray, np.ndarray]:
    return partial_optimizer(name="a name", sparse_as_dense=True, **TAKEN), own(True)


P = "PartialDistributedOptimizer"
compare(
    {
        P: partly,
        f"{P}(optimizer)": partly,
        f"{P}(name)": partly,
        f"{P}(device_dense)": partly,
        f"{P}(device_sparse)": partly,
        f"{P}(compression)": partly,
        f"{P}(sparse_as_dense)": partly,
        f"{P}(gradient_predivide_factor)": lambda: (partial_optimizer(gradient_predivide_factor=2.0), own(True)),
        f"{P}(op)": lambda: (partial_optimizer(op=hvd.Sum)[0], total()),
        f"{P}(groups)": lambda: (partial_groups(), own(True)),
        f"{P}(process_set)": lambda: (partial_optimizer(process_set=evens())[0], in_set()),
        f"{P}(local_layers)": lambda: (partial_optimizer(local_layers=[]), np.stack([mean()] * 2)),
        f"{P}(scale_local_gradients)": lambda: (partial_optimizer(scale_local_gradients=False), own(False)),
    }
)


@check(f"{D}.compute_gradients", f"{D}.get_gradients")
def reduced_where_they_are_computed() -> None:
    """What they give is the average, and it is applied as it is; test_keras2.py has every order of calls."""
    tf_keras = pytest.importorskip("tf_keras", reason="needs Keras 2: python -m pip install tf_keras")
    variable = tf.Variable([8.0])
    optimizer = hvd.DistributedOptimizer(tf_keras.optimizers.legacy.SGD(1.0))
    loss = lambda: variable * (hvd.rank() + 1.0)  # noqa: E731 - of a step
    mean = (hvd.size() + 1) / 2

    @tf.function
    def graph() -> None:
        optimizer.apply_gradients(zip(optimizer.get_gradients(loss(), [variable]), [variable], strict=True))

    optimizer.apply_gradients(optimizer.compute_gradients(loss, [variable]))
    assert variable.numpy().tolist() == [8.0 - mean]
    graph()
    assert variable.numpy().tolist() == [8.0 - 2 * mean]
