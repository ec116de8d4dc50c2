"""Every public name, argument, variable and flag of Horovod 0.28.1's TensorFlow and Keras modules, and ours for it.

The rows are data: docs/migration.md shows them, and tests compare each row with the package.
"""

from __future__ import annotations

from docs.horovod.row import Row, table_of


def rows() -> tuple[Row, ...]:
    """Return all rows, in the order of the page."""
    from docs.horovod import environment, flags, names, training

    return (*training.ROWS, *names.ROWS, *environment.rows(), *flags.ROWS)


def table() -> str:
    """Return the tables of docs/migration.md in Markdown."""
    return table_of(rows())
