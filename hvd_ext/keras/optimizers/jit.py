"""XLA and a distributed optimizer: Keras' `jit_compile="auto"` is switched off for the model, with one line in the log.

With a GPU, Keras compiles a model's step with XLA unless told otherwise, and XLA cannot communicate. A model that was
told `jit_compile=True` is left alone: its first training step is refused in words.
"""

from __future__ import annotations

import functools
import logging
import weakref
from typing import Any

import keras
import tensorflow as tf

from hvd_ext.engine import versions
from hvd_ext.job import runtime
from hvd_ext.keras.optimizers.distributed import Distributed
from hvd_ext.tensorflow import devices

logger = logging.getLogger("hvd_ext")

_said: weakref.WeakSet[keras.Model] = weakref.WeakSet()  # Keras asks more than once
_RESOLVE = "_resolve_auto_jit_compile"  # of keras.src.trainers.trainer.Trainer, in Keras 3.3 to 3.15


def watch() -> None:
    """See to it that models compiled from now on do not get XLA by themselves where their optimizer communicates.

    `DistributedOptimizer` calls it. It also checks the versions of TensorFlow and Keras, and warns where the ranks of
    one host would share GPUs.

    Raises:
        InvalidError: a version of TensorFlow or Keras that is known not to work.
    """
    versions.check("tensorflow", tf.__version__)
    versions.check("keras", keras.__version__)
    devices.warn_of_shared()
    trainer = next((kind for kind in keras.Model.__mro__ if _RESOLVE in vars(kind)), None)
    # a Keras without it decides in another way: then the refusal at the first training step says what to do
    if trainer is not None and not hasattr(vars(trainer)[_RESOLVE], "hvd_ext_plain"):
        setattr(trainer, _RESOLVE, _watched(vars(trainer)[_RESOLVE]))


def switch_off(model: keras.Model) -> None:
    """Switch XLA off for a model that was compiled before its optimizer was wrapped; without XLA nothing happens.

    A file does not tell whether its model was compiled with "auto" or with True, so here both are switched off.

    Args:
        model: a compiled model.
    """
    if getattr(model, "_jit_compile", None):
        model.jit_compile = False
        _say(model)


def communicates(optimizer: Any) -> bool:
    """Tell whether an optimizer, or one inside it (loss scaling, several parts), reduces its gradients over the ranks.

    Args:
        optimizer: an optimizer of Keras, or None.

    Returns:
        Whether it comes from `DistributedOptimizer`.
    """
    inner = [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "_inner_optimizers", ())]
    return isinstance(optimizer, Distributed) or any(communicates(one) for one in inner if one is not None)


def _watched(plain: Any) -> Any:
    @functools.wraps(plain)
    def resolve(model: keras.Model) -> bool:
        chosen = plain(model)
        if not chosen or not communicates(getattr(model, "optimizer", None)):
            return bool(chosen)
        _say(model)
        return False

    resolve.hvd_ext_plain = plain
    return resolve


def _say(model: keras.Model) -> None:
    job = runtime.current_or_none()
    if model not in _said and (job is None or job.engine.rank == 0):
        _said.add(model)
        # info would not be seen unless the user has set up logging
        logger.warning(
            "model %r: jit_compile is switched off: its optimizer communicates, and XLA cannot; compile(..., "
            "jit_compile=False) says the same without this line",
            model.name,
        )
