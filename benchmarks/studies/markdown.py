"""Tables as Markdown, what they were measured on, and short tables selected from whole ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Table = tuple[str, list[str], list[list[str]]]  # the line above it, its headings, its rows
KEYS = ("table", "rows", "columns", "across")


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], rule: str = "---|") -> str:
    """Write a table as Markdown; a cell without text becomes a dash. `rule` is a column's part of the second line."""
    first, *others = [f"| {' | '.join(cell or '-' for cell in row)} |" for row in [headings, *rows]]
    return "\n".join([first, "|" + rule * len(headings), *others, ""])


def excerpt(text: str, wanted: str) -> str:
    """Select from the tables of a text.

    Args:
        text: Markdown with tables.
        wanted: parts with " | " between them. "table: TITLE" takes the table below that line, else it is the first one
            that has the columns. "rows: A / B; C" keeps rows in which a cell is A or B, and another one is C.
            "columns: X; Y" keeps these columns in this order. "across: X; Y; Z" makes a table with a row for each X, a
            column for each Y, and Z in the cells.

    Returns:
        The short table as Markdown.

    Raises:
        ValueError: a part is not known, or what it names is not in the tables.
    """
    parts = _parts(wanted)
    named = [*parts.get("columns", []), *parts.get("across", [])]
    fitting = (
        (headings, rows)
        for title, headings, rows in _tables(text)
        if set(named) <= set(headings) and parts.get("table", [title]) == [title]
    )
    headings, rows = next(fitting, ([], []))
    if not headings:
        raise ValueError(f"mark ({wanted}): no table of the result has this title and these columns")
    for group in parts.get("rows", []):
        accepted = [choice.strip() for choice in group.split(" / ")]
        for choice in accepted:
            if not any(choice in row for row in rows):
                raise ValueError(f"mark ({wanted}): no row has a cell {choice!r}")
        rows = [row for row in rows if set(row) & set(accepted)]
    if "across" in parts:
        headings, rows = _across(headings, rows, parts["across"], wanted)
    elif "columns" in parts:
        places = [headings.index(name) for name in parts["columns"]]
        headings, rows = list(parts["columns"]), [[row[place] for place in places] for row in rows]
    return table(headings, rows)


def _parts(wanted: str) -> Mapping[str, list[str]]:
    parts = {}
    for part in wanted.split(" | "):
        key, _, value = part.partition(":")
        if key.strip() not in KEYS:
            raise ValueError(f"mark ({wanted}): {key.strip()!r} must be one of {', '.join(KEYS)}")
        parts[key.strip()] = [one.strip() for one in value.split(";")]
    return parts


def _tables(text: str) -> Iterator[Table]:
    title = ""
    block: list[list[str]] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            block.append([cell.strip() for cell in line.strip().strip("|").split("|")])
            continue
        if block:
            yield title, block[0], block[2:]
            block = []
        if line.strip():
            title = line.strip().rstrip(":")


def _across(
    headings: Sequence[str], rows: Sequence[list[str]], names: Sequence[str], wanted: str
) -> tuple[list[str], list[list[str]]]:
    if len(names) != 3:
        raise ValueError(f"mark ({wanted}): across must name three columns")
    down, over, value = (headings.index(name) for name in names)
    cells = {(row[down], row[over]): row[value] for row in rows}
    if len(cells) != len(rows):
        raise ValueError(f"mark ({wanted}): two rows have the same {names[0]} and {names[1]}")
    columns = list(dict.fromkeys(row[over] for row in rows))
    lines = dict.fromkeys(row[down] for row in rows)
    return [names[0], *columns], [[line, *(cells.get((line, one), "-") for one in columns)] for line in lines]


def facts(result: Mapping[str, Any]) -> str:
    """Write where a result was measured, and how many samples its rows have."""
    counts = sorted({len(row["samples"]) for row in result["rows"]})
    samples = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    return f"{where(result['runs'][0])} Medians of {samples} samples."


def where(run: Mapping[str, Any]) -> str:
    """Write the machine and the versions of a run."""
    machine, versions = run["machine"], run["versions"]
    named = ", ".join(f"{name} {versions[name]}" for name in sorted(versions))
    return (
        f"{run['date']}, {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['system']}; load before the start {machine['load_before']}. {named}."
    )
