"""Keras' models around distributed optimizers: which optimizers they have, and what compiling them must not do.

- With a GPU, Keras compiles a model's step with XLA unless told otherwise (`jit_compile="auto"`), and XLA cannot
  communicate. Keras' own training step is compiled in two halves, with the reduction between them. For a step of
  another kind XLA is switched off, with one line in the log.
- A model that loses its distributed optimizer by another `compile` would train on each rank alone: rank 0 warns.
- A step that was traced before its optimizer was wrapped sends nothing: it is traced again.
- A model whose weights local steps change evaluates and saves with the global weights.
- A callback may call `fit` in its own way (`around_fit`): where ranks are lost, it is called again.
- An optimizer knows the variables of a model, and no layers: before a step is made, it gets to know those with a state
  of their own, which the ranks compare.
"""

from __future__ import annotations

import functools
import gc
import inspect
import weakref
from typing import Any

import keras

from hvd_ext.job import runtime
from hvd_ext.job.log import logger
from hvd_ext.keras.optimizers import global_weights, xla
from hvd_ext.keras.optimizers.wrapper import Distributed, Wrapper
from hvd_ext.tensorflow import layers
from hvd_ext.tensorflow.gradients import kinds

# What a training step of Keras' own consists of.
_OWN = {name: getattr(keras.Model, name) for name in ("train_step", "compute_metrics", "get_metrics_result")}
_OWN_UPDATE = ("apply_gradients", "apply", "_backend_apply_gradients")
_logged: weakref.WeakSet[Any] = weakref.WeakSet()  # models for which XLA was switched off
_distributed: weakref.WeakSet[Any] = weakref.WeakSet()  # models that had a distributed optimizer


def watch(model_class: type) -> None:
    """Look at all models that are compiled from now on; a second call changes nothing.

    A plain optimizer after a distributed one does no harm to `evaluate` and `predict`, so it is a warning and no error;
    our callbacks refuse it in `fit`.
    """
    _replace(model_class, "compile", _watched_compile)
    _replace(model_class, "make_train_function", _watched_making)
    if model_class is keras.Model:  # only optimizers of Keras 3 make local steps
        for names, made in (
            (global_weights.READ, global_weights.reading),
            (global_weights.SET, global_weights.setting),
        ):
            for name in names:
                _replace(model_class, name, made, everywhere=False)
        _replace(model_class, "fit", _watched_fit, everywhere=False)


def optimizers(model: Any) -> list[Any]:
    """List a model's optimizers: the compiled one, and those that a training step of one's own keeps in attributes.

    They may be in lists, tuples and dicts, and in the models and layers inside of the model. There a plain optimizer
    does not count: a model that was loaded from a file still has the one that it was trained with.

    Returns:
        Each optimizer once.
    """
    compiled = getattr(model, "optimizer", None)
    others = [
        value
        for holder, value in layers.walk(model)
        if value is not compiled and _is_optimizer(value) and (holder is model or wrapped(value))
    ]
    return [*([compiled] if _is_optimizer(compiled) else []), *others]


def wrapped(optimizer: Any) -> list[Distributed]:
    """List the wrapped optimizers: this one, or those inside of it (loss scaling, several parts)."""
    inner = [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ())]
    inside = [part for optimizer_inside in inner if optimizer_inside is not None for part in wrapped(optimizer_inside)]
    return [optimizer, *inside] if isinstance(optimizer, Distributed) else inside


def distributed(model: Any) -> list[Distributed]:
    """List the wrapped optimizers of a model."""
    return [optimizer for outer in optimizers(model) for optimizer in wrapped(outer)]


def outlives_world(model: Any) -> bool:
    """Tell whether the functions that a model has traced may run in another world of a supervised job.

    They may where the optimizers' channels are all that they know of the world, which then get successors.
    """
    reducers = [optimizer._hvd_ext.reducer for optimizer in distributed(model)]
    outlive = all(reducer.policy.outlives and not reducer.options.check_every for reducer in reducers)
    return outlive and not any(map(kinds.meets, model.variables))


def drop_traced_steps(optimizer: Any, model_class: type) -> None:
    """Make models that have trained with a plain optimizer trace their step again, now that it is wrapped."""
    for candidate in gc.get_objects():
        if issubclass(type(candidate), model_class) and getattr(candidate, "optimizer", None) is optimizer:
            candidate.train_function = None


def _replace(model_class: type, name: str, watched: Any, *, everywhere: bool = True) -> None:
    """Replace a method where it is defined, or for models only."""
    owner = next((kind for kind in model_class.__mro__ if name in vars(kind)), None)
    if owner is not None and not hasattr(vars(owner)[name], "hvd_ext_plain"):
        plain = vars(owner)[name]
        made = watched(plain)
        made.hvd_ext_plain = plain
        setattr(owner if everywhere else model_class, name, made)


def _watched_compile(plain: Any) -> Any:
    @functools.wraps(plain)
    def compile(model: Any, *arguments: Any, **keywords: Any) -> Any:
        if wrapped(getattr(model, "optimizer", None)):
            _distributed.add(model)
        result = plain(model, *arguments, **keywords)
        if model in _distributed and not wrapped(getattr(model, "optimizer", None)):
            _warn_of_plain(model)
        return result

    return compile


def _watched_making(plain: Any) -> Any:
    @functools.wraps(plain)
    def make_train_function(model: Any, force: bool = False) -> Any:
        made = getattr(model, "train_function", None) is not None and not force
        watched = [] if made else distributed(model)
        for optimizer in watched:
            optimizer._hvd_ext.reducer.layer_states = functools.partial(
                _layer_states, weakref.ref(model), weakref.ref(optimizer)
            )
        if not watched or not isinstance(model, keras.Model) or model.run_eagerly or not model.jit_compile:
            return plain(model, force)
        if not _divides(model):
            model.jit_compile = False
            _say_without_xla(model)
            return plain(model, force)
        # past the __setattr__ of Keras, which tracks what it is given
        object.__setattr__(model, "train_step", xla.divided(model))
        object.__setattr__(model, "_jit_compile", False)
        try:
            return plain(model, force)
        finally:
            object.__setattr__(model, "_jit_compile", True)
            object.__delattr__(model, "train_step")

    return make_train_function


def _watched_fit(plain: Any) -> Any:
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def fit(model: Any, *arguments: Any, **keywords: Any) -> Any:
        given = signature.bind(model, *arguments, **keywords).arguments
        callbacks = given.get("callbacks")
        listed = callbacks if isinstance(callbacks, list | tuple) else getattr(callbacks, "callbacks", [callbacks])
        around = [callback.around_fit for callback in listed if hasattr(callback, "around_fit")]
        if not around:
            return plain(model, *arguments, **keywords)
        return around[0](model, plain, {name: value for name, value in given.items() if name != "self"})

    return fit


def _layer_states(model: weakref.ref[Any], optimizer: weakref.ref[Distributed]) -> layers.Checksums:
    """Give what the ranks compare of the layers of a model before the first step of its optimizer."""
    trained, by = model(), optimizer()
    if trained is None or by is None:
        return []
    return layers.checksums(layers.stateful(trained, by._hvd_ext.local_layers, by._hvd_ext.reducer.local_keys))


def _divides(model: Any) -> bool:
    """Tell whether XLA can compile a model's training step in two halves.

    The step, and the optimizer's way to its update, must be Keras' own: another one may read the weights after the
    update, or change gradients before they are reduced.
    """
    if not isinstance(model.optimizer, Wrapper):
        return False
    optimizer, keras_s = model.optimizer.__class__, keras.optimizers.Optimizer
    if issubclass(optimizer, keras.optimizers.LossScaleOptimizer):  # reduces in front of `apply` anyway
        keras_s = keras.optimizers.LossScaleOptimizer
    return (
        all(getattr(type(model), name) is plain and name not in vars(model) for name, plain in _OWN.items())
        and type(model).make_train_function is keras.Model.make_train_function
        and all(getattr(optimizer, name) is getattr(keras_s, name) for name in _OWN_UPDATE)
    )


def _warn_of_plain(model: Any) -> None:
    job = runtime.current_or_none()
    if job is not None and job.engine.size > 1 and job.engine.rank == 0:
        logger.warning(
            "model %r: it was compiled with a distributed optimizer before, and now with a plain one (%s): in fit each "
            "of the %d ranks would train alone; compile it with hvd_ext.DistributedOptimizer(...) again",
            model.name,
            type(model.optimizer).__name__,
            job.engine.size,
        )


def _say_without_xla(model: keras.Model) -> None:
    job = runtime.current_or_none()
    if model not in _logged and (job is None or job.engine.rank == 0):
        _logged.add(model)
        # info would not be seen unless the user has set up logging
        logger.warning(
            "model %r: jit_compile is switched off: its optimizer communicates, XLA cannot, and only Keras' own step "
            "is divided for it; compile(..., jit_compile=False) says the same without this line",
            model.name,
        )


def _is_optimizer(value: Any) -> bool:
    if isinstance(value, keras.optimizers.Optimizer):
        return True
    return type(value).__module__.startswith(("tf_keras", "keras.")) and hasattr(value, "apply_gradients")
