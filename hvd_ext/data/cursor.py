"""Where the iterators of data begin, so that training resumes with the samples that it has not seen.

A data set with an order (`hvd_ext.data.steps`) has a cursor. Each of its iterators begins where the cursor stands and
moves it on by one epoch, so a data set that no callback knows counts its iterators. In `fit` our callbacks pass the
epoch to each iterator before Keras reads from it (`begin_epoch`).

Steps are counted through all epochs: step s of epoch e is the step e * steps + s. So it does not matter whether Keras
makes an iterator for each epoch, or, with steps_per_epoch, one for several epochs or for a part of one.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

_LOG = logging.getLogger("hvd_ext")

# The attribute of a data set with its cursor, and of an iterator whose cursors are set.
MARK = "_hvd_ext"

# Data sets that give one element for each of their inputs', in their order. Behind others, what stands in for a step
# that is skipped may arrive at another place, and be trained on.
_ONE_TO_ONE = ("Map", "ParallelMap", "Prefetch", "Options", "AssertCardinality", "Take", "Repeat", "Zip", "Model")


class Again(NamedTuple):
    """An epoch whose rest was divided among other ranks than its begin.

    Attributes:
        epoch: from 0.
        step: with which the rest begins.
        position: how many of the epoch's samples came before, on all ranks.
    """

    epoch: int
    step: int
    position: int


# the names of its numbers in checkpoints
_AGAIN = ("again: epoch", "again: step", "again: position")


class Division(Protocol):
    """How the samples of an epoch are divided; `hvd_ext.data.steps.Steps`."""

    def divide_again(self, epoch: int, position: int, parts: int) -> Again:
        """Divide the rest of an epoch."""
        ...

    def position_of(self, epoch: int, step: int) -> int:
        """Give the number of samples that come before a step."""
        ...


class DataCursor:
    """Where the next iterator of a data set begins, and how the order of its samples is divided.

    Attributes:
        loop: the cursors of loops of the user's own; such a loop shows its data to no callback.
        name: of the data set in checkpoints.
        steps: the number of steps in an epoch.
        parts: the number of parts of the order (tf_ops/cache/order.h).
        kept: what a checkpoint keeps besides the parts; None: nothing, because each rank has data of its own.
        rank: of those that share the samples.
        division: of the samples; None where only the number of steps is known.
        again: the epoch whose rest was divided again; None if there is none.
    """

    loop: ClassVar[Cursors]
    division: Division | None = None
    again: Again | None = None

    def __init__(self, name: str, steps: int, parts: int, kept: Mapping[str, int] | None = None, rank: int = 0) -> None:
        self.name, self.steps, self.parts, self.kept, self.rank = name, steps, parts, kept, rank
        self._lock = threading.RLock()
        self._loop: Cursors | None = None
        # the first step of the next iterator, and the first one that is needed
        self._next = self._needed = 0
        # how many iterators begin at one place, and how many have begun there
        self._readers, self._begun = 1, 0
        # whether validation reads the data, whose iterators it counts by themselves, and the first step of its next one
        self._validates, self._next_validated = False, 0

    def get(self) -> tuple[int, int, int]:
        """Give the epoch and its step at which the next iterator begins, and the number of parts."""
        with self._lock:
            return *divmod(max(self._next, self._needed), max(1, self.steps)), self.parts

    def set(self, epoch: int, step: int = 0, parts: int | None = None, *, skipped: int = 0, readers: int = 1) -> None:
        """Let the next iterator begin at a step of an epoch; it gives as many steps as an epoch has.

        Args:
            epoch: from 0.
            step: from 0; beyond the last step of an epoch lie those of the next.
            parts: of the order; None: as before.
            skipped: the number of steps from there on that are not needed.
            readers: the number of iterators that begin there: how often a pipeline reads the data set at once.
        """
        with self._lock:
            self._join_loop()
            self._next = epoch * self.steps + step
            self._needed = self._next + skipped
            self._readers, self._begun, self._validates = readers, 0, False
            self.parts = self.parts if parts is None else parts

    def begin(self) -> tuple[int, int, int]:
        """Give an iterator its place.

        Returns:
            Its first step, counted through all epochs, the number of steps from there on that are skipped, and the
            number of parts.
        """
        with self._lock:
            self._join_loop()
            if self._validates:
                self._next_validated += self.steps
                return self._next_validated - self.steps, 0, self.parts
            first = self._next
            self._begun += 1
            if self._begun % self._readers == 0:
                self._next += self.steps
            return first, min(max(0, self._needed - first), self.steps), self.parts

    def _join_loop(self) -> None:
        loop = DataCursor.loop
        if self._loop is not loop:
            self._loop = loop
            loop.add(self)
            if loop.epoch is not None:
                self.set(loop.epoch)


class Cursors:
    """The cursors of the data that a training reads, by their names in checkpoints.

    Attributes:
        epoch: the epoch with which a loop of the user's own resumes; None: it has resumed nothing.
    """

    def __init__(self, saved: Mapping[str, Mapping[str, int]] | None = None, epoch: int | None = None) -> None:
        """Resume training, on any number of ranks.

        Args:
            saved: what `get` gave when the checkpoint was saved; None: there is no checkpoint.
            epoch: as the attribute.
        """
        self.epoch = epoch
        self._saved = dict(saved or {})
        self._lock = threading.Lock()
        self._by_name: weakref.WeakValueDictionary[str, DataCursor] = weakref.WeakValueDictionary()

    def add(self, cursor: DataCursor) -> None:
        """Name a cursor, once, and divide its data as the checkpoint of this name says."""
        with self._lock:
            if cursor.kept is None or cursor in list(self._by_name.values()):
                return
            name, index = cursor.name, 1
            while name in self._by_name:
                index += 1
                name = f"{cursor.name} {index}"
            self._by_name[name] = cursor
            saved = self._saved.pop(name, None)
        if saved is not None:
            _compare(cursor, saved)
            cursor.parts = saved["parts"]
            if all(saved[what] == now for what, now in cursor.kept.items()) and _AGAIN[0] in saved:
                cursor.again = Again(*(saved[name] for name in _AGAIN))

    def items(self) -> list[tuple[str, DataCursor]]:
        """Give the cursors by their names."""
        with self._lock:
            return list(self._by_name.items())

    def get(self) -> dict[str, dict[str, int]]:
        """Give what a checkpoint keeps of each data set, by names; all ranks that share data have the same."""
        with self._lock:
            return {
                name: {
                    "parts": cursor.parts,
                    **(cursor.kept or {}),
                    **dict(zip(_AGAIN, cursor.again or (), strict=False)),
                }
                for name, cursor in self._by_name.items()
            }


DataCursor.loop = Cursors()


def begin_epoch(iterator: Any, epoch: int, batches: int | None, skipped: int = 0) -> list[DataCursor]:
    """Let an iterator begin with an epoch of `fit`, unless another callback has set its cursors.

    Args:
        iterator: from which nothing has been read, or that is one for several epochs.
        epoch: from 0.
        batches: the number of batches in an epoch; None where Keras does not know it.
        skipped: the number of batches that the training step will not see.

    Returns:
        The cursors of the data sets that it reads.
    """
    data: Any = getattr(iterator, "_dataset", None)
    # for each cursor and each way to its data set, whether there is one element for each step, in their order
    cursors: dict[DataCursor, list[bool]] = {}
    for cursor, exact in _cursors_of(data):
        cursors.setdefault(cursor, []).append(exact)
    if not cursors:
        return []
    if hasattr(iterator, MARK):
        for cursor in cursors:
            cursor._validates = False
        return list(cursors)
    setattr(iterator, MARK, True)
    length = int(data.cardinality())
    for cursor, ways in cursors.items():
        steps = max(1, cursor.steps)
        if batches is None:
            first = epoch * steps
        elif length < 0:  # one iterator for all epochs
            first = epoch * batches
        else:  # an iterator lasts for some epochs, and makes some passes over the data set
            epochs, passes = max(1, -(-length // batches)), max(1, -(-length // steps))
            first = epoch // epochs * passes * steps + epoch % epochs * batches
        cursor.set(*divmod(first, steps), skipped=skipped if all(ways) else 0, readers=len(ways))
    return list(cursors)


def cursors_of(data: Any) -> list[DataCursor]:
    """Give the cursors of the data sets that a data set reads, each once."""
    return list(dict(_cursors_of(data)))


def begin_validation(iterator: Any) -> None:
    """Count the iterators of validation by themselves, until training reads the same data again.

    Args:
        iterator: from which nothing has been read.
    """
    for cursor, _ in _cursors_of(getattr(iterator, "_dataset", None)):
        cursor._validates = True


def _cursors_of(data: Any, exact: bool = True) -> Iterator[tuple[DataCursor, bool]]:
    cursor = getattr(data, MARK, None)
    if cursor is not None:
        yield cursor, exact
    elif hasattr(data, "_inputs"):
        kind = type(data).__name__.lstrip("_").removesuffix("Dataset")
        ordered = getattr(data, "_deterministic", "default") != "false" and data.options().deterministic is not False
        for source in data._inputs():
            yield from _cursors_of(source, exact and ordered and kind in _ONE_TO_ONE)


def _compare(cursor: DataCursor, saved: Mapping[str, int]) -> None:
    """Warn, on one rank, where training will not resume with the samples that would have come."""
    changed = [
        f"seed {saved[what]}, now {now}" if what == "seed" else f"{saved[what]} {what}, now {now}"
        for what, now in (cursor.kept or {}).items()
        if saved[what] != now
    ]
    if changed and cursor.rank == 0:
        _LOG.warning(
            "%s: the checkpoint was saved with %s: training resumes with the same epoch and step, but its steps have "
            "other samples than those that would have come; ranks * batch_size must be the same for that",
            cursor.name,
            "; ".join(changed),
        )
