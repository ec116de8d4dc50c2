"""What the callbacks share: a base class that Keras 2 takes too, the slots of both Keras, and two refusals.

It lies beside the folder of callbacks, because `Checkpoint`, which that folder has too, is derived from it.
"""

from __future__ import annotations

import numbers
import sys
from typing import Any, Literal

import keras

from hvd_ext.errors import InvalidError
from hvd_ext.job.process import rank, size
from hvd_ext.job.process_sets import global_process_set
from hvd_ext.keras.optimizers import models

Verbosity = Literal["auto", 0, 1, 2]


class Hooks:
    """Lets the `fit` of Keras 2 (tf_keras) take a callback of Keras 3; stands in front of its class.

    Attributes:
        works_on_batches: whether it does something before or after a training step.
    """

    works_on_batches = False

    def _implements_train_batch_hooks(self) -> bool:
        return self.works_on_batches

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False


class Callback(Hooks, keras.callbacks.Callback):
    """A callback of Keras 3 that the `fit` of Keras 2 (tf_keras) takes as well."""


def flat(callbacks: Any) -> list[Any]:
    """List the callbacks of `fit`: given as one, as a list of lists, as Keras' `CallbackList`, or as None."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    if callbacks is None or hasattr(callbacks, "on_epoch_end"):
        return [] if callbacks is None else [callbacks]
    return [one for part in callbacks for one in flat(part)]


def verbose(level: Verbosity = "auto") -> Verbosity:
    """Give `fit`, `evaluate` and `predict` their `verbose`: the level on rank 0, and silence on all others.

    Args:
        level: "auto", 0, 1 (a bar) or 2 (a line an epoch), as in Keras.

    Returns:
        The level on rank 0, 0 elsewhere.

    Raises:
        NotInitializedError: before `init()`.
    """
    return level if rank() == 0 else 0


def is_built(optimizer: Any) -> bool:
    """Tell whether an optimizer of Keras 3 or Keras 2 has its slots."""
    if _is_legacy(optimizer):
        return bool(getattr(optimizer, "inner_optimizer", optimizer)._hypers_created)
    built = getattr(optimizer, "built", None)
    return bool(getattr(optimizer, "_built", False) if built is None else built)


def build(optimizer: Any, trained: Any) -> None:
    """Give an optimizer of Keras 3 or Keras 2 its slots, for the variables that it will train."""
    if _is_legacy(optimizer):
        optimizer._create_all_weights(trained)
    else:
        optimizer.build(trained)


def _is_legacy(optimizer: Any) -> bool:
    return hasattr(optimizer, "_create_all_weights")  # as the optimizers of tf_keras.optimizers.legacy have it


def is_number(value: Any) -> bool:
    """Tell whether a value of the logs can be averaged: a real number, or a tensor or array without dimensions."""
    if isinstance(value, numbers.Number):
        return not isinstance(value, complex)
    return getattr(value, "shape", None) == () and hasattr(value, "dtype")


def trains_together(model: Any) -> bool:
    """Tell whether each step of a compiled model is one step of all ranks.

    Returns:
        True for Keras' own training step with an optimizer that is wrapped for all ranks. False where a training step
        of the user's own may do anything, and where only some ranks train together.
    """
    return _trains_by_itself(model) and any(
        optimizer._hvd_ext.reducer.options.process_set in (None, global_process_set)
        for optimizer in models.wrapped(model.optimizer)
    )


def refuse_plain(model: Any) -> None:
    """Refuse a compiled model that has Keras' own training step and a plain optimizer: each rank would train alone.

    A model whose weights are all frozen trains nothing, and is not refused.

    Raises:
        InvalidError: the optimizer is not wrapped, and there are several ranks.
    """
    frozen = model.built and not model.trainable_variables
    if size() > 1 and _trains_by_itself(model) and not models.wrapped(model.optimizer) and not frozen:
        raise InvalidError(
            f"optimizer {model.optimizer.name!r}: it is not wrapped, so each rank would train alone; loaded, cloned "
            "and copied models have plain optimizers: model.optimizer = hvd_ext.DistributedOptimizer(model.optimizer)"
        )


def check_rank(root_rank: Any) -> int:
    """Check the argument root_rank, and give it back; `InvalidError` if it is no whole number from 0."""
    if isinstance(root_rank, bool) or not isinstance(root_rank, int) or root_rank < 0:
        raise InvalidError(f"root_rank ({root_rank!r}): must be a rank, a whole number from 0")
    return root_rank


def _trains_by_itself(model: Any) -> bool:
    """Tell whether a model has an optimizer, and Keras' own training step."""
    plain_steps = [module.Model.train_step for module in (keras, sys.modules.get("tf_keras")) if module is not None]
    return getattr(model, "optimizer", None) is not None and type(model).train_step in plain_steps
