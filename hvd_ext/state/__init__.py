"""A register of the state that each rank has for itself between steps, so that checkpoints save it.

State of one rank - residuals, velocities, the position of a reader - is never put among the optimizer's variables:
those are equal on all ranks, and plain Keras must be able to read them. `hvd_ext.callbacks.Checkpoint` writes what is
registered here into each rank's own file.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from hvd_ext.errors import InvalidError

Arrays = dict[str, np.ndarray]
Save = Callable[[], Arrays]
Load = Callable[[Arrays], None]
Everyone = Callable[[], Iterable[Arrays]]  # gives the states of all ranks, by rank
LoadAll = Callable[[Arrays | None, Everyone], None]

# owner -> how to find its function `save` and its function `load`: each gives the function, or None when it is gone;
# and whether the second one is a LoadAll
_owners: dict[str, tuple[Callable[[], Save | None], Callable[[], Load | LoadAll | None], bool]] = {}
# owner -> state that was restored before the owner was registered: this rank's, or None, and that of all ranks
_waiting: dict[str, tuple[Arrays | None, Everyone]] = {}


def register(owner_key: str, save: Save, load: Load | None = None, *, load_all: LoadAll | None = None) -> None:
    """Make the state of an owner part of every checkpoint from now on.

    If a checkpoint was restored before, the owner gets its part of it at once, by `load`. Methods of an object do not
    keep it alive: when the object is gone, so is its entry.

    Args:
        owner_key: names the owner; the same in the job that resumes.
        save: gives a copy of the state: arrays of numbers, booleans or text by name.
        load: takes what `save` gave in an earlier job of as many ranks.
        load_all: in place of load, for state that can be divided among another number of ranks. It takes this rank's
            state (None where the earlier job had no such rank), and a function that gives the states of all ranks of
            the earlier job, by rank, and raises a `CheckpointError` if they cannot be read. All ranks call it at the
            same time.

    Raises:
        InvalidError: the key is no text or is taken, or `save` or `load` cannot be called.
    """
    if not isinstance(owner_key, str) or not owner_key:
        raise InvalidError(f"state.register, owner_key ({owner_key!r}): must be a text that is not empty")
    loader = load_all if load is None else load
    if not callable(save) or not callable(loader) or (load is not None and load_all is not None):
        raise InvalidError(f"state.register, {owner_key!r}: save, and either load or load_all, must be functions")
    if _functions(owner_key) is not None:
        raise InvalidError(
            f"state.register, owner_key ({owner_key!r}): is registered already; use another, or `unregister` the first"
        )
    _owners[owner_key] = (_reference(save), _reference(loader), load is None)
    if owner_key in _waiting:
        _give(loader, load is None, *_waiting.pop(owner_key))


def unregister(owner_key: str) -> None:
    """Leave an owner's state out of checkpoints from now on; an owner that is not there is no error.

    Args:
        owner_key: as given to `register`.
    """
    _owners.pop(owner_key, None)


def collect() -> dict[str, Arrays]:
    """Copy the state of all owners that are alive.

    Returns:
        The arrays by owner and name.

    Raises:
        InvalidError: an owner's `save` gave something other than arrays by name; the message names the owner.
    """
    collected = {}
    for owner in list(_owners):
        functions = _functions(owner)
        if functions is not None:
            collected[owner] = _checked(owner, functions[0]())
    return collected


def restore(
    states: Mapping[str, Arrays],
    saved: Mapping[str, Everyone] | None = None,
) -> tuple[str, ...]:
    """Give all owners their state; the state of an owner that is not registered yet waits until it is.

    State that still waits from an earlier call is dropped.

    Args:
        states: what `collect` gave on this rank; empty where the job had another number of ranks.
        saved: by owner, a function that gives the states of all ranks; None for no such functions.

    Returns:
        The owners that got nothing: they are not registered yet, or have no load_all for another number of ranks.
    """
    _waiting.clear()
    left = []
    saved = saved or {}
    for owner in [*states, *(owner for owner in saved if owner not in states)]:
        local, of_ranks = states.get(owner), saved.get(owner, lambda: ())
        functions = _functions(owner)
        if functions is None:
            _waiting[owner] = local, of_ranks
        if functions is None or not _give(*functions[1:], local, of_ranks):
            left.append(owner)
    return tuple(left)


def unclaimed() -> dict[str, tuple[str, ...]]:
    """List the state that was restored and still waits for its owner.

    Returns:
        The names of the arrays, by owner; no names where only other ranks have saved arrays for it.
    """
    return {owner: tuple(local or ()) for owner, (local, _) in _waiting.items()}


def forget_unclaimed() -> None:
    """Drop the state that was restored and still waits for its owner."""
    _waiting.clear()


def _give(load: Any, of_all: bool, local: Arrays | None, of_ranks: Everyone) -> bool:
    if of_all:
        load(None if local is None else dict(local), of_ranks)
    elif local is not None:
        load(dict(local))
    return of_all or local is not None


def _functions(owner: str) -> tuple[Save, Any, bool] | None:
    if owner not in _owners:
        return None
    of_save, of_load, of_all = _owners[owner]
    save, load = of_save(), of_load()
    if save is None or load is None:
        del _owners[owner]
        return None
    return save, load, of_all


def _reference(function: Any) -> Callable[[], Any]:
    if inspect.ismethod(function):
        return weakref.WeakMethod(function)
    return lambda: function


def _checked(owner: str, arrays: Any) -> Arrays:
    if not isinstance(arrays, Mapping):
        raise InvalidError(
            f"state of {owner!r}: save must give a dictionary of arrays; it gave {type(arrays).__name__}"
        )
    checked = {}
    for name, value in arrays.items():
        array = np.asarray(value)
        if not isinstance(name, str) or array.dtype.hasobject or array.dtype.names:
            raise InvalidError(
                f"state of {owner!r}, {name!r}: must be an array of numbers, booleans or text under a text as its "
                f"name; it is {type(value).__name__} of dtype {array.dtype}"
            )
        checked[name] = array
    return checked
