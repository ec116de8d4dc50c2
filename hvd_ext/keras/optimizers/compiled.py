"""A model that was compiled with a distributed optimizer, and then with a plain one: each rank would train alone."""

from __future__ import annotations

import functools
import logging
import weakref
from typing import Any

from hvd_ext.job import runtime
from hvd_ext.keras.optimizers import jit

_LOG = logging.getLogger("hvd_ext")

_together: weakref.WeakSet[Any] = weakref.WeakSet()  # models that had a distributed optimizer


def watch(model: type) -> None:
    """Warn from now on where a model loses its distributed optimizer by another `compile`.

    A plain optimizer does no harm to `evaluate` and `predict`, so this is no error; our callbacks refuse it in `fit`.

    Args:
        model: `Model` of Keras 3 or tf_keras.
    """
    owner = next((kind for kind in model.__mro__ if "compile" in vars(kind)), None)
    if owner is not None and not hasattr(vars(owner)["compile"], "hvd_ext_plain"):
        owner.compile = _watched(vars(owner)["compile"])  # type: ignore[attr-defined]


def _watched(plain: Any) -> Any:
    @functools.wraps(plain)
    def compile(model: Any, *arguments: Any, **keywords: Any) -> Any:
        if jit.communicates(getattr(model, "optimizer", None)):
            _together.add(model)
        result = plain(model, *arguments, **keywords)
        if model in _together and not jit.communicates(getattr(model, "optimizer", None)):
            _warn(model)
        return result

    compile.hvd_ext_plain = plain  # type: ignore[attr-defined]
    return compile


def _warn(model: Any) -> None:
    job = runtime.current_or_none()
    if job is not None and job.engine.size > 1 and job.engine.rank == 0:
        _LOG.warning(
            "model %r: it was compiled with a distributed optimizer before, and now with a plain one (%s): in fit each "
            "of the %d ranks would train alone; compile it with hvd_ext.DistributedOptimizer(...) again",
            model.name,
            type(model.optimizer).__name__,
            job.engine.size,
        )
