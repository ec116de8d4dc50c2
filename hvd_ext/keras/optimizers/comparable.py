"""What of an optimizer lives in Python and decides its updates, as plain values that the ranks compare.

Most of it is in the configuration. Schedules, and other objects without a configuration, are compared by what they do:
a schedule by its values at some steps, a function by its code.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import types
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# These may differ between ranks when the first step begins: Keras numbers the names, and a broadcast or a callback may
# still set the learning rate, which is a variable.
_MAY_DIFFER = ("name", "learning_rate", "inner_optimizer")

# the attributes that may be schedules, which are called with the step, or functions without arguments
_SCHEDULED = ("_learning_rate", "_momentum")

STEPS = (0, 1, 10, 100, 1000, 10_000, 100_000)


def comparable(optimizer: Any, owner: str) -> dict[str, Any]:
    """Give what must be the same on all ranks, of an optimizer of Keras 3 or tf_keras without the one inside of it.

    Args:
        owner: begins the names.

    Returns:
        Plain values by name. A learning rate is left out, but a schedule of it is not: no broadcast reaches that. So is
        a momentum that is a variable.
    """
    config, schedules = configuration(optimizer)
    if isinstance(getattr(optimizer, "momentum", None), keras.Variable):  # a broadcast brings it, as a learning rate
        config.pop("momentum", None)  # that of a loss-scale optimizer is the inner one's
    described = {f"{owner} {key}": _plain(value) for key, value in config.items() if key not in _MAY_DIFFER}
    for key, schedule in schedules.items():
        name = f"{owner} {key.replace('_', ' ')}"
        if _schedule_class(schedule) is None:
            described[f"what the function of {name} returns"] = _number(schedule)
            continue
        described[f"{name} schedule"] = _words(schedule)
        values = [_number(schedule, tf.constant(step, tf.int64)) for step in STEPS]
        described[f"the list of values of {name} schedule at the steps {', '.join(map(str, STEPS))}"] = values
    return described


def current(optimizer: Any) -> dict[str, Any]:
    """Give what must be the same on all ranks between two steps: `comparable`, learning rates and scalar variables.

    Args:
        optimizer: of Keras 3 or tf_keras, wrapped or plain; the one inside of it is included.

    Returns:
        Text by name. The schedules are left out, which the first step has compared, but not their values now.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    settings: dict[str, Any] = {}
    with contextlib.suppress(TypeError, ValueError):  # a legacy one has the schedule there
        settings["learning_rate"] = float(optimizer.learning_rate)
    config, _ = configuration(optimizer)
    settings |= {key: _plain(value) for key, value in config.items() if key not in _MAY_DIFFER}
    inside = [] if inner is None else variables_of(inner)
    lists = [value for key, value in vars(optimizer).items() if isinstance(value, list) and key != "_variables"]
    left_out = {id(variable) for value in (*lists, inside, [optimizer.iterations]) for variable in value}  # slots, too
    for variable in variables_of(optimizer):
        if tuple(variable.shape) == () and id(variable) not in left_out:
            settings.setdefault(variable.name.partition(":")[0], variable.numpy().item())
    words = {key: repr(value) for key, value in settings.items()}
    return words if inner is None else words | current(inner)


def configuration(optimizer: Any) -> tuple[dict[str, Any], dict[str, Callable[..., Any]]]:
    """Give an optimizer's configuration without its schedules; and those.

    Returns:
        The values by name; where the optimizer refuses to give its configuration, its attributes that are plain values.
        And the schedules, and functions that give a rate, by name.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    with _without_schedules(optimizer) as schedules, _without_schedules(inner):
        try:
            config = dict(optimizer.get_config())
        except Exception:  # trains without it in plain Keras
            plain = (bool, int, float, str)
            config = {key: value for key, value in vars(optimizer).items() if key[0] != "_" and type(value) in plain}
    return {key: value for key, value in config.items() if key not in schedules}, schedules


def variables_of(optimizer: Any) -> list[Any]:
    """List the variables of an optimizer of Keras 3 or Keras 2; some of Keras 2 have a method for it."""
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)


@contextlib.contextmanager
def _without_schedules(optimizer: Any) -> Iterator[dict[str, Callable[..., Any]]]:
    """Put schedules with an empty configuration in the place of an optimizer's own, which may not have one."""
    schedules: list[tuple[dict[str, Any], str, Any]] = []
    attributes: dict[str, Any] = {} if optimizer is None else vars(optimizer)
    legacy: dict[str, Any] = attributes.get("_hyper", {})
    for holder, names in ((attributes, _SCHEDULED), (legacy, tuple(legacy))):
        schedules += [(holder, name, holder[name]) for name in names if callable(holder.get(name))]
    try:
        for holder, name, value in schedules:
            holder[name] = _stand_in(_schedule_class(value) or keras.optimizers.schedules.LearningRateSchedule)()
        yield {name.removeprefix("_"): value for _, name, value in schedules}
    finally:
        for holder, name, value in schedules:
            holder[name] = value


def _schedule_class(value: Any) -> type | None:
    """Give Keras' class of schedules that an object is derived from; None for a function."""
    return next((kind for kind in type(value).__mro__ if kind.__name__ == "LearningRateSchedule"), None)


@functools.cache
def _stand_in(base: type) -> type:
    return type("Schedule", (base,), {"__call__": lambda self, step: 0.0, "get_config": lambda self: {}})


def _words(schedule: Any) -> str:
    name = type(schedule).__name__
    try:
        return f"{name} {json.dumps(schedule.get_config(), sort_keys=True)}"
    except Exception:  # it has no configuration, or one with objects in it
        return name


def _number(rate: Callable[..., Any], *step: tf.Tensor) -> str:
    """Give the value of a schedule or function; or the name of an exception, which training raises when it is there."""
    try:
        return f"{float(rate(*step)):.6g}"
    except Exception as error:
        return type(error).__name__


def _plain(value: Any) -> Any:
    """Make a value of a configuration one that can be sent and compared, and does not depend on paths or addresses."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return json.dumps(_described(value, 5), sort_keys=True)


def _described(value: Any, depth: int) -> Any:
    """Describe a value by what JSON can hold; at depth 0, and where nothing else is known, by its class's name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    inside = functools.partial(_described, depth=depth - 1)
    if depth == 0:
        return type(value).__name__
    if isinstance(value, list | tuple):
        return [inside(member) for member in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(inside(member)) for member in value)
    if isinstance(value, Mapping):
        return {str(key): inside(member) for key, member in value.items()}
    if isinstance(value, functools.partial):
        return [inside(value.func), inside(value.args), inside(value.keywords)]
    if isinstance(value, types.MethodType):
        return [inside(value.__func__), inside(value.__self__)]
    if isinstance(value, types.FunctionType):
        variables = inspect.getclosurevars(value).nonlocals
        return [inside(value.__code__), inside(value.__defaults__), inside(variables)]
    if isinstance(value, types.CodeType):  # without its file and lines
        return [value.co_name, zlib.crc32(value.co_code), inside(value.co_consts), list(value.co_names)]
    if isinstance(value, np.ndarray | np.generic | tf.Tensor | tf.Variable | keras.Variable):
        array = np.ascontiguousarray(value)
        return [str(array.dtype), list(array.shape), zlib.crc32(array.tobytes())]
    if callable(value) and hasattr(value, "__name__"):
        return value.__name__
    if callable(value) and hasattr(value, "__dict__"):
        return [type(value).__name__, inside(type(value).__call__), inside(vars(value))]
    return type(value).__name__
