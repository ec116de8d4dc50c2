"""How far a training is, and how the ranks of a new world come to the same weights and the same place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from hvd_ext.data.cursor import Cursors, DataCursor, cursors_of
from hvd_ext.job import consensus, runtime
from hvd_ext.job.log import logger
from hvd_ext.keras.checkpoint import model_state, optimizer_states
from hvd_ext.keras.checkpoint.callback_states import States
from hvd_ext.keras.optimizers import models
from hvd_ext.tensorflow import layers
from hvd_ext.tensorflow.collectives.objects import allgather_object, broadcast_object

_NAME = "elastic fit"


@dataclasses.dataclass
class Progress:
    """How far a training is on one rank.

    Attributes:
        fit: the number of the call of `fit`, counted in the process.
        epoch: the one under way.
        step: the number of its batches that are done, those included that were left out because an earlier world had
            them.
        updates: the number of the optimizer's updates, by which ranks tell who is ahead.
        size: the number of ranks.
        data: of each data set with an order, by its name: the parts of the order, and the position in the epoch.
        callbacks: the state of Keras' callbacks.
    """

    fit: int
    epoch: int
    step: int
    updates: int
    size: int
    data: dict[str, dict[str, int]]
    callbacks: States


def meet(model: keras.Model, own: Progress | None, kept: list[States]) -> Progress | None:
    """Give all ranks of a world the weights of the one that is furthest; all ranks call it.

    Args:
        model: has the weights.
        own: how far this rank is; None: it is new.
        kept: from `carried_over`.

    Returns:
        Where all ranks continue; None if all of them are new.

    Raises:
        InvalidError: the variables of a rank that is new do not exist yet.
        CheckpointError: the ranks have different models.
    """
    engine = runtime.current().engine
    updates = consensus.exchange(engine, f"{_NAME}: updates", lambda: None if own is None else own.updates)
    known = [one for one in updates if one is not None]
    if not known:
        return None
    source = updates.index(max(known))

    def described() -> list[str]:
        model_state.ready(model)
        return model_state.described(model_state.variables(model)[0])

    listed = model_state.variables(model)[0]
    variables = consensus.exchange(engine, f"{_NAME}: model", described)
    listed = model_state.variables(model)[0]
    model_state.check(variables[source], listed, _NAME)
    if len(known) < engine.size or min(known) < max(known):
        model_state.send(listed, engine.ranks[source])
        layers.send(_NAME, model, engine.ranks[source])
        layers.refresh(model)
    progress: Progress = broadcast_object(own, engine.ranks[source], name=f"{_NAME}: progress")
    _share(model, kept, progress.size)
    return progress


def position(data: Any, epoch: int, step: int) -> dict[str, dict[str, int]]:
    """Give how far the data sets with an order are, by their names.

    Args:
        data: the data of `fit`.
        epoch: the one under way.
        step: the number of its batches that are done.
    """
    return {
        name: {"parts": cursor.parts, "position": cursor.division.position_of(epoch, step)}
        for name, cursor in _named(data)
        if cursor.division is not None
    }


def left_out(data: Any, progress: Progress, size: int) -> int:
    """Divide what is left of an epoch among the ranks of this world.

    Args:
        data: the data of `fit`, made in this world.
        progress: where all ranks continue.
        size: the number of ranks.

    Returns:
        How many batches of the epoch are left out, because the earlier worlds had theirs.
    """
    steps = []
    for name, cursor in _named(data):
        saved = progress.data.get(name)
        if saved is not None and cursor.division is not None:
            cursor.parts = saved["parts"]
            cursor.again = cursor.division.divide_again(progress.epoch, saved["position"], cursor.parts)
            steps.append(cursor.again.step)
    return max(steps) if steps else progress.step * progress.size // size  # as near as batches come


def _named(data: Any) -> list[tuple[str, DataCursor]]:
    cursors = Cursors()
    for cursor in cursors_of(data):
        cursors.add(cursor)
    return cursors.items()


def carried_over(model: keras.Model, *, together: bool) -> list[States]:
    """Copy what the optimizers carry over to the next step, before their world ends.

    Args:
        model: the model.
        together: whether all ranks leave the world together; then each copies what all have, because some may end.

    Returns:
        By owner and name, of this rank or of each rank; an empty list where nothing is carried over.
    """
    own = {
        owner: arrays for owner, arrays in optimizer_states.collect(model).items() if not owner.startswith("buckets")
    }
    keeps = any(optimizer._hvd_ext.reducer.policy.keeps for optimizer in models.distributed(model))
    if not keeps:
        return []
    return allgather_object(own, name=f"{_NAME}: carried over") if together else [own]


def _share(model: keras.Model, kept: list[States], before: int) -> None:
    """Divide what the optimizers of all ranks carry over among the ranks of this world."""
    engine = runtime.current().engine
    counts = consensus.exchange(engine, f"{_NAME}: carried over", lambda: len(kept))
    if not any(counts):
        return
    if max(counts) > 1:  # that rank has what all had
        whole = engine.ranks[counts.index(max(counts))]
        states: list[States] = broadcast_object(kept, whole, name=f"{_NAME}: carried over")
    else:
        states = [one[0] for one in allgather_object(kept, name=f"{_NAME}: carried over") if one]
    lost = before - len(states)
    if lost > 0 and engine.rank == 0:
        logger.warning("%s: what %d lost %s had not sent yet is lost", _NAME, lost, "rank" if lost == 1 else "ranks")

    def everyone(owner: str) -> Iterator[dict[str, np.ndarray]]:
        return (state[owner] for state in states if owner in state)

    optimizer_states.share(model, sorted({owner for state in states for owner in state}), everyone)
