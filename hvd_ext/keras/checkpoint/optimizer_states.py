"""How a model's optimizers reduce, and what they carry over to the next step, as arrays for a checkpoint."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvd_ext import state
from hvd_ext.errors import HvdExtError
from hvd_ext.job import runtime
from hvd_ext.job.log import logger
from hvd_ext.keras.optimizers.models import optimizers
from hvd_ext.keras.optimizers.momentum import MomentumTaken
from hvd_ext.state import Arrays, Everyone, arrays, manifest
from hvd_ext.state.manifest import Manifest
from hvd_ext.tensorflow.gradients.reducer import Reducer, reducer_of
from hvd_ext.tensorflow.topk import feedback, residuals

_NAME = re.compile(r"(top-k|low-rank|local-steps|held|delayed|buckets): optimizer (\d+), variables (\d+)")
_OF_TAPES = re.compile(r"(top-k|low-rank|local-steps|held|delayed|buckets): tape")


def collect(model: keras.Model) -> dict[str, dict[str, np.ndarray]]:
    """Copy the buckets of the optimizers, and what this rank carries over to the next step: residuals, held gradients.

    Returns:
        Arrays by owner and name, like those of `hvd_ext.state.collect`. An owner is a list of variables that one of the
        model's optimizers was applied to; its name has the optimizer's index in the model and the list's index.
    """
    states = {}
    for index, reducer in _reducers(model):
        for number, layout in reducer.save_layouts().items():
            states[f"buckets: optimizer {index}, variables {number}"] = layout
        what = reducer.policy.keeps
        if not what:
            continue
        for number, gradients in enumerate(reducer.sets):
            saved = gradients.policy.save()
            if saved:
                states[f"{what}: optimizer {index}, variables {number}"] = saved
        for number, (pending, _) in reducer.pending.items():
            if pending is not None:
                states[f"{what}: optimizer {index}, variables {number}"] = dict(pending)
            elif runtime.current().engine.rank == 0:
                logger.warning(
                    "%s: saved before its first step on another number of ranks: what the ranks carry over (%s) is "
                    "not in this checkpoint, but in the one that was restored",
                    reducer.label,
                    what,
                )
    return states


def restore(
    model: keras.Model, states: Mapping[str, dict[str, np.ndarray]], path: Path, checkpoint: Manifest, prefix: str
) -> tuple[str, ...]:
    """Give the optimizers, and all owners of `hvd_ext.state`, their part of a checkpoint; all ranks call it.

    An optimizer gets its residuals, held gradients or late result now, or at its first step. If only one of the two
    jobs has them, rank 0 warns of what is lost.

    Args:
        model: has the weights and slots of the checkpoint already.
        states: this rank's arrays, by owner; empty where the job had another number of ranks.
        prefix: begins the owners' sections in the ranks' files.

    Returns:
        The owners whose part of the checkpoint is dropped.
    """
    of_section = functools.partial(_states_of_ranks, path, checkpoint)
    saved = {owner: functools.partial(of_section, prefix + owner) for owner in checkpoint.states}
    left = [
        *state.restore(
            {owner: section for owner, section in states.items() if not _NAME.fullmatch(owner)},
            {owner: of_ranks for owner, of_ranks in saved.items() if not _NAME.fullmatch(owner)},
        )
    ]
    by_optimizer: dict[int, dict[int, tuple[Arrays | None, Everyone]]] = {}
    layouts: dict[int, dict[int, Arrays]] = {}
    reducers = dict(_reducers(model))
    for owner in sorted(saved):
        match = _NAME.fullmatch(owner)
        if match is None:
            continue
        what, index, number = match[1], int(match[2]), int(match[3])
        if what == "buckets":  # a job of another number of ranks plans its own
            if owner in states and index in reducers:
                layouts.setdefault(index, {})[number] = states[owner]
            continue
        if index in reducers and reducers[index].policy.keeps == what:
            by_optimizer.setdefault(index, {})[number] = states.get(owner), saved[owner]
            continue
        left.append(owner)
        if what == "top-k" and index < len(optimizers(model)):
            _tell_of_dropped(optimizers(model)[index], states.get(owner), saved[owner])
        elif runtime.current().engine.rank == 0:
            logger.warning("Checkpoint: it was saved with other options, and is dropped: %s", owner)
    for index, of_optimizer in layouts.items():
        reducers[index].restore_layouts(of_optimizer)
    for index, optimizer in enumerate(optimizers(model)):
        if index in by_optimizer:
            reducers[index].restore(by_optimizer[index])
        updating = getattr(optimizer, "inner_optimizer", optimizer)
        if isinstance(updating, MomentumTaken):
            updating.end_momentum()
    # a tape claims its part at its first step
    return tuple(owner for owner in left if owner not in states and not _OF_TAPES.match(owner))


def share(model: keras.Model, owners: Sequence[str], everyone: Callable[[str], Iterator[Arrays]]) -> None:
    """Divide what the ranks carry over among the ranks of this job; all ranks call it.

    Args:
        model: as for `restore`.
        owners: names of `collect`, those of all ranks.
        everyone: gives what each rank that is left has of an owner.
    """
    by_optimizer: dict[int, dict[int, tuple[Arrays | None, Everyone]]] = {}
    for owner in owners:
        match = _NAME.fullmatch(owner)
        if match is not None:
            of_owner = functools.partial(everyone, owner)
            by_optimizer.setdefault(int(match[2]), {})[int(match[3])] = None, of_owner
    for index, reducer in _reducers(model):
        if index in by_optimizer:
            reducer.restore(by_optimizer[index])


def _tell_of_dropped(optimizer: Any, local: Arrays | None, of_ranks: Everyone) -> None:
    """Warn of the residuals and velocities of an optimizer that has no `TopK` now."""
    if runtime.current().engine.rank != 0:
        return
    states: list[Arrays] = []
    with contextlib.suppress(HvdExtError, OSError, StopIteration):  # the owner is named as dropped
        states.append(next(iter(of_ranks())) if local is None else local)
    label = getattr(reducer_of(optimizer), "label", optimizer.name)
    if any(key.startswith(residuals.RESIDUAL) and np.any(array) for state in states for key, array in state.items()):
        logger.warning(
            "%s: it was saved with TopK, and its residuals are lost; call hvd_ext.flush() before saving", label
        )
    if any(map(feedback.had_momentum, states)):
        feedback.tell_of_momentum(label, "with")


def _states_of_ranks(path: Path, checkpoint: Manifest, section: str) -> Iterator[dict[str, np.ndarray]]:
    """Yield a section of all ranks' files, by rank; ranks whose files lack it are left out."""
    for rank in range(checkpoint.ranks):
        name = manifest.rank_file(rank)
        manifest.check(path, checkpoint, [name])
        with (path / name).open("rb") as file:
            sections = arrays.read(file)
        if section in sections:
            yield sections[section]


def _reducers(model: keras.Model) -> list[tuple[int, Reducer]]:
    reducers = [(index, reducer_of(optimizer)) for index, optimizer in enumerate(optimizers(model))]
    return [(index, reducer) for index, reducer in reducers if reducer is not None]
