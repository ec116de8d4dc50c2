"""What Keras' callbacks remember from one epoch to the next, as arrays for a checkpoint.

When `fit` begins, Keras resets early stopping and the reduction of learning rates. Training that goes on bit for bit
needs their state.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

# class -> the attributes that change during training; those that a user chooses (patience, factor) are not among them
_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("best", "best_epoch", "best_weights", "stopped_epoch", "wait"),
    keras.callbacks.ReduceLROnPlateau: ("best", "cooldown_counter", "wait"),
    keras.callbacks.ModelCheckpoint: ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
}

States = dict[str, dict[str, np.ndarray]]


def beside(callback: keras.callbacks.Callback) -> list[Any]:
    """Find the list of callbacks of `fit` in the callers' frames, since Keras does not give it; else an empty list."""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        listed = getattr(frame.f_locals.get("self"), "callbacks", None)
        if isinstance(listed, list) and any(member is callback for member in listed):
            return listed
    return []


def collect(callbacks: Iterable[Any]) -> States:
    """Copy the state of Keras' callbacks: arrays by callback ("EarlyStopping 0" for the first) and attribute."""
    return {key: dict(_arrays(callback, attributes)) for key, callback, attributes in _with_state(callbacks)}


def restore(callbacks: Iterable[Any], states: Mapping[str, Mapping[str, np.ndarray]]) -> tuple[str, ...]:
    """Give the callbacks of `fit` what `collect` has copied; return the keys of states without a callback."""
    left = dict(states)
    for key, callback, attributes in _with_state(callbacks):
        if key in left:
            saved = left.pop(key)
            for attribute in attributes:
                setattr(callback, attribute, _value(attribute, saved))
    return tuple(left)


def _with_state(callbacks: Iterable[Any]) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Yield the callbacks that have a state, each with its key and the names of its attributes."""
    numbers = dict.fromkeys(_ATTRIBUTES, 0)
    for callback in (getattr(one, "on_first_rank", one) for one in callbacks):
        for kind, attributes in _ATTRIBUTES.items():
            if isinstance(callback, kind):
                yield f"{kind.__name__} {numbers[kind]}", callback, attributes
                numbers[kind] += 1


def _arrays(callback: Any, attributes: tuple[str, ...]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield attributes as arrays: none for an attribute that is None, one for each member of a list."""
    for attribute in attributes:
        value = getattr(callback, attribute, None)
        if isinstance(value, list):
            for index, member in enumerate(value):
                yield f"{attribute}/{index}", np.array(member)
        elif value is not None:
            yield attribute, np.array(value)


def _value(attribute: str, saved: Mapping[str, np.ndarray]) -> Any:
    if attribute in saved:
        return saved[attribute].item()
    members = [name for name in saved if name.startswith(f"{attribute}/")]
    return [saved[f"{attribute}/{index}"] for index in range(len(members))] or None
