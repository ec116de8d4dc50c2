"""What each rank carries over to the next step by itself, such as residuals: it is divided again when ranks change."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from hvd_ext.job import consensus, runtime
from hvd_ext.job.log import logger
from hvd_ext.keras.checkpoint import optimizer_states
from hvd_ext.keras.checkpoint.callback_states import States
from hvd_ext.keras.optimizers import models
from hvd_ext.tensorflow.collectives.objects import allgather_object, broadcast_object
from hvd_ext.tensorflow.collectives.single import alltoall

_NAME = "elastic fit: carried over"


@dataclasses.dataclass(frozen=True)
class Part:
    """What one rank of a world carries over.

    Attributes:
        rank: in that world.
        size: of that world.
        updates: the number of the optimizer's updates.
        states: by owner and name.
    """

    rank: int
    size: int
    updates: int
    states: States


class Carried:
    """What this rank carries over from its world to the next one.

    Args:
        redundancy: 1: another rank has a copy of it, and this rank one of another's; else 0.
    """

    def __init__(self, redundancy: int) -> None:
        self._redundancy = redundancy
        self._parts: list[Part] = []  # this rank's; those of all ranks if these have left their world together
        self._copy: Part | None = None  # of another rank
        self._shared = -1  # at which update the parts were divided; the optimizers have them from the next step on

    def copy(self, model: keras.Model, updates: int) -> None:
        """Give another rank a copy after a step; all ranks call it.

        The copy goes as many ranks further as a host has, so that it lies on another host where hosts are of one size.
        It is as large as the residuals: of the size of the gradients before they are compressed.
        """
        job = runtime.current()
        engine = job.engine
        if not self._redundancy or engine.size == 1 or not _keeps(model):
            return
        local = max(job.hosts.count(host) for host in job.hosts)
        to = (engine.rank + (local if local < engine.size else 1)) % engine.size
        own = np.frombuffer(pickle.dumps(_part(model, updates)), np.uint8)
        splits = [own.size if rank == to else 0 for rank in range(engine.size)]
        received, _ = alltoall(own, splits, name=f"{_NAME}: copy")
        self._copy = pickle.loads(received.numpy().tobytes())

    def leave(self, model: keras.Model, updates: int, *, together: bool) -> None:
        """Keep what this rank carries over, before its world ends.

        Args:
            model: the model.
            updates: the number of the optimizer's updates.
            together: whether all ranks leave the world together; then each keeps what all have, because some may end.
        """
        if updates == self._shared or not _keeps(model):
            return
        own = _part(model, updates)
        self._parts = allgather_object(own, name=_NAME) if together else [own]

    def share(self, model: keras.Model, updates: int) -> None:
        """Divide what the ranks of the world before have carried over among those of this one; all ranks call it.

        Args:
            model: the model.
            updates: those of the weights with which all ranks continue.
        """
        engine = runtime.current().engine
        counts = consensus.exchange(engine, f"{_NAME}: parts", lambda: len(self._parts))
        if not any(counts):
            return
        if max(counts) > 1:  # that rank has what all had
            parts: list[Part] = broadcast_object(self._parts, engine.ranks[counts.index(max(counts))], name=_NAME)
        else:
            held = [*self._parts, self._copy]
            parts = _found(allgather_object(held, name=_NAME), updates)
        lost = parts[0].size - len(parts)
        if lost > 0 and engine.rank == 0:
            logger.warning(
                "elastic: what %d lost %s had not sent yet is lost%s",
                lost,
                "rank" if lost == 1 else "ranks",
                "" if self._redundancy else "; Elastic(redundancy=1) keeps a copy on another rank",
            )

        def everyone(owner: str) -> Iterator[dict[str, np.ndarray]]:
            return (part.states[owner] for part in parts if owner in part.states)

        optimizer_states.share(model, sorted({owner for part in parts for owner in part.states}), everyone)
        self._shared = updates


def _found(held: list[list[Part | None]], updates: int) -> list[Part]:
    """Give the parts of the ranks that are left, and of lost ranks those copies that are of the last update."""
    parts = {part.rank: part for *own, _ in held for part in own if part is not None}
    for *_, copy in held:
        if copy is not None and copy.updates == updates:
            parts.setdefault(copy.rank, copy)
    return [parts[rank] for rank in sorted(parts)]


def _keeps(model: Any) -> bool:
    return any(optimizer._hvd_ext.reducer.policy.keeps for optimizer in models.distributed(model))


def _part(model: keras.Model, updates: int) -> Part:
    engine, states = runtime.current().engine, optimizer_states.collect(model).items()
    carried = {owner: arrays for owner, arrays in states if not owner.startswith("buckets")}
    return Part(engine.rank, engine.size, updates, carried)
