"""docs/api.md is made from docstrings: what they must be like, and what the page does with them."""

from __future__ import annotations

import re
from typing import Any

import pytest

import hvd_ext as hvd
from docs import api


def example(first: int, *, second: str = "x", third: bool = False) -> int:
    """Add things up, as docs/usage.md says.

    Args:
        first: a number < 2
            of any kind.
        second, third: see first.

    Returns:
        The sum
        of all.

    Raises:
        InvalidError, PlanError: something | somebody is wrong.
    """
    return first


def test_an_entry_has_signature_text_arguments_result_and_exceptions() -> None:
    text = "\n\n".join(api.details("hvd.example", example))
    assert "hvd.example(first, *, second='x', third=False)" in text
    assert "Add things up, as [usage.md](usage.md) says." in text
    assert "| `first` | `int` | a number \\< 2 of any kind. |" in text
    assert "| `second`, `third` | `str`, `bool` | see first. |" in text
    assert "**Returns:** The sum of all." in text
    assert "- `InvalidError`, `PlanError`: something | somebody is wrong." in text


def without_arguments(first: int) -> None:
    """Do something.

    Args:
        last: another.
    """


def without_names(first: int) -> None:
    """Do something.

    Args:
        As above.
    """


def without_words() -> None:
    pass


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (without_arguments, r"the docstring describes \['last'\], the arguments are \['first'\]"),
        (without_names, "an item must be `name: text`, seen 'As above.'"),
        (without_words, "has no docstring"),
    ],
)
def test_a_docstring_that_does_not_describe_the_arguments_is_an_error(function: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        list(api.details("hvd.function", function))


def test_a_name_without_a_group_is_an_error_and_so_is_a_group_with_a_wrong_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = api.GROUPS
    monkeypatch.setattr(api, "GROUPS", groups[1:])
    with pytest.raises(ValueError, match=r"'init'.* are in no group"):
        api.grouped()
    monkeypatch.setattr(api, "GROUPS", (*groups, ("More", "text", ("nothing",))))
    with pytest.raises(ValueError, match=r"\['nothing'\] are no public names"):
        api.grouped()


def test_every_public_name_is_on_the_page_once() -> None:
    shown = [name for _, _, here in api.grouped() for name in here]
    assert len(shown) == len(set(shown))
    objects = {id(api.public()[name]) for name in shown}
    assert {id(getattr(hvd, name)) for names in hvd._MODULES.values() for name in names} <= objects
    assert {"callbacks.synchronized", "DataCache", "state.register", "errors.MismatchError"} <= set(shown)


def test_the_methods_that_keras_calls_are_left_out() -> None:
    assert set(api.methods(hvd.callbacks.Checkpoint)) == {"exit_status", "restore", "save"}
    assert set(api.methods(hvd.ProcessSet)) >= {"ranks", "rank", "size", "included"}
    assert api.methods(hvd.rank) == {}


def test_a_long_call_is_shown_in_lines_that_a_page_can_show() -> None:
    lines = api.signature("hvd.Options", hvd.Options).splitlines()
    assert len(lines) > 3 and max(map(len, lines)) <= api.WIDTH
    assert "op=hvd.Average" in " ".join(lines) and "compression=hvd.Compression.none" in " ".join(lines)
    assert re.fullmatch(r"hvd\.rank\(\)", api.signature("hvd.rank", hvd.rank))
