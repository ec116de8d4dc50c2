"""`DistributedOptimizer`: an optimizer whose update steps see the gradients of all ranks.

Keras 3 calls `apply` -> `_backend_apply_gradients` (gradient accumulation) -> `_clip_gradients` -> the update step. The
reduction sits in front of the clipping: accumulated steps do not communicate, and a global norm is that of the reduced
gradient. A loss-scale optimizer reduces in front of its look at the gradients (`keras/loss_scale.py`).
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from typing import Any

import keras
import tensorflow as tf

from hvd_ext.errors import InvalidError
from hvd_ext.gradient_options import GradientOptions
from hvd_ext.keras import accumulation, compiled, in_part, jit, loss_scale
from hvd_ext.keras.distributed import Distributed, Reducing, class_of
from hvd_ext.tensorflow.channel import Channel
from hvd_ext.tensorflow.reducer import Reducer

__all__ = ["Distributed", "DistributedOptimizer", "channels"]


def DistributedOptimizer(  # noqa: N802 - the name that users of Horovod know
    optimizer: Any, name: str | None = None, **keywords: Any
) -> Any:
    """Make an optimizer reduce its gradients over all ranks before every update, in `fit` and in loops of your own.

    The optimizer itself is changed and returned: it keeps its state and its class name, and it is saved as the plain
    Keras optimizer that it was. A loaded or copied optimizer is plain: wrap it again, before a `tf.function` of your
    own that uses it is traced. Clipping, weight decay and moving averages work on the reduced gradients; with the
    optimizer's gradient_accumulation_steps, only the update steps communicate. Under the global policy mixed_float16 a
    new `keras.optimizers.LossScaleOptimizer` with the optimizer inside is returned, whose ranks skip a step together.

    The wrapped optimizer has a method `register_local_var(variable)`: that variable's gradients stay on their rank.

    Args:
        optimizer: an optimizer of Keras 3, a `LossScaleOptimizer` too, or of tf_keras (Keras 2).
        name: its name in messages; None for its class's name.
        **keywords: the fields of `hvd_ext.gradient_options.GradientOptions`, which are Horovod's keywords and ours: op,
            compression, sparse_as_dense, gradient_predivide_factor, backward_passes_per_step,
            average_aggregated_gradients, groups, process_set, scale_local_gradients, algorithm, bucket_nbytes,
            check_every, check_start. compression may be a `hvd_ext.TopK` (docs/topk.md).
            Horovod's device_dense, device_sparse and use_locking are taken and change nothing; num_groups is groups.

    Returns:
        The same object; under mixed_float16 the loss-scale optimizer around it.

    Raises:
        InvalidError: the optimizer cannot be wrapped, or an argument breaks its rule; the message says what to do.
        PlanError: there is no algorithm of this name.
        TypeError: a keyword that neither hvd_ext nor Horovod knows.
    """
    options = GradientOptions.from_keywords("DistributedOptimizer", keywords)
    label = name or type(optimizer).__name__
    if _is_keras2(optimizer):
        from hvd_ext.keras import keras2

        return keras2.wrap(optimizer, label, options)
    _check_optimizer(optimizer)
    jit.watch()
    compiled.watch(keras.Model)
    wrapped = loss_scale.scaled(optimizer)
    scaling = isinstance(wrapped, keras.optimizers.LossScaleOptimizer)
    accumulation.prepare(wrapped.inner_optimizer if scaling else wrapped, options)
    plain = wrapped.inner_optimizer if scaling else wrapped
    momentum = in_part.momentum_of(plain, options)
    if scaling and options.topk is not None and plain.gradient_accumulation_steps:
        raise InvalidError(
            f"optimizer {label!r}: with a loss scale every pass of a gradient accumulation is reduced, and TopK would "
            "take each for a step: momentum, warm-up and flush would count passes; take mixed_bfloat16, or leave "
            "accumulation out"
        )
    reducer = Reducer(label, options, momentum, functools.partial(_steps_of, weakref.ref(plain)))
    front: type[Distributed] = (
        loss_scale.LossScaling if scaling else Reducing if options.topk is None else in_part.InPart
    )
    # past Keras' own __setattr__, which tracks what it is given
    object.__setattr__(wrapped, "_hvd_ext_reducer", reducer)
    object.__setattr__(wrapped, "__class__", class_of(type(wrapped), front))
    if scaling and momentum is not None:
        object.__setattr__(plain, "_hvd_ext_reducer", reducer)
        object.__setattr__(plain, "__class__", class_of(type(plain), in_part.Inner))
    weakref.finalize(wrapped, reducer.close).atexit = False
    _drop_traced_steps(wrapped)
    return wrapped


def channels(optimizer: Any) -> tuple[Channel, ...]:
    """Give the channels of a wrapped optimizer: their buckets, and which algorithm was chosen and why.

    Args:
        optimizer: from `DistributedOptimizer`.

    Returns:
        One channel for each list of variables that the optimizer was applied to, and more where variables got their
        first gradients later; none before the first step, and none outside of the process set.

    Raises:
        InvalidError: the optimizer is not wrapped.
    """
    reducer = getattr(optimizer, "_hvd_ext_reducer", None)
    if not isinstance(reducer, Reducer):
        raise InvalidError(f"optimizer ({optimizer!r}): must come from hvd_ext.DistributedOptimizer")
    return reducer.channels


def _steps_of(optimizer: weakref.ref[Any]) -> int:
    """Give the update steps of an optimizer; the reducer outlives it, and must not hold it."""
    found = optimizer()
    return int(found.iterations) if found is not None and found.built else 0


def _drop_traced_steps(optimizer: keras.optimizers.Optimizer) -> None:
    """Make models that have trained with the plain optimizer trace their step again: the old one sends nothing."""
    for candidate in gc.get_objects():
        if issubclass(type(candidate), keras.Model) and getattr(candidate, "optimizer", None) is optimizer:
            candidate.train_function = None
            jit.switch_off(candidate)


def _is_keras2(optimizer: Any) -> bool:
    """Tell an optimizer of tf_keras, without importing what the user has not."""
    tf_keras = sys.modules.get("tf_keras")
    if tf_keras is None or not hasattr(tf_keras, "optimizers"):
        return False
    return isinstance(optimizer, (tf_keras.optimizers.Optimizer, tf_keras.optimizers.legacy.Optimizer))


def _check_optimizer(optimizer: Any) -> None:
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise InvalidError(f"Keras' backend ({backend!r}): must be 'tensorflow'; set KERAS_BACKEND=tensorflow")
    if isinstance(optimizer, Distributed):
        raise InvalidError(f"optimizer {optimizer.name!r}: it is wrapped already; wrap an optimizer once")
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise InvalidError(
            f"optimizer ({optimizer!r}): optimizers of tf.compat.v1 are not taken; use one of Keras, or reduce the "
            "gradients with hvd_ext.allreduce between its compute_gradients and apply_gradients"
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise InvalidError(
            f"optimizer ({optimizer!r}): must be an optimizer of Keras 3, such as keras.optimizers.Adam(), or of "
            "tf_keras; names and classes are not taken"
        )
    if isinstance(optimizer, getattr(keras.optimizers, "MultiOptimizer", ())):
        raise InvalidError(
            f"optimizer {optimizer.name!r}: a MultiOptimizer leaves updates to its inner optimizers; wrap each of them"
        )
