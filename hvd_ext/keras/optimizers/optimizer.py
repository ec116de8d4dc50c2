"""`DistributedOptimizer` and `PartialDistributedOptimizer`: optimizers that update with the gradients of all ranks."""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from hvd_ext.engine import versions
from hvd_ext.errors import InvalidError
from hvd_ext.job import consensus, process_sets
from hvd_ext.keras.optimizers import models
from hvd_ext.keras.optimizers.layerwise import Layerwise
from hvd_ext.keras.optimizers.momentum import MomentumTaken, momentum_of
from hvd_ext.keras.optimizers.wrapper import (
    Distributed,
    KerasDistribution,
    MomentumInside,
    Wrapper,
    put_in_front,
    refuse_global_norm,
    updates,
)
from hvd_ext.options import compatibility, faces
from hvd_ext.options.gradients import GradientOptions
from hvd_ext.options.reduction import option
from hvd_ext.tensorflow import devices
from hvd_ext.tensorflow.gradients import explanation, identity
from hvd_ext.tensorflow.gradients.channel import Channel
from hvd_ext.tensorflow.gradients.reducer import Reducer, distribution_of, reducer_of
from hvd_ext.tensorflow.skipping import Skipping

if TYPE_CHECKING:
    from hvd_ext.keras.optimizers.wrapper import WrappedOptimizer

__all__ = ["Distributed", "DistributedOptimizer", "PartialDistributedOptimizer", "channels", "explain", "flush"]

# the least epsilon_1 of Adafactor with `TopK`
_ADAFACTOR_EPSILON = 1e-12


@dataclasses.dataclass(frozen=True, eq=False)
class OptimizerArguments(faces.Arguments):
    """The arguments of `DistributedOptimizer`."""

    optimizer: Any
    name: str | None = None
    _: dataclasses.KW_ONLY
    use_locking: bool = option(False, "see device_dense.")


@dataclasses.dataclass(frozen=True, eq=False)
class PartialOptimizerArguments(OptimizerArguments):
    """The arguments of `PartialDistributedOptimizer`."""

    _: dataclasses.KW_ONLY
    local_layers: Any = None


@faces.takes(OptimizerArguments)
def DistributedOptimizer(arguments: OptimizerArguments) -> WrappedOptimizer:  # noqa: N802 - Horovod's name
    """Make an optimizer reduce its gradients over all ranks before every update, in `fit` and in loops of your own.

    The optimizer itself is changed and returned: it keeps its state and its class name, and it is saved as the plain
    Keras optimizer that it was. A loaded or copied optimizer is plain: wrap it again, before a `tf.function` of your
    own that uses it is traced. Clipping, weight decay and moving averages work on the reduced gradients; with the
    optimizer's gradient_accumulation_steps, only the update steps communicate. Under the global policy mixed_float16
    the result is a new `keras.optimizers.LossScaleOptimizer` around the optimizer, and all ranks skip the same steps.
    An optimizer that is wrapped already is returned as it is, if the options are the same.

    The wrapped optimizer has a method `register_local_var(variable)`, which keeps the gradients of a variable on their
    rank.

    Args:
        optimizer: an optimizer of Keras 3, which may be a `LossScaleOptimizer`, or of tf_keras (Keras 2).
        name: its name in messages; None: the name of its class.

    Returns:
        The same object; under mixed_float16 the loss-scale optimizer around it.

    Raises:
        InvalidError: the optimizer cannot be wrapped, or is wrapped with other options, or an argument breaks its rule;
            the message says what to do.
        PlanError: there is no algorithm of this name.
    """
    return wrap(arguments.optimizer, arguments.name, arguments.options())


@faces.takes(PartialOptimizerArguments, as_for="hvd_ext.DistributedOptimizer")
def PartialDistributedOptimizer(arguments: PartialOptimizerArguments) -> WrappedOptimizer:  # noqa: N802 - Horovod's name
    """Make an optimizer reduce its gradients over all ranks, except for those of some layers.

    Args:
        optimizer: as for `hvd_ext.DistributedOptimizer`.
        name: its name in messages; None for its class's name.
        local_layers: a layer or several, whose gradients are not reduced; by default they are divided by the number of
            ranks (scale_local_gradients). They may differ from rank to rank, and need not be built yet.

    Returns:
        The wrapped optimizer.

    Raises:
        InvalidError: something in local_layers is no layer, or the optimizer has a global_clipnorm; and as
            `hvd_ext.DistributedOptimizer`.
        PlanError: as `hvd_ext.DistributedOptimizer`.
    """
    return wrap(arguments.optimizer, arguments.name, arguments.options(), _layers(arguments.local_layers))


def wrap(
    optimizer: Any, name: str | None, options: GradientOptions, local_layers: Sequence[Any] = ()
) -> WrappedOptimizer:
    """Wrap an optimizer; see `DistributedOptimizer` and `PartialDistributedOptimizer`.

    Raises:
        InvalidError: the optimizer cannot be wrapped, or is wrapped with other options.
    """
    before = _wrapped_before(optimizer)
    if before is not None:
        _check_same(before, name, options, local_layers)
        return before
    if local_layers:
        refuse_global_norm(optimizer)  # before anything is changed
    wrapped = _wrapped(optimizer, name or type(optimizer).__name__, options)
    if local_layers:
        wrapped.check_local()
    wrapped._hvd_ext.local_layers = tuple(local_layers)
    for layer in local_layers:
        wrapped._hvd_ext.reducer.register_local_source(lambda layer=layer: layer.trainable_weights)
    return wrapped


def channels(optimizer: Any) -> tuple[Channel, ...]:
    """Give the channels of a wrapped optimizer: their buckets, and which algorithm was chosen and why.

    Args:
        optimizer: from `DistributedOptimizer`.

    Returns:
        One channel for each list of variables that the optimizer was applied to, and another where variables got their
        first gradients later; none before the first step, and none outside of the process set.

    Raises:
        InvalidError: the optimizer is not wrapped.
    """
    reducer = reducer_of(optimizer)
    if reducer is None:
        raise InvalidError(f"optimizer ({optimizer!r}): must come from hvd_ext.DistributedOptimizer")
    return reducer.channels


def flush(optimizer: Any) -> None:
    """Make the next step send what the ranks have kept: residuals of `TopK`, gradients that came late, local steps.

    For a file of the model alone: flush, train one more step, save. After that step no gradient is missing from the
    weights. With `TopK` the next step is dense, and all ranks call it; a momentum that `momentum_correction` has taken
    over stays with the ranks, and only `hvd_ext.callbacks.Checkpoint` saves it; if the next step is skipped because a
    gradient is not finite, everything stays as it was, and the step after it is dense. With sync= the next step waits
    for the gradients of all ranks; one rank that calls it is enough. With local_steps= all ranks call it, and the next
    step ends with an outer step of all weights, which sends everything. Between two calls of an elastic `fit`, a
    worker that joins later skips it, as it skips the calls that the other ranks have completed.

    Args:
        optimizer: from `hvd_ext.DistributedOptimizer` with a codec (`hvd_ext.TopK` and others), sync= or local_steps=.
            A tape cannot be flushed: no object of the user's lasts from step to step.

    Raises:
        InvalidError: the optimizer is not wrapped, or keeps nothing.
        CommunicationError: another rank has ended, or does not call it in time.
    """
    reducer = reducer_of(optimizer)
    if reducer is None or not reducer.policy.flushes:
        raise InvalidError(
            f"flush ({optimizer!r}): must be an optimizer from hvd_ext.DistributedOptimizer with "
            "compression=hvd_ext.TopK(...), another codec or LowRank, sync= or local_steps=; other optimizers keep no "
            "gradients back"
        )
    if reducer.options.partial:
        reducer.flush()
        return
    job = process_sets.runtime_of(reducer.options.process_set)
    if job is not None and not job.engine.passes_over:  # the others have flushed
        # ranks with different densities would run different plans
        consensus.exchange(job.engine, "flush", lambda: reducer.label)
        reducer.flush()


def explain(optimizer: Any, file: str | Path | None = None) -> str:
    """Print how the gradients of an optimizer are reduced, and why: buckets, algorithms, predicted and measured times.

    With `sync=` it also sums up the rounds so far: which ranks were on time, late and waited (rank 0 knows how long all
    ranks waited, another rank only its own time), and how stale gradients were.

    With HVD_EXT_EXPLAIN=1 rank 0 prints the buckets, also for tapes, whenever they were planned.

    Args:
        optimizer: from `hvd_ext.DistributedOptimizer`, after its first step.
        file: where to write the layout as JSON, for `buckets=FILE`; None for nowhere.

    Returns:
        The text that was printed.

    Raises:
        InvalidError: the optimizer is not wrapped or has made no step, or the file cannot be written.
    """
    reducer = reducer_of(optimizer)
    if reducer is None:
        raise InvalidError(f"explain ({optimizer!r}): must be an optimizer from hvd_ext.DistributedOptimizer")
    text = explanation.explained(reducer, file)
    print(text, end="")
    return text


def _wrapped(optimizer: Any, label: str, options: GradientOptions) -> Any:
    if _is_keras2(optimizer):
        from hvd_ext.keras.optimizers import keras2

        return keras2.wrap(optimizer, label, options)
    _check_optimizer(optimizer)
    versions.check("tensorflow", tf.__version__)
    versions.check("keras", keras.__version__)
    devices.warn_of_shared()
    models.watch(keras.Model)
    wrapped = _with_loss_scale(optimizer)
    updating = updates(wrapped)
    scaling = updating is not wrapped
    _accumulate(updating, options)
    momentum = momentum_of(updating, options)
    if options.local_steps is not None:
        _check_outer(options.local_steps.outer)
        if updating.use_ema:
            raise InvalidError(f"optimizer {label!r}: {compatibility.words('local steps', 'EMA')}")
    sparse = options.keeps_residuals and options.local_steps is None  # what the optimizer updates by
    if scaling and sparse and updating.gradient_accumulation_steps:
        raise InvalidError(
            f"optimizer {label!r}: with a loss scale every pass of a gradient accumulation is reduced, and "
            f"{type(options.compression).__name__} would count each pass as a step of momentum, warm-up and flush; use "
            "mixed_bfloat16, or leave accumulation out"
        )
    steps = functools.partial(_steps_of, weakref.ref(updating))
    if sparse and options.codec is not None:
        _check_sparse(updating, label)
    # with a loss scale a round that is not finite is skipped
    reducer = Reducer(identity.of_optimizer(label, updating.name), options, momentum, steps, holds_again=scaling)
    if isinstance(updating, Layerwise):
        updating._check_parallel(options)
    ours = KerasDistribution(reducer, weakref.ref(wrapped), skipping=Skipping(label) if scaling else None)
    fronts: list[type] = [Wrapper, MomentumInside] if scaling else [Wrapper]
    taken = [] if momentum is None else [MomentumTaken]
    if scaling:
        put_in_front(updating, ours, *taken)
    put_in_front(wrapped, ours, *fronts, *([] if scaling else taken))
    weakref.finalize(wrapped, reducer.close).atexit = False
    models.drop_traced_steps(wrapped, keras.Model)
    return wrapped


def _check_outer(outer: Any) -> None:
    """Refuse an outer optimizer that would not apply each change of the weights as it is."""
    if outer is None or isinstance(outer, str):
        return
    if not isinstance(outer, keras.optimizers.Optimizer):
        raise InvalidError(f"LocalSteps, outer ({outer!r}): must be an optimizer of Keras 3, 'nesterov' or None")
    scales = isinstance(outer, keras.optimizers.LossScaleOptimizer) or outer.loss_scale_factor is not None
    if scales or outer.gradient_accumulation_steps:
        raise InvalidError(
            f"LocalSteps, outer ({outer.name!r}): must be without a loss scale and without gradient accumulation, "
            "because its gradients are changes of weights"
        )


def _check_sparse(optimizer: keras.optimizers.Optimizer, label: str) -> None:
    """Refuse an optimizer that divides 0 by 0 where whole rows and columns of a gradient are 0, as with `TopK`."""
    # It divides a gradient by the root of r c / mean(r). In an empty row and column, r and c are epsilon_1. Its square
    # must not underflow in float32, also where mean(r), of squares of gradients, is large.
    if isinstance(optimizer, keras.optimizers.Adafactor) and optimizer.epsilon_1 < _ADAFACTOR_EPSILON:
        raise InvalidError(
            f"optimizer {label!r}: Adafactor with epsilon_1={optimizer.epsilon_1:g} makes weights NaN where a row "
            "and a column of a gradient are 0, as TopK makes them; with TopK it must be at least "
            f"{_ADAFACTOR_EPSILON:g}: keras.optimizers.Adafactor(epsilon_1={_ADAFACTOR_EPSILON:g})"
        )


def _wrapped_before(optimizer: Any) -> Any:
    """Give the optimizer if it is wrapped, or the wrapped loss-scale optimizer that was made around it, or None."""
    ours = distribution_of(optimizer)
    found = optimizer if ours is None else ours.outer()
    return found if isinstance(found, Distributed) else None


def _check_same(wrapped: Any, name: str | None, options: GradientOptions, local_layers: Sequence[Any]) -> None:
    """Refuse options other than those with which the optimizer is wrapped."""
    reducer: Reducer = wrapped._hvd_ext.reducer
    classes = {type(one).__name__ for one in (wrapped, getattr(wrapped, "inner_optimizer", wrapped))}
    differing = list(options.differing(reducer.options))
    if reducer.label not in ({name} if name else classes):
        differing.insert(0, "name")
    if {id(layer) for layer in local_layers} != {id(layer) for layer in wrapped._hvd_ext.local_layers}:
        differing.append("local_layers")
    if differing:
        raise InvalidError(
            f"optimizer {reducer.label!r}: it is wrapped already, with another {', '.join(differing)}; wrap an "
            "optimizer once, or make a new one for other options"
        )


def _steps_of(optimizer: weakref.ref[Any]) -> int:
    """Give the number of update steps of an optimizer; the reducer, which asks, must not keep the optimizer alive."""
    found = optimizer()
    return int(found.iterations) if found is not None and found.built else 0


def _is_keras2(optimizer: Any) -> bool:
    """Whether an optimizer is one of tf_keras, without importing tf_keras."""
    tf_keras = sys.modules.get("tf_keras")
    if tf_keras is None or not hasattr(tf_keras, "optimizers"):
        return False
    return isinstance(optimizer, (tf_keras.optimizers.Optimizer, tf_keras.optimizers.legacy.Optimizer))


def _check_optimizer(optimizer: Any) -> None:
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise InvalidError(f"Keras' backend ({backend!r}): must be 'tensorflow'; set KERAS_BACKEND=tensorflow")
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise InvalidError(
            f"optimizer ({optimizer!r}): optimizers of tf.compat.v1 are not supported; use one of Keras, or reduce the "
            "gradients with hvd_ext.allreduce between its compute_gradients and apply_gradients"
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise InvalidError(
            f"optimizer ({optimizer!r}): must be an optimizer of Keras 3, such as keras.optimizers.Adam(), or of "
            "tf_keras; names and classes are not accepted"
        )
    several: Any = getattr(keras.optimizers, "MultiOptimizer", ())
    if isinstance(optimizer, several):
        raise InvalidError(
            f"optimizer {optimizer.name!r}: a MultiOptimizer leaves updates to its inner optimizers; wrap each of them"
        )


def _layers(given: Any) -> list[Any]:
    if given is None:
        return []
    layers = list(given) if isinstance(given, Iterable) and not hasattr(given, "trainable_weights") else [given]
    for layer in layers:
        if isinstance(layer, type) or not hasattr(layer, "trainable_weights"):
            raise InvalidError(f"local_layers ({layer!r}): must be a layer of Keras, or several")
    return layers


def _with_loss_scale(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Put a loss-scale optimizer around one where the global policy is mixed_float16, as `compile` would.

    An optimizer with a fixed loss_scale_factor is left as it is: give `compile` auto_scale_loss=False then.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        if isinstance(optimizer.inner_optimizer, Distributed):
            raise InvalidError(
                f"optimizer {optimizer.name!r}: the optimizer inside of it is wrapped already, and it would be reduced "
                "twice; wrap the outer one only: "
                "hvd_ext.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"
            )
        return optimizer
    if keras.config.dtype_policy().name != "mixed_float16" or optimizer.loss_scale_factor is not None:
        return optimizer
    return keras.optimizers.LossScaleOptimizer(optimizer)


def _accumulate(optimizer: keras.optimizers.Optimizer, options: GradientOptions) -> None:
    """Make Horovod's backward_passes_per_step Keras' gradient_accumulation_steps; 1 leaves the optimizer as it is.

    Keras adds gradients up in the optimizer's accumulators, which are saved with it, and updates at every N-th apply.
    """
    passes, own = options.backward_passes_per_step, optimizer.gradient_accumulation_steps
    if passes == 1 or own == passes:
        return
    if own:
        raise InvalidError(
            f"backward_passes_per_step ({passes}): optimizer {optimizer.name!r} has gradient_accumulation_steps={own}, "
            "which means the same; give one of the two"
        )
    if optimizer.built:
        raise InvalidError(
            f"backward_passes_per_step ({passes}): optimizer {optimizer.name!r} has its variables already, and no "
            f"accumulators among them; create it with gradient_accumulation_steps={passes}, or wrap it before "
            "its first step"
        )
    optimizer.gradient_accumulation_steps = passes
