"""Checks of the rows of the tapes: gradients of small variables, with Horovod's argument names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import hvd_ext as hvd
from tests.ranks.migration.registry import check, compare, evens, same
from tests.ranks.migration.training_rows import TAKEN, deprecated, gradient, in_set, layers, mean, own, total, zeros


def taped(
    wrap: Callable[..., Any] = hvd.DistributedGradientTape, output: Any = None, extra: Any = None, **keywords: Any
) -> np.ndarray:
    """Give the gradient of a sum that is `gradient(rank)` on this rank, through Horovod's way to write it."""
    variable = zeros()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable * gradient(hvd.rank()))
    tape = wrap(gradtape=tape, **keywords)
    return np.asarray(tape.gradient(target=loss, sources=[variable], output_gradients=output, **(extra or {}))[0])


def taped_rows(**keywords: Any) -> np.ndarray:
    """Give the gradient of a gather, which is sparse."""
    table = tf.Variable(tf.zeros((3, 2)))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, [0, 0]) * gradient(hvd.rank()))
    tape = hvd.DistributedGradientTape(tape, **keywords)
    return tf.convert_to_tensor(tape.gradient(loss, [table])[0]).numpy()


def rows_expected() -> np.ndarray:
    return np.stack([2 * mean(), 0 * mean(), 0 * mean()])


def taped_in_groups(wrap: Callable[..., Any], **keywords: Any) -> np.ndarray:
    pair = [zeros(), zeros()]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((pair[0] + pair[1]) * gradient(hvd.rank()))
    tape = wrap(tape, groups=[[pair[0]], [pair[1]]], **keywords)
    return np.stack([np.asarray(part) for part in tape.gradient(loss, pair)])


def with_local(scale: bool = True) -> np.ndarray:
    """One source of two is registered as local."""
    shared, local = zeros(), zeros()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((shared + local) * gradient(hvd.rank()))
    tape = hvd.DistributedGradientTape(tape, scale_local_gradients=scale)
    tape.register_local_source(local)
    return np.stack([np.asarray(part) for part in tape.gradient(loss, [shared, local])])


@functools.cache
def plain() -> tuple[np.ndarray, np.ndarray]:
    return taped(**TAKEN), mean()


T = "DistributedGradientTape"
compare(
    {
        T: plain,
        f"{T}(gradtape)": plain,
        f"{T}(device_dense)": plain,
        f"{T}(device_sparse)": lambda: (taped_rows(device_sparse="/cpu:0"), rows_expected()),
        f"{T}(compression)": lambda: (taped(compression=hvd.Compression.fp16), mean()),
        f"{T}(sparse_as_dense)": lambda: (taped_rows(sparse_as_dense=True), rows_expected()),
        f"{T}(op)": lambda: (taped(op=hvd.Sum), total()),
        f"{T}(gradient_predivide_factor)": lambda: (taped(gradient_predivide_factor=2.0), mean()),
        f"{T}(num_groups)": lambda: (deprecated(lambda: taped(num_groups=1)), mean()),
        f"{T}(groups)": lambda: (taped_in_groups(hvd.DistributedGradientTape), np.stack([mean()] * 2)),
        f"{T}(process_set)": lambda: (taped(process_set=evens()), in_set()),
        f"{T}(scale_local_gradients)": lambda: (with_local(False), own(False)),
        f"{T}.gradient": plain,
        f"{T}.gradient(target)": plain,
        f"{T}.gradient(sources)": plain,
        f"{T}.gradient(output_gradients)": lambda: (taped(output=tf.constant(3.0)), 3 * mean()),
        f"{T}.gradient(use_generic_names)": lambda: (taped(extra={"use_generic_names": True}), mean()),
        f"{T}.register_local_source": lambda: (with_local(), own(True)),
    }
)


@check(*[f"{T}.get_local_and_global_gradients{part}" for part in ("", "(target)", "(sources)")])
def local_and_global() -> None:
    """Pairs of source and gradient: the local ones, and the reduced ones."""
    same_parts({})


check(f"{T}.get_local_and_global_gradients(output_gradients)")(lambda: same_parts({"output_gradients": 3.0}, 3))
check(f"{T}.get_local_and_global_gradients(use_generic_names)")(lambda: same_parts({"use_generic_names": True}))


def same_parts(keywords: dict[str, Any], times: int = 1) -> None:
    shared, local = zeros(), zeros()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((shared + local) * gradient(hvd.rank()))
    tape = hvd.DistributedGradientTape(tape)
    tape.register_local_source(local)
    if "output_gradients" in keywords:
        keywords = {"output_gradients": tf.constant(keywords["output_gradients"])}
    kept, reduced = tape.get_local_and_global_gradients(target=loss, sources=[shared, local], **keywords)
    (kept_source, kept_gradient), (source, reduced_gradient) = *kept, *reduced
    assert kept_source is local and source is shared
    same((kept_gradient, times * gradient(hvd.rank()) / hvd.size()))
    same((reduced_gradient, times * mean()))


def partial_tape(**keywords: Any) -> np.ndarray:
    local, shared = layers()
    keywords.setdefault("local_layers", [local])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((shared.kernel + local.kernel)[:, 0] * gradient(hvd.rank()))
    tape = hvd.PartialDistributedGradientTape(gradtape=tape, **keywords)
    return np.stack([np.asarray(part)[:, 0] for part in tape.gradient(loss, [shared.kernel, local.kernel])])


def partial_tape_groups() -> np.ndarray:
    local, shared = layers()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((shared.kernel + local.kernel)[:, 0] * gradient(hvd.rank()))
    tape = hvd.PartialDistributedGradientTape(tape, groups=[[shared.kernel]], local_layers=[local])
    return np.stack([np.asarray(part)[:, 0] for part in tape.gradient(loss, [shared.kernel, local.kernel])])


@functools.cache
def partly() -> tuple[np.ndarray, np.ndarray]:
    return partial_tape(sparse_as_dense=True, **TAKEN), own(True)


P = "PartialDistributedGradientTape"
compare(
    {
        P: partly,
        f"{P}(gradtape)": partly,
        f"{P}(device_dense)": partly,
        f"{P}(device_sparse)": partly,
        f"{P}(compression)": partly,
        f"{P}(sparse_as_dense)": partly,
        f"{P}(op)": lambda: (partial_tape(op=hvd.Sum)[0], total()),
        f"{P}(gradient_predivide_factor)": lambda: (partial_tape(gradient_predivide_factor=2.0), own(True)),
        f"{P}(num_groups)": lambda: (deprecated(lambda: partial_tape(num_groups=1)), own(True)),
        f"{P}(groups)": lambda: (partial_tape_groups(), own(True)),
        f"{P}(process_set)": lambda: (partial_tape(process_set=evens())[0], in_set()),
        f"{P}(local_layers)": lambda: (partial_tape(local_layers=[]), np.stack([mean()] * 2)),
        f"{P}(scale_local_gradients)": lambda: (partial_tape(scale_local_gradients=False), own(False)),
    }
)
