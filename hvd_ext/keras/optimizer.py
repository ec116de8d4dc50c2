"""`DistributedOptimizer`: a Keras 3 optimizer whose update steps see the gradients of all ranks.

Keras calls `apply` -> `_backend_apply_gradients` (gradient accumulation) -> `_clip_gradients` -> the update step. The
reduction sits in front of the clipping: accumulated steps do not communicate, and a global norm is that of the reduced
gradient.
"""

from __future__ import annotations

import difflib
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import keras

from hvd_ext.errors import InvalidError
from hvd_ext.keras.reduction import Reduction
from hvd_ext.options import Average, Compression, Options, ReduceOp, check_compression
from hvd_ext.planning import registry
from hvd_ext.tensorflow.registration import Channel


def DistributedOptimizer(  # noqa: N802 - the name that users of Horovod know
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    *,
    op: ReduceOp = Average,
    algorithm: str | None = None,
    bucket_nbytes: int | None = None,
    compression: Compression | None = None,
    **horovod: Any,
) -> keras.optimizers.Optimizer:
    """Make an optimizer reduce its gradients over all ranks before every update, in `fit` and in loops of your own.

    The optimizer itself is changed and returned: it keeps its state and its class name, and it is saved as the plain
    Keras optimizer that it was. A loaded or copied optimizer is plain: wrap it again, before a `tf.function` of your
    own that uses it is traced. Clipping, weight decay and moving averages work on the reduced gradients; with the
    optimizer's gradient_accumulation_steps, only the update steps communicate.

    Args:
        optimizer: an optimizer of Keras 3.
        name: its name in messages; None for its class's name.
        op: `hvd_ext.Average` or `hvd_ext.Sum` of the ranks' gradients.
        algorithm: "auto" or an allreduce algorithm's name; None for that of `init` (HVD_EXT_ALGORITHM, else "auto").
        bucket_nbytes: gradients travel together in buckets of about so many bytes; None for the one of `init`.
        compression: `hvd_ext.Compression.fp16` or `.bf16` to send float32 gradients as halves; they are added in
            float32. With fp16 a sum over the ranks beyond 65504 becomes infinite. None for that of `init`.
        **horovod: the other keywords of Horovod's DistributedOptimizer, at values that change no result.

    Returns:
        The same object.

    Raises:
        InvalidError: the optimizer cannot be wrapped, or an argument breaks its rule; the message says what to do.
        PlanError: there is no algorithm of this name.
        TypeError: a keyword that neither hvd_ext nor Horovod knows.
    """
    _check_optimizer(optimizer)
    _check_horovod(horovod)
    compression = None if compression is None else check_compression(compression)
    Options().replace(op=op, algorithm=algorithm, bucket_nbytes=bucket_nbytes)
    if algorithm not in (None, "auto"):
        registry.get(algorithm)
    label = name or type(optimizer).__name__
    reduction = Reduction(label, op=op, algorithm=algorithm, bucket_nbytes=bucket_nbytes, compression=compression)
    # past Keras' own __setattr__, which tracks what it is given
    object.__setattr__(optimizer, "_hvd_ext_reduction", reduction)
    object.__setattr__(optimizer, "__class__", _distributed_class(type(optimizer)))
    weakref.finalize(optimizer, reduction.close).atexit = False
    _drop_traced_steps(optimizer)
    return optimizer


def channels(optimizer: keras.optimizers.Optimizer) -> tuple[Channel, ...]:
    """Give the channels of a wrapped optimizer: their buckets, and which algorithm was chosen and why.

    Args:
        optimizer: from `DistributedOptimizer`.

    Returns:
        One channel for each list of variables that the optimizer was applied to; none before the first step.

    Raises:
        InvalidError: the optimizer is not wrapped.
    """
    if not isinstance(optimizer, Distributed):
        raise InvalidError(f"optimizer ({optimizer!r}): must come from hvd_ext.DistributedOptimizer")
    return optimizer._hvd_ext_reduction.channels


class Distributed:
    """What `DistributedOptimizer` puts in front of the optimizer's class; `isinstance` tells a wrapped optimizer."""

    _hvd_ext_reduction: Reduction

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Apply one step's gradients, reduced over the ranks; see `keras.optimizers.Optimizer.apply`."""
        grads = list(grads)
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if not grads or (trainable_variables is None and len(grads) != len(variables)):
            super().apply(grads, trainable_variables)  # Keras does nothing, or says what is wrong
            return
        if self.built:
            self._check_variables_are_known(variables)
        with self._hvd_ext_reduction.step(self, grads, variables) as ready:
            super().apply(ready, variables)

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, arguments = super().__reduce__()
        return getattr(self.__class__, rebuild.__name__), arguments  # of the plain class, which pickle finds

    def _clip_gradients(self, grads: Any) -> Any:
        return super()._clip_gradients(self._hvd_ext_reduction.reduce(grads, self._iterations))


@functools.cache
def _distributed_class(plain: type) -> type:
    """The class of a wrapped optimizer.

    Keras writes `optimizer.__class__` into files: the property answers with the plain class, whatever name that is
    registered under. What is made from the class (`from_config`) is a plain optimizer too.
    """
    return type(
        plain.__name__,
        (Distributed, plain),
        {
            "__module__": plain.__module__,
            "__qualname__": plain.__qualname__,
            "__doc__": plain.__doc__,
            "__class__": property(lambda self: plain),
            "__new__": lambda cls, *args, **kwargs: plain(*args, **kwargs),
        },
    )


def _drop_traced_steps(optimizer: keras.optimizers.Optimizer) -> None:
    """Make models that have trained with the plain optimizer trace their step again: the old one sends nothing."""
    for candidate in gc.get_objects():
        if issubclass(type(candidate), keras.Model) and getattr(candidate, "optimizer", None) is optimizer:
            candidate.train_function = None


def _check_optimizer(optimizer: Any) -> None:
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise InvalidError(f"Keras' backend ({backend!r}): must be 'tensorflow'; set KERAS_BACKEND=tensorflow")
    if isinstance(optimizer, Distributed):
        raise InvalidError(f"optimizer {optimizer.name!r}: it is wrapped already; wrap an optimizer once")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise InvalidError(
            f"optimizer ({optimizer!r}): must be an optimizer of Keras 3, such as keras.optimizers.Adam(); names and "
            "optimizers of Keras 2 (tf_keras, keras.optimizers.legacy) are not taken"
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise InvalidError(
            f"optimizer {optimizer.name!r}: a LossScaleOptimizer cannot be wrapped yet; use the policy mixed_bfloat16, "
            "or wrap its inner optimizer with a fixed loss_scale_factor"
        )
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        raise InvalidError(
            f"optimizer {optimizer.name!r}: a MultiOptimizer leaves updates to its inner optimizers; wrap each of them"
        )


def _is_global_process_set(value: Any) -> bool:
    return value is None or getattr(value, "process_set_id", None) == 0


def _anything(value: Any) -> bool:
    return True


# Horovod's other keywords: at which values they change no result here, and what to do about the others.
_HOROVOD: dict[str, tuple[Callable[[Any], bool], str]] = {
    "device_dense": (_anything, ""),
    "device_sparse": (_anything, ""),
    "use_locking": (_anything, ""),
    "sparse_as_dense": (_anything, ""),  # sparse gradients are always made dense
    "average_aggregated_gradients": (_anything, ""),  # speaks of backward_passes_per_step > 1 only
    "scale_local_gradients": (_anything, ""),  # speaks of local variables, which there are none of
    "backward_passes_per_step": (
        lambda value: value == 1,
        "must be 1; give the Keras optimizer gradient_accumulation_steps instead, it communicates on update steps only",
    ),
    "gradient_predivide_factor": (
        lambda value: value == 1.0,
        "must be 1.0; the average divides once, after the sum: use op=Sum and scale the loss for anything else",
    ),
    "num_groups": (lambda value: not value, "must be 0; bucket_nbytes says which gradients travel together"),
    "groups": (lambda value: not value, "must be None; bucket_nbytes says which gradients travel together"),
    "process_set": (_is_global_process_set, "must be None or the global process set; all ranks take part"),
}


def _check_horovod(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if name not in _HOROVOD:
            known = ["op", "algorithm", "bucket_nbytes", "compression", *_HOROVOD]
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
            raise TypeError(f"DistributedOptimizer has no keyword {name!r}{hint}")
        harmless, rule = _HOROVOD[name]
        if not harmless(value):
            raise InvalidError(f"{name} ({value!r}): {rule}")
