"""One row of the migration table, functions that make many rows at once, and their Markdown."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

SAME, OTHER, REFUSED = "same", "other", "refused"
# Horovod's name of an argument -> ours.
_RENAMED = {"value": "tensor"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One name of Horovod's, and what corresponds to it here.

    Args:
        section: the title of its table on the page.
        horovod: Horovod's name; `allreduce(op)` for the argument op of allreduce, `ProcessSet.size` for a member.
        ours: our name, or "" if there is none. For a refused name: what happens, or "" if it raises an error.
        status: "same" (same name and meaning), "other" (another name or meaning) or "refused".
        note: what the reader must know.
    """

    section: str
    horovod: str
    ours: str
    status: str
    note: str = ""

    @property
    def owner(self) -> str:
        """The callable that has the argument; the name itself if this row is no argument's."""
        return self.horovod.split("(")[0]

    @property
    def argument(self) -> str:
        """The argument's name, or "" if this row is no argument's."""
        return self.horovod.partition("(")[2].rstrip(")")


def same(section: str, names: str, note: str = "") -> Iterator[Row]:
    """Return rows for names that are the same here.

    Args:
        section: the title of their table.
        names: the names, separated by blanks.
        note: the note of each row.
    """
    for name in names.split():
        yield Row(section, name, name, SAME, note)


def callable_rows(
    section: str,
    name: str,
    arguments: str = "",
    note: str = "",
    other: dict[str, str] | None = None,
    status: str = SAME,
) -> Iterator[Row]:
    """Return the rows of a callable that has the same name here, and of its arguments.

    Args:
        section: the title of their table.
        name: the name of the callable.
        arguments: the arguments' names in Horovod's order, separated by blanks.
        note: the note of the callable's row.
        other: argument -> note, for each argument that differs from Horovod's; a note that begins with "!" marks an
            argument that is refused.
        status: the status of the callable; if it is not "same", the note says why.
    """
    yield Row(section, name, name, status, note)
    said = other or {}
    for argument in arguments.split():
        words = said.get(argument, "")
        status = SAME if not words else REFUSED if words.startswith("!") else OTHER
        ours = "" if status == REFUSED else _RENAMED.get(argument, argument)
        yield Row(section, f"{name}({argument})", ours, status, words.lstrip("!"))


def table_of(rows: Iterable[Row]) -> str:
    """Return a Markdown table for each section; arguments that are the same and have no note share a line.

    Args:
        rows: the rows, ordered by section.

    Returns:
        The tables, each under its title.
    """
    parts = []
    for section, members in itertools.groupby(rows, lambda row: row.section):
        lines = [f"### {section}", "", "| Horovod | here | |", "| --- | --- | --- |"]
        lines += [_line(*group) for group in _folded(members)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _folded(rows: Iterable[Row]) -> Iterator[tuple[str, str, str]]:
    """Return lines: each callable with the arguments that have no note, then other arguments and names, by note."""
    for (owner, takes), members in itertools.groupby(_marked(rows), lambda pair: pair[0]):
        group = [row for _, row in members]
        if takes:
            head = group[0]
            plain = [row.argument for row in group[1:] if (row.status, row.note) == (SAME, "")]
            ours = "the same" if head.status == SAME else f"`{head.ours}`"
            yield f"`{owner}({', '.join(plain)})`", ours, head.note
            group = [row for row in group[1:] if (row.status, row.note) != (SAME, "")]
        for _, alike in itertools.groupby(group, _kind_of_argument if takes else _kind_of_name):
            yield _cells(list(alike))


def _marked(rows: Iterable[Row]) -> Iterator[tuple[tuple[str, bool], Row]]:
    """Pair each row with (callable, True), or with ("", False) for a name without arguments, so that these group."""
    listed = list(rows)
    callables = {row.owner for row in listed if row.argument}
    for row in listed:
        yield ((row.owner, True) if row.owner in callables else ("", False)), row


def _kind_of_argument(row: Row) -> tuple[str, ...]:
    return row.status, row.note


def _kind_of_name(row: Row) -> tuple[str, ...]:
    return row.status, row.note, row.ours if row.status == OTHER else ""


def _cells(alike: list[Row]) -> tuple[str, str, str]:
    first = alike[0]
    if first.argument:
        horovod = f"`{first.owner}({', '.join(row.argument for row in alike)})`"
    else:
        horovod = ", ".join(f"`{row.horovod}`" for row in alike)
    if first.status == SAME:
        return horovod, "the same", first.note
    if first.status == REFUSED:
        return horovod, first.ours or "refused", first.note
    ours = dict.fromkeys(row.ours for row in alike if row.ours)
    return horovod, ", ".join(f"`{name}`" for name in ours) or "nothing", first.note


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
