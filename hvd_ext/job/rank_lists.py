"""Checks of the lists of ranks that users give for process sets. All functions are pure."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from hvd_ext.errors import InvalidError, MismatchError


def check_new(where: str, ranks: tuple[int, ...], size: int, known: dict[tuple[int, ...], str]) -> None:
    """Raise `InvalidError` if the job lacks a rank of a new set, or a known set (name by ranks) has the same ranks."""
    subject = f"{where}: process set (ranks {listed(ranks)})"
    if ranks[-1] >= size:
        raise InvalidError(f"{subject}: its ranks must be ranks of the job, 0 .. {size - 1}; rank {ranks[-1]} is not")
    if ranks in known:
        raise InvalidError(f"{subject}: {known[ranks]} has the same ranks; use that one, or remove it first")


def checked(ranks: Iterable[int]) -> tuple[int, ...]:
    """Check a list of ranks, and sort it; `InvalidError` if it is empty, or a rank is wrong or repeated."""
    if isinstance(ranks, str) or not isinstance(ranks, Iterable):
        raise InvalidError(f"process set ({ranks!r}): takes a list of ranks or a communicator of mpi4py")
    numbers = list(ranks)
    try:
        indices = [operator.index(rank) for rank in numbers]
    except TypeError:
        raise InvalidError(f"process set ({numbers!r}): its ranks must be whole numbers") from None
    if not indices:
        raise InvalidError("process set (no ranks): it must have at least one rank")
    if min(indices) < 0:
        raise InvalidError(f"process set ({indices}): ranks must not be negative, one is {min(indices)}")
    repeated = sorted({rank for rank in indices if indices.count(rank) > 1})
    if repeated:
        raise InvalidError(
            f"process set ({indices}): each rank may be listed only once; rank {repeated[0]} is listed again"
        )
    return tuple(sorted(indices))


def is_communicator(value: Any) -> bool:
    """Return whether a value is an mpi4py communicator, without importing mpi4py."""
    return hasattr(value, "Get_size") and hasattr(value, "Get_rank")


def of_communicators(call: str, passed: Sequence[Sequence[Sequence[int]]]) -> list[tuple[int, ...]]:
    """Collect the communicators of all ranks, each of which knows only its own.

    Args:
        passed: for each rank, the ranks of each communicator that it passed.

    Returns:
        The ranks of each communicator, once: first those that rank 0 passed, in its order, then those that rank 1
        added, and so on.

    Raises:
        MismatchError: a rank of a communicator did not pass it.
    """
    givers: dict[tuple[int, ...], set[int]] = {}
    for rank, communicators in enumerate(passed):
        for ranks in communicators:
            givers.setdefault(tuple(ranks), set()).add(rank)
    for ranks, ranks_that_passed in givers.items():
        missing = [rank for rank in ranks if rank not in ranks_that_passed]
        if missing:
            raise MismatchError(
                f"{call}: all ranks of a communicator must give it; rank {min(ranks_that_passed)} gave one of ranks "
                f"{listed(ranks)}, rank {missing[0]} did not"
            )
    return list(givers)


def listed(ranks: Iterable[int]) -> str:
    """Return ranks as text for a message: "0, 2"."""
    return ", ".join(str(rank) for rank in ranks)
