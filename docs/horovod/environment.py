"""The rows of Horovod's environment variables, from the table of `hvd_ext.options.environment`."""

from __future__ import annotations

from docs.horovod.row import OTHER, REFUSED, Row
from hvd_ext import options
from hvd_ext.options import environment as variables

SECTION = "Environment variables"
WARNED = "a warning"


def rows() -> tuple[Row, ...]:
    """Return one row for each variable: our setting if it is heeded, otherwise what `init` does about it."""
    return tuple(_row(variable) for variable in variables.VARIABLES)


def _row(variable: variables.Variable) -> Row:
    if variable.status == variables.HEEDED:
        ours = next(setting.name for setting in options.SETTINGS if setting.field == variable.field)
        return Row(SECTION, variable.name, ours, OTHER, variable.note.removeprefix(f"{ours}: "))
    if variable.status == variables.LAUNCHER:
        return Row(SECTION, variable.name, "", OTHER, variable.note)
    ours = WARNED if variable.status == variables.IGNORED else ""
    return Row(SECTION, variable.name, ours, REFUSED, variable.note)
