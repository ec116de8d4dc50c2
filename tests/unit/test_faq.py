"""docs/faq.md: quoted messages are those of the sources, answers say where to read on."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAQ = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
HOLE = "\0"  # stands in a message for a value that is put in when it is written
# what other programs say: beginning of the words -> whose they are
OTHERS = {
    "But I couldn't open the help file": "Open MPI's",
    "Bus error": "the kernel's",
    "ORTE has lost communication": "Open MPI's",
    "mpirun noticed that process rank": "Open MPI's",
    "unable to reach each other": "Open MPI's",
}
STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"')


def python_strings(node: ast.AST) -> Iterator[str]:
    """Yields the strings of a Python file but for docstrings, added-up and formatted ones in one piece."""

    def text(part: ast.AST) -> str | None:
        if isinstance(part, ast.Constant):
            return part.value if isinstance(part.value, str) else None
        if isinstance(part, ast.JoinedStr):
            return "".join(text(value) or HOLE for value in part.values)
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Add):
            left, right = text(part.left), text(part.right)
            return None if left is right is None else (left or HOLE) + (right or HOLE)
        return None

    spoken = [child.value for child in ast.walk(node) if isinstance(child, ast.Expr)]  # docstrings
    for child in ast.walk(node):
        found = None if child in spoken else text(child)
        if found:
            yield found


def cxx_strings(text: str) -> Iterator[str]:
    """Yields the strings of each statement of a C++ file in one piece."""
    text = re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE)
    for statement in re.split(r";\s*\n", text):
        pieces, end = [], 0
        for found in STRING.finditer(statement):
            between = statement[end : found.start()].strip()
            pieces.append((HOLE if between and pieces else "") + found[1].replace('\\"', '"'))
            end = found.end()
        if pieces:
            yield "".join(pieces)


@functools.cache
def messages() -> str:
    """Gives all strings of the sources, one in a line."""
    found: list[str] = []
    for path in sorted((ROOT / "hvd_ext").rglob("*.py")):
        found += python_strings(ast.parse(path.read_text(encoding="utf-8")))
    for path in sorted((ROOT / "tf_ops").rglob("*.cc")) + sorted((ROOT / "tf_ops").rglob("*.h")):
        found += cxx_strings(path.read_text(encoding="utf-8"))
    return "\n".join(dict.fromkeys(" ".join(one.replace("\\n", " ").split()) for one in found))


def known(quoted: str) -> bool:
    """Whether the sources have a message with these words; `...` stands for anything."""
    fragments = [re.escape(" ".join(part.split())) for part in quoted.split("...") if part.strip()]
    return re.search(r"[^\n]*?".join(fragments), messages()) is not None


def rows(text: str) -> list[list[str]]:
    """Gives the rows of all tables of a page, without heads."""
    lines = re.findall(r"^\|(.*)\|$", text, re.MULTILINE)
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in lines]
    heads = {number - 1 for number, row in enumerate(cells) if set("".join(row)) <= set("- ")}
    return [row for number, row in enumerate(cells) if number not in heads and number - 1 not in heads]


def strangers(text: str) -> list[str]:
    """Gives the quoted messages of a text that are neither in the sources nor of another program."""
    quoted = re.findall(r'"([^"]+)"', text)
    return [words for words in quoted if not known(words) and not words.startswith(tuple(OTHERS))]


def test_a_message_is_found_only_if_the_sources_have_it() -> None:
    assert known("has waited ... s for")
    assert not known("has slept ... s for")
    assert list(cxx_strings('fail("a " + name + " is \\"b\\"" " c");\nother("d");\n')) == [f'a {HOLE} is "b" c', "d"]
    assert f"x {HOLE} y z" in list(python_strings(ast.parse("raise E(f'x {a} y' + ' z')")))
    assert rows("| a | b |\n|---|---|\n| c \\| d | e |\n") == [["c \\| d", "e"]]


@pytest.mark.parametrize("row", rows(FAQ), ids=lambda row: row[0][:60])
def test_a_quoted_message_is_one_of_the_sources_and_the_answer_links_to_a_page(row: list[str]) -> None:
    seen, why, answer = row
    assert seen and why
    assert strangers(seen) == []
    assert re.search(r"\]\(\w+\.md(#[\w-]+)?\)", answer), "the answer must link to a page"


def test_no_message_of_another_program_is_listed_that_the_page_does_not_quote() -> None:
    said = " ".join(row[0] for row in rows(FAQ))
    assert [words for words in OTHERS if f'"{words}' not in said] == []
