"""Lists of ranks that users give for process sets: what they must be. Pure functions."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from hvd_ext.errors import InvalidError


def check_new(where: str, ranks: tuple[int, ...], size: int, known: dict[tuple[int, ...], str]) -> None:
    """Check the ranks of a set that is to be added.

    Args:
        where: begins the message.
        ranks: from `checked`.
        size: the number of ranks of the job.
        known: the ranks of the sets that are there, and what these are called.

    Raises:
        InvalidError: a rank that the job has not, or the ranks of another set.
    """
    subject = f"{where}: process set (ranks {listed(ranks)})"
    if ranks[-1] >= size:
        raise InvalidError(f"{subject}: its ranks must be ranks of the job, 0 .. {size - 1}; rank {ranks[-1]} is not")
    if ranks in known:
        raise InvalidError(
            f"{subject}: {known[ranks]} has the same ranks, and no two sets may; use that one, or remove it first"
        )


def checked(ranks: Iterable[int]) -> tuple[int, ...]:
    """Check a list of ranks that a user gave.

    Args:
        ranks: in any order.

    Returns:
        The ranks, ascending.

    Raises:
        InvalidError: no ranks, something that is not a rank, or a rank that is there twice.
    """
    if isinstance(ranks, str) or not isinstance(ranks, Iterable):
        raise InvalidError(
            f"process set ({ranks!r}): takes a list of ranks; communicators of mpi4py are not taken, give the "
            "ranks that they have in the job"
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


def listed(ranks: Iterable[int]) -> str:
    """Give ranks for a message: "0, 2"."""
    return ", ".join(str(rank) for rank in ranks)
