"""What a Keras 3 optimizer adds to a reduction: what must be the same on all ranks, and what is refused around it."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from hvd_ext.errors import InvalidError

# What may differ between ranks when the first step begins: Keras numbers the names, and the learning rate is a variable
# that a broadcast or a callback may still set.
_MAY_DIFFER = ("name", "learning_rate")


def facts(optimizer: keras.optimizers.Optimizer, label: str) -> dict[str, Any]:
    """Give what decides an update and lives in Python, where no broadcast reaches it.

    Args:
        optimizer: its class is not looked at, only its configuration.
        label: its name in messages.

    Returns:
        Plain values by name; a difference between ranks would go unnoticed.

    Raises:
        InvalidError: the optimizer is used inside something that it cannot work in.
    """
    _refuse_surroundings(label, optimizer)
    return {"the optimizer's class": optimizer.__class__.__name__, **_settings(optimizer, "the optimizer's")}


def comparable(config: Mapping[str, Any], whose: str) -> dict[str, Any]:
    """Give what a configuration says that must be the same on all ranks.

    Args:
        config: of an optimizer of Keras 3 or tf_keras.
        whose: for the names.

    Returns:
        Plain values by name. A learning rate is left out, a schedule of it is not: no broadcast reaches that.
    """
    settings: dict[str, Any] = {}
    for key, value in config.items():
        if key == "learning_rate" and isinstance(value, Mapping):
            settings[f"{whose} learning rate schedule"] = json.dumps(
                value, sort_keys=True, default=lambda one: type(one).__name__
            )
        elif key not in _MAY_DIFFER and (value is None or isinstance(value, (bool, int, float, str))):
            settings[f"{whose} {key}"] = value
    return settings


def _settings(optimizer: keras.optimizers.Optimizer, whose: str) -> dict[str, Any]:
    settings = comparable(optimizer.get_config(), whose)
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        settings["the inner optimizer's class"] = inner.__class__.__name__
        settings |= _settings(inner, "the inner optimizer's")
    return settings


def _refuse_surroundings(label: str, optimizer: keras.optimizers.Optimizer) -> None:
    if tf.distribute.has_strategy():
        raise InvalidError(
            f"optimizer {label!r}: it cannot run inside a tf.distribute strategy as well; leave the strategy out and "
            "start one process per device"
        )
    # compile() wraps the optimizer under a mixed_float16 policy and leaves no mark on it: only the callers know
    module = keras.optimizers.LossScaleOptimizer.__module__
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        # reading f_locals keeps a frame's locals alive, so only Keras' own frames are looked into
        if frame.f_globals.get("__name__") == module and _inner(frame.f_locals.get("self")) is optimizer:
            raise InvalidError(
                f"optimizer {label!r}: it is inside a LossScaleOptimizer (policy mixed_float16) that decides on each "
                "rank alone whether a step is taken, so that ranks would wait for ever; wrap the outer one: "
                "hvd_ext.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)), and give that to "
                "compile()"
            )
        frame = frame.f_back


def _inner(caller: Any) -> Any:
    return getattr(caller, "inner_optimizer", None)
