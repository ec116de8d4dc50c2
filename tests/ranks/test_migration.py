"""Every row of the table of migration, on any number of ranks: what is the same is called as with Horovod.

The rows of variables and flags, which need no ranks, are tested in tests/unit/horovod.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from docs import horovod
from docs.horovod import environment, flags
from tests.ranks.migration import callback_rows, collectives, life_rows, training_rows
from tests.ranks.migration.registry import CHECKS, remove_evens

pytestmark = pytest.mark.ranks(1, 2)

FILLED_BY = (callback_rows, collectives, life_rows, training_rows)
ROWS = [row for row in horovod.rows() if row.section not in (environment.SECTION, flags.SECTION)]


@pytest.fixture(scope="module", autouse=True)
def _no_sets_are_left() -> Iterator[None]:
    yield
    remove_evens()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.horovod)
def test_the_row_is_true(row: horovod.Row) -> None:
    CHECKS[row.horovod]()
