"""Checks of the rows of optimizers and tapes: small variables, with Horovod's argument names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import InvalidError
from tests.ranks.migration.registry import check, compare, evens, named, refused, same

# Gives what a wrapped optimizer or tape makes of this rank's gradients of some variables.
Reduce = Callable[..., list[np.ndarray]]


def gradient(rank: int) -> np.ndarray:
    return np.array([1.0, -2.0], np.float32) * (rank + 1)


def own_gradient() -> tf.Tensor:
    return tf.constant(gradient(hvd.rank()))


def total() -> np.ndarray:
    return np.sum([gradient(rank) for rank in range(hvd.size())], axis=0)


def mean(ranks: Sequence[int] | None = None) -> np.ndarray:
    return np.mean([gradient(rank) for rank in (range(hvd.size()) if ranks is None else ranks)], axis=0)


def in_set() -> np.ndarray:
    """What a reduction in the set of the even ranks gives this rank: outsiders keep their own gradient."""
    return mean(evens().ranks) if evens().included() else gradient(hvd.rank())


def zeros(dtype: str = "float32") -> keras.Variable:
    return keras.Variable(np.zeros(2), dtype=dtype, name="kernel")


def stepped(
    wrap: Callable[..., Any],
    variables: list[Any],
    gradients: list[Any],
    passes: int = 1,
    local: Any = None,
    **more: Any,
) -> list[np.ndarray]:
    """Take one update of SGD with rate 1, and give what was subtracted."""
    before = [variable.numpy() for variable in variables]
    optimizer = wrap(optimizer=keras.optimizers.SGD(1.0), **more)
    if local is not None:
        optimizer.register_local_var(local)
    for _ in range(passes):
        optimizer.apply(gradients, variables)
    return [old - variable.numpy() for old, variable in zip(before, variables, strict=True)]


def recorded(variables: list[Any], gradients: list[Any]) -> tuple[tf.GradientTape, tf.Tensor]:
    """Record a loss that has these gradients; those of slices come from a gather."""
    with tf.GradientTape() as tape:
        loss = tf.constant(0.0)
        for variable, part in zip(variables, gradients, strict=True):
            if isinstance(part, tf.IndexedSlices):
                product = tf.gather(variable.value, part.indices) * part.values
            else:
                product = tf.convert_to_tensor(variable) * part
            loss += tf.cast(tf.reduce_sum(product), tf.float32)
    return tape, loss


def taped(
    wrap: Callable[..., Any],
    variables: list[Any],
    gradients: list[Any],
    local: Any = None,
    taking: dict[str, Any] | None = None,
    **more: Any,
) -> list[np.ndarray]:
    """Give the gradients of a loss, through Horovod's way to write it."""
    tape, loss = recorded(variables, gradients)
    tape = wrap(gradtape=tape, **more)
    if local is not None:
        tape.register_local_source(local)
    results = tape.gradient(target=loss, sources=variables, **(taking or {}))
    return [tf.convert_to_tensor(result).numpy() for result in results]


def dense(reduce: Reduce, **keywords: Any) -> np.ndarray:
    return reduce([zeros()], [own_gradient()], **keywords)[0]


def sparse(reduce: Reduce, **keywords: Any) -> np.ndarray:
    """As `dense`, with slices; both are of row 0, which the ranks touch twice."""
    table = keras.Variable(np.zeros((3, 2)), dtype="float32")
    rows = tf.stack([own_gradient()] * 2)
    return reduce([table], [tf.IndexedSlices(rows, tf.constant([0, 0]), tf.constant([3, 2]))], **keywords)[0]


def one_row() -> np.ndarray:
    return np.stack([2 * mean(), 0 * mean(), 0 * mean()])


def grouped(reduce: Reduce) -> np.ndarray:
    """Two variables of one name and two dtypes, each in a group of its own."""
    pair = [zeros("float32"), zeros("float64")]
    gradients = [tf.cast(own_gradient(), variable.dtype) for variable in pair]
    return np.stack(reduce(pair, gradients, groups=[[pair[0]], [pair[1]]]))


def with_local(reduce: Reduce, scale: bool = True) -> np.ndarray:
    """A shared and a local variable."""
    shared, local = zeros(), zeros()
    return np.stack(reduce([shared, local], [own_gradient()] * 2, local=local, scale_local_gradients=scale))


def partly(reduce: Reduce, in_groups: bool = False, **keywords: Any) -> np.ndarray:
    """The kernels of two layers that multiply: the second is local to its rank."""
    shared, local = (keras.layers.Dense(1, use_bias=False, kernel_initializer="ones") for _ in range(2))
    for layer in (shared, local):
        layer.build((None, 2))
    keywords.setdefault("local_layers", [local])
    if in_groups:
        keywords["groups"] = [[shared.kernel]]
    gradients = [own_gradient()[:, tf.newaxis]] * 2
    return np.stack(reduce([shared.kernel, local.kernel], gradients, **keywords))[:, :, 0]


def own(scale: bool = True) -> np.ndarray:
    """What a shared and a local variable get."""
    return np.stack([mean(), gradient(hvd.rank()) / (hvd.size() if scale else 1)])


def deprecated(call: Callable[[], Any]) -> Any:
    with pytest.warns(DeprecationWarning, match="num_groups"):
        return call()


# What changes no result, in one call.
TAKEN = {"device_dense": "/cpu:0", "device_sparse": "/cpu:0", "compression": hvd.Compression.none}
D, P = "DistributedOptimizer", "PartialDistributedOptimizer"
T, Q = "DistributedGradientTape", "PartialDistributedGradientTape"
WAYS: dict[str, Reduce] = {
    D: functools.partial(stepped, hvd.DistributedOptimizer),
    T: functools.partial(taped, hvd.DistributedGradientTape),
}
PARTIAL: dict[str, Reduce] = {
    P: functools.partial(stepped, hvd.PartialDistributedOptimizer),
    Q: functools.partial(taped, hvd.PartialDistributedGradientTape),
}


def _rows_of(name: str, reduce: Reduce) -> None:
    halves = hvd.Compression.fp16
    compare(
        {
            f"{name}(compression)": lambda: (dense(reduce, compression=halves), mean()),
            f"{name}(op)": lambda: (dense(reduce, op=hvd.Sum), total()),
            f"{name}(gradient_predivide_factor)": lambda: (dense(reduce, gradient_predivide_factor=2.0), mean()),
            f"{name}(sparse_as_dense)": lambda: (sparse(reduce, sparse_as_dense=True), one_row()),
            f"{name}(device_sparse)": lambda: (sparse(reduce, device_sparse="/cpu:0"), one_row()),
            f"{name}(num_groups)": lambda: (deprecated(lambda: dense(reduce, num_groups=1)), mean()),
            f"{name}(groups)": lambda: (grouped(reduce), np.stack([mean()] * 2)),
            f"{name}(process_set)": lambda: (dense(reduce, process_set=evens()), in_set()),
            f"{name}(scale_local_gradients)": lambda: (with_local(reduce, scale=False), own(scale=False)),
        }
    )


def _rows_of_partial(name: str, reduce: Reduce) -> None:
    check(*named(name, "device_dense device_sparse compression sparse_as_dense"))(
        lambda: same((partly(reduce, sparse_as_dense=True, **TAKEN), own()))
    )
    compare(
        {
            f"{name}(op)": lambda: (partly(reduce, op=hvd.Sum)[0], total()),
            f"{name}(gradient_predivide_factor)": lambda: (partly(reduce, gradient_predivide_factor=2.0), own()),
            f"{name}(groups)": lambda: (partly(reduce, in_groups=True), own()),
            f"{name}(process_set)": lambda: (partly(reduce, process_set=evens())[0], in_set()),
            f"{name}(local_layers)": lambda: (partly(reduce, local_layers=[]), np.stack([mean()] * 2)),
            f"{name}(scale_local_gradients)": lambda: (partly(reduce, scale_local_gradients=False), own(scale=False)),
        }
    )


for _name, _reduce in WAYS.items():
    _rows_of(_name, _reduce)
for _name, _reduce in PARTIAL.items():
    _rows_of_partial(_name, _reduce)


@check(*named(D, "optimizer name use_locking device_dense"), "Average", "Compression.none")
def an_optimizer() -> None:
    """The arguments that change no result."""
    same((dense(WAYS[D], name="a name", use_locking=True, op=hvd.Average, **TAKEN), mean()))


@check(*named(T, "gradtape device_dense"), *named(f"{T}.gradient", "target sources"))
def a_tape() -> None:
    """The arguments that change no result."""
    same((dense(WAYS[T], **TAKEN), mean()))


TWO_PASSES: dict[str, Any] = {"passes": 2, "backward_passes_per_step": 2}
check(f"{P}(optimizer)", f"{P}(name)")(lambda: same((partly(PARTIAL[P], name="a name"), own())))
check(f"{Q}(gradtape)")(lambda: same((partly(PARTIAL[Q]), own())))
compare(
    {
        f"{D}(backward_passes_per_step)": lambda: (dense(WAYS[D], **TWO_PASSES), 2 * mean()),
        f"{D}(average_aggregated_gradients)": lambda: (
            dense(WAYS[D], **TWO_PASSES, average_aggregated_gradients=True),
            mean(),
        ),
        f"{D}.register_local_var": lambda: (with_local(WAYS[D]), own()),
        f"{T}.register_local_source": lambda: (with_local(WAYS[T]), own()),
        f"{T}.gradient(output_gradients)": lambda: (
            dense(WAYS[T], taking={"output_gradients": tf.constant(3.0)}),
            3 * mean(),
        ),
        f"{T}.gradient(use_generic_names)": lambda: (dense(WAYS[T], taking={"use_generic_names": True}), mean()),
        f"{Q}(num_groups)": lambda: (deprecated(lambda: partly(PARTIAL[Q], num_groups=1)), own()),
        "Sum": lambda: (dense(WAYS[D], op=hvd.Sum), total()),
        "Compression.fp16": lambda: (dense(WAYS[D], compression=hvd.Compression.fp16), mean()),
    }
)


@check("Min", "Max", "Product")
def other_ops() -> None:
    """Of a collective, and refused by an optimizer and a tape."""
    everyone = np.arange(hvd.size()) + 2
    for op, reduce in ((hvd.Min, np.min), (hvd.Max, np.max), (hvd.Product, np.prod)):
        assert hvd.allreduce(np.float32(hvd.rank() + 2), op=op).numpy() == reduce(everyone)
        for way in WAYS.values():
            with pytest.raises(InvalidError, match="the others are for hvd_ext.allreduce"):
                dense(way, op=op)


@check("Adasum")
def refused_ops() -> None:
    """Refused by a collective, an optimizer and a tape."""
    refused("Adasum", lambda: hvd.allreduce(np.ones(2, np.float32), op=hvd.Adasum))
    for way in WAYS.values():
        refused("Adasum", lambda way=way: dense(way, op=hvd.Adasum))


@check(*named(f"{T}.get_local_and_global_gradients", "target sources output_gradients use_generic_names"))
def local_and_global() -> None:
    """Pairs of source and gradient: the local ones, and the reduced ones."""
    for keywords, times in ({}, 1), ({"output_gradients": tf.constant(3.0)}, 3), ({"use_generic_names": True}, 1):
        shared, local = zeros(), zeros()
        recording, loss = recorded([shared, local], [own_gradient()] * 2)
        tape = hvd.DistributedGradientTape(recording)
        tape.register_local_source(local)
        kept, reduced = tape.get_local_and_global_gradients(target=loss, sources=[shared, local], **keywords)
        (kept_source, kept_gradient), (source, reduced_gradient) = *kept, *reduced
        assert kept_source is local and source is shared
        same((kept_gradient, times * gradient(hvd.rank()) / hvd.size()))
        same((reduced_gradient, times * mean()))


@check(f"{D}.compute_gradients", f"{D}.get_gradients")
def reduced_where_they_are_computed() -> None:
    """What they give is the average, and it is applied as it is; test_keras2.py has every order of calls."""
    tf_keras = pytest.importorskip("tf_keras", reason="needs Keras 2: python -m pip install tf_keras")
    variable = tf.Variable([8.0])
    optimizer = hvd.DistributedOptimizer(tf_keras.optimizers.legacy.SGD(1.0))
    loss = lambda: variable * (hvd.rank() + 1.0)  # noqa: E731 - of a step
    average = (hvd.size() + 1) / 2

    @tf.function
    def graph() -> None:
        optimizer.apply_gradients(zip(optimizer.get_gradients(loss(), [variable]), [variable], strict=True))

    optimizer.apply_gradients(optimizer.compute_gradients(loss, [variable]))
    assert variable.numpy().tolist() == [8.0 - average]
    graph()
    assert variable.numpy().tolist() == [8.0 - 2 * average]
