"""What partial rounds summed, from the list of who was included, as the engine records it or
`hvd_ext.simulation.rounds.play` plays it.

The list is `arrived` [rounds, ranks], the rounds in their order from round 1: for each rank the newest step whose
gradient is in the round or was in one before it. So a round has a rank's gradients from the step behind that of the row
above up to that of its own row, and step s of every rank takes the result of round s.

A training can be replayed offline. The weights are the same on all ranks after equal rounds:

    weights = [begin]  # weights[s - 1] are those of step s; no gradient needs older ones than the bound of staleness
    for given in included(arrived):
        total = sum(gradient(rank, step, weights[step - 1]) for rank, step in given)
        weights.append(update(weights[-1], total / ranks))

In the public code of eager-SGD a late gradient is lost, and a late rank finds only the newest result, because it has
overwritten the others. There each rank has weights of its own:

    found, taken, means = newest(arrived), [0] * ranks, [None]
    for given in included(arrived, lost=True):
        for rank, step in given:
            for number in found[taken[rank] : step - 1, rank]:
                weights[rank] = update(weights[rank], means[number])
            taken[rank] = step - 1
        means.append(sum(gradient(rank, step, weights[rank]) for rank, step in given) / ranks)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_ext.simulation.rounds import Numbers

Array = npt.NDArray[Any]


def included(arrived: Numbers, *, lost: bool = False) -> Iterator[list[tuple[int, int]]]:
    """Yield, for each round, the steps whose gradients are in it, as (rank, step), a rank's older ones first.

    Steps that a rank took without a gradient are among them.

    Args:
        lost: a gradient that comes after its round is in no other one.
    """
    before = np.zeros(arrived.shape[1], np.int64)
    for number, row in enumerate(arrived, 1):
        first = np.maximum(before + 1, number) if lost else before + 1
        yield [(rank, step) for rank, last in enumerate(row) for step in range(int(first[rank]), int(last) + 1)]
        before = np.maximum(before, row)


def results(
    arrived: Numbers, gradient: Callable[[int, int], Array | None], *, divisor: int = 1, lost: bool = False
) -> Iterator[Array | None]:
    """Yield what each round gives: the sum of its gradients, divided.

    A rank's gradients are added up in the order of its steps, as the engine does; then those of the ranks in the order
    of their numbers, where the engine has the order of its plan. So the bits are the engine's where sums are exact.

    Args:
        gradient: gives the gradient of a rank's step; None if the rank took the step without one.
        divisor: 1 for sums, the number of ranks for means.

    Returns:
        Arrays of the gradients' shape and dtype; None for a round without a gradient.
    """
    for given in included(arrived, lost=lost):
        of_ranks = [total(gradient(*one) for one in given if one[0] == rank) for rank in range(arrived.shape[1])]
        result = total(of_ranks)
        yield result if result is None or divisor == 1 else result / divisor


def total(gradients: Iterator[Array | None] | Sequence[Array | None]) -> Array | None:
    """Add gradients up in their order; None if there is none."""
    found = None
    for gradient in gradients:
        if gradient is not None:
            found = gradient if found is None else found + gradient
    return found


def held(arrived: Numbers, steps: Sequence[int] | Numbers) -> list[tuple[int, int]]:
    """List the gradients that were in no round yet after the last one, as (rank, step), a rank's older ones first.

    Args:
        steps: how many steps each rank has taken [ranks].
    """
    last = arrived.max(0, initial=0)
    return [(rank, step) for rank, taken in enumerate(steps) for step in range(int(last[rank]) + 1, int(taken) + 1)]


def newest(arrived: Numbers) -> Numbers:
    """Give the round whose result each step finds where only the newest one is kept, as in eager-SGD's public code.

    It is that of the step's own round for a rank that is on time. For a rank that is late it is the newest round in
    which it had taken part when its gradient came.

    Returns:
        Numbers of rounds [steps, ranks]; the row s - 1 is that of step s.
    """
    steps = np.arange(1, len(arrived) + 1)
    found = [np.maximum(steps, np.searchsorted(column, steps)) for column in arrived.T]
    return np.stack(found, 1).astype(np.int64)
