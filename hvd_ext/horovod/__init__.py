"""Every public name, argument, variable and flag of Horovod 0.28.1's TensorFlow and Keras modules, and what it is here.

The rows are data: docs/migration.md shows them, and the tests hold each of them against the package.
"""

from __future__ import annotations

from hvd_ext.horovod.row import Row, table_of


def rows() -> tuple[Row, ...]:
    """Give all rows, in the order of the page."""
    from hvd_ext.horovod import environment, flags, names, training

    return (*training.ROWS, *names.ROWS, *environment.rows(), *flags.ROWS)


def table() -> str:
    """Give the tables of docs/migration.md in Markdown."""
    return table_of(rows())
