"""The bytes and the work of the rows of sparse plans at a density: entries (value and index), passes over memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvd_ext.compression.topk import TopK
from hvd_ext.errors import PlanError
from hvd_ext.planning.ir import (
    BEGIN,
    CLEAR,
    COUNT,
    FOLD,
    MERGE,
    OPCODE,
    PACK,
    RESELECT,
    SCATTER_ADD,
    SELECT,
    SEND_SPARSE,
    TAKE,
    Rows,
)

ELEMENT_NBYTES = 4  # sparse plans are of float32
# The bytes of an entry: a 16-bit value and, at densities of about 0.001, about 2 bytes of an index.
ENTRY_NBYTES = 4.0
# The time of one pass over memory on one core, measured for an exact selection at 25 M elements.
SELECT_S_PER_ELEMENT = 0.3e-9
# The time to add an entry to a buffer, which touches a cache line of its own; assumed, not measured.
ADD_S_PER_ENTRY = 3e-9
_PASSES = (SELECT, RESELECT, FOLD, PACK, CLEAR)
_ENTRIES = (SCATTER_ADD, MERGE, TAKE)


@dataclass(frozen=True, slots=True)
class Sparsity:
    """The density of a step, and the prices of its entries and passes.

    Args:
        density: the fraction of the elements that is selected, in (0, 1].
        entry_nbytes: the mean number of bytes of a value and its index, as sent.
        select_s_per_element: the time of a pass over memory, such as a selection, in seconds per element.
        add_s_per_entry: the time to add an entry to a buffer, in seconds.
        rows: the opcodes beyond those of a plan that adds whole vectors which the codec has; other plans do not apply.
    """

    density: float
    entry_nbytes: float = ENTRY_NBYTES
    select_s_per_element: float = SELECT_S_PER_ELEMENT
    add_s_per_entry: float = ADD_S_PER_ENTRY
    rows: frozenset[str] = TopK.rows

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise PlanError(f"density ({self.density}): must be above 0 and at most 1")
        if not (self.entry_nbytes > 0 and self.select_s_per_element >= 0 and self.add_s_per_entry >= 0):
            raise PlanError(
                f"sparsity (entry_nbytes {self.entry_nbytes}, select_s_per_element {self.select_s_per_element}, "
                f"add_s_per_entry {self.add_s_per_entry}): an entry must have bytes, and times must not be negative"
            )

    def filled(self, vectors: float) -> float:
        """The fraction of a range, at most 1, that has entries in a sum of selections without common elements.

        CommLib assumes the same in Eq. 10.
        """
        return min(vectors * self.density, 1.0)

    def sent(self, vectors: float) -> float:
        """The bytes of a range's entries as sent, divided by the bytes of the range.

        The quotient is above 1 if a dense message would be smaller.
        """
        return self.filled(vectors) * self.entry_nbytes / ELEMENT_NBYTES


DENSE = Sparsity(1.0, float(ELEMENT_NBYTES))  # a placeholder for plans without sparse rows


def vectors_of(rows: Rows) -> NDArray[np.float64]:
    """The number of selections in a rank's own vector at each of its rows, float64 [n].

    It is 1 until a PACK, then the mean number of selections that were added to each of its units.
    """
    vectors, current = np.ones(len(rows)), 1.0
    added: list[tuple[int, int]] = []
    for number, row in enumerate(rows.tolist()):
        begin, end = row[BEGIN], row[BEGIN] + row[COUNT]
        if row[OPCODE] == SCATTER_ADD:
            added.append((begin, end))
        elif row[OPCODE] == PACK:
            overlap = sum(max(min(end, last) - max(begin, first), 0) for first, last in added)
            current = overlap / row[COUNT]
        vectors[number] = current
    return vectors


def sent_shares(rows: Rows, units: int, sparsity: Sparsity) -> NDArray[np.float64]:
    """The bytes of each row's message as a share of the buffer's bytes, float64 [n]; for local rows without meaning."""
    shares: NDArray[np.float64] = rows[:, COUNT] / units
    sparse = rows[:, OPCODE] == SEND_SPARSE
    if not sparse.any():
        return shares
    factors = np.array([sparsity.sent(vectors) for vectors in vectors_of(rows)])
    return np.where(sparse, shares * factors, shares)


def local_s_per_byte(rows: Rows, units: int, sparsity: Sparsity) -> NDArray[np.float64]:
    """The time of each local row for each byte of the buffer, seconds, float64 [n]; 0 for messages."""
    shares = rows[:, COUNT] / units / ELEMENT_NBYTES
    passes = np.where(np.isin(rows[:, OPCODE], _PASSES), shares * sparsity.select_s_per_element, 0.0)
    entries = np.isin(rows[:, OPCODE], _ENTRIES)
    if not entries.any():
        return passes
    filled = np.array([sparsity.filled(vectors) for vectors in vectors_of(rows)])
    return passes + np.where(entries, shares * filled * sparsity.add_s_per_entry, 0.0)
