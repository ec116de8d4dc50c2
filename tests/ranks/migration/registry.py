"""The checks of the rows of the table of migration: each row of docs.horovod has one, by Horovod's name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import hvd_ext as hvd
from docs import horovod
from hvd_ext.errors import InvalidError
from tests.ranks import numbers

CHECKS: dict[str, Callable[[], None]] = {}

# gives what came and what should have come
Case = Callable[[], tuple[Any, Any]]


def check(*names: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Make a function the check of some rows; it runs once, however many."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        once = functools.cache(function)
        for name in names:
            assert name not in CHECKS, name
            CHECKS[name] = once
        return function

    return register


def named(function: str, arguments: str) -> tuple[str, ...]:
    """Give the names of the rows of a function and of these arguments, which spaces separate."""
    return (function, *(f"{function}({argument})" for argument in arguments.split()))


def compare(cases: Mapping[str, Case]) -> None:
    """Make each case the check of the row of its name: what came must be what should have come."""
    for name, case in cases.items():
        check(name)(lambda case=case: same(case()))


def same(pair: tuple[Any, Any]) -> None:
    """Check that what came equals what should have come."""
    got, expected = pair
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(expected, np.float64), rtol=1e-6)


def refused(name: str, call: Callable[[], Any], error: type[Exception] = InvalidError) -> None:
    """Check that a call is refused, on every rank, with the words of the row of this name."""
    (row,) = (row for row in horovod.rows() if row.horovod == name)
    with pytest.raises(error) as caught:
        call()
    assert row.note and row.note in str(caught.value)


def mine(salt: int = 0, shape: tuple[int, ...] = (4,)) -> np.ndarray:
    """Give this rank's numbers."""
    return numbers.values(hvd.rank(), shape, salt).astype(np.float32)


def every(salt: int = 0, shape: tuple[int, ...] = (4,), ranks: list[int] | None = None) -> list[np.ndarray]:
    """Give the numbers of all ranks, or of some."""
    return [numbers.values(rank, shape, salt).astype(np.float32) for rank in ranks or everyone()]


def everyone() -> list[int]:
    """Give the numbers of all ranks."""
    return list(range(hvd.size()))


_sets: list[hvd.ProcessSet] = []


def evens() -> hvd.ProcessSet:
    """Give the process set of the ranks 0, 2, 4, ..., added at the first use; one rank is all ranks."""
    if hvd.size() == 1:
        return hvd.global_process_set
    if not _sets:
        _sets.append(hvd.add_process_set(list(range(0, hvd.size(), 2))))
    return _sets[0]


def remove_evens() -> None:
    """Leave the ranks of the set to other tests."""
    while _sets:
        assert hvd.remove_process_set(_sets.pop())
