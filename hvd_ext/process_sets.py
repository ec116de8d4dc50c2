"""Subsets of the job's ranks, each with an engine of its own, so that its collectives meet nobody else's."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING

from hvd_ext import runtime
from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    from hvd_ext.runtime import Runtime


class ProcessSet:
    """Some ranks of the job, which run collectives among themselves once the set has been added.

    Args:
        ranks: global ranks, in any order, each once.

    Raises:
        InvalidError: no ranks, something that is not a rank, or a rank that is there twice.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        """Name the ranks; `add_process_set` or `init` adds the set."""
        self._ranks = _checked(ranks)
        self.process_set_id: int | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks, ascending."""
        return self._ranks

    def size(self) -> int | None:
        """Give the number of ranks, or None while the set is not added."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Give this process's place in the set, 0 to `size()` - 1, or None while the set is not added.

        Raises:
            InvalidError: this process is not in the set.
        """
        return None if self.process_set_id is None else member(self, "rank").engine.rank

    def included(self) -> bool:
        """Tell whether this process is in the set."""
        return runtime.current().engine.rank in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={list(self.ranks)})"


class _GlobalProcessSet(ProcessSet):
    def __init__(self) -> None:
        self.process_set_id = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        job = runtime.current_or_none()
        return () if job is None else tuple(range(job.engine.size))

    def size(self) -> int | None:
        return runtime.current().engine.size


global_process_set: ProcessSet = _GlobalProcessSet()


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Add a process set; all ranks of the job call it with equal ranks, also those that are not in the set.

    Args:
        process_set: the set, or its ranks.

    Returns:
        The set, which has a `process_set_id` now.

    Raises:
        InvalidError: the ranks are wrong, or a set of the same ranks exists.
    """
    runtime.current()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    raise InvalidError(f"add_process_set ({added!r}): this build has the global process set only")


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; all ranks of the job call it with the same set.

    Args:
        process_set: from `add_process_set` or given to `init`.

    Returns:
        Whether it was removed: false for the global set and for one that is not added.
    """
    return False


def runtime_of(process_set: ProcessSet | None) -> Runtime | None:
    """Give what runs a set's collectives.

    Args:
        process_set: a set that was added; None for all ranks.

    Returns:
        The set's runtime; None where this rank is not in the set.

    Raises:
        InvalidError: the set was not added, has been removed, or is of before `shutdown`.
        NotInitializedError: before `init()` or after `shutdown()`.
    """
    job = runtime.current()
    if process_set is None or process_set is global_process_set:
        return job
    if not isinstance(process_set, ProcessSet):
        raise InvalidError(
            f"process_set ({process_set!r}): takes a ProcessSet or None, got {type(process_set).__name__}"
        )
    raise InvalidError(
        f"process set (ranks {_listed(process_set.ranks)}): it must be added before it is used; call "
        "add_process_set() on all ranks, or give it to init(process_sets=[...]); after shutdown() it must be added again"
    )


def member(process_set: ProcessSet | None, what: str) -> Runtime:
    """Give what runs a set's collectives, on a rank of the set.

    Args:
        process_set: a set that was added; None for all ranks.
        what: who asks, for the message.

    Returns:
        The set's runtime.

    Raises:
        InvalidError: this rank is not in the set, or the set is not there (see `runtime_of`).
        NotInitializedError: before `init()` or after `shutdown()`.
    """
    found = runtime_of(process_set)
    if found is None:
        assert process_set is not None
        raise InvalidError(
            f"{what}: rank {runtime.current().engine.rank} is not in process set {process_set.process_set_id} (ranks "
            f"{_listed(process_set.ranks)}); only its ranks may call it: ask process_set.included() first"
        )
    return found


def _checked(ranks: Iterable[int]) -> tuple[int, ...]:
    if isinstance(ranks, str) or not isinstance(ranks, Iterable):
        raise InvalidError(
            f"process set ({ranks!r}): takes a list of ranks; communicators of mpi4py are not taken, give the ranks that "
            "they have in the job"
        )
    given = list(ranks)
    try:
        found = [operator.index(rank) for rank in given]
    except TypeError:
        raise InvalidError(f"process set ({given!r}): its ranks are whole numbers") from None
    if not found:
        raise InvalidError("process set (no ranks): it must have at least one rank")
    if min(found) < 0:
        raise InvalidError(f"process set ({found}): ranks are not negative, one is {min(found)}")
    repeated = sorted({rank for rank in found if found.count(rank) > 1})
    if repeated:
        raise InvalidError(f"process set ({found}): each rank may be there once; rank {repeated[0]} is there again")
    return tuple(sorted(found))


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
