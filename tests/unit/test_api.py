"""docs/api.md is made from docstrings: what they must be like. The page itself is compared in test_docs.py."""

from __future__ import annotations

from typing import Any

import pytest

import hvd_ext as hvd
from docs import api


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


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (without_arguments, r"the docstring describes \['last'\], the arguments are \['first'\]"),
        (without_names, "an item must be `name: text`, seen 'As above.'"),
        (lambda: None, "has no docstring"),
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
    assert {id(getattr(hvd, name)) for name in hvd._NAMES.keys() - hvd._MODULES} <= objects
    assert {"callbacks.synchronized", "DataCache", "state.register", "errors.MismatchError"} <= set(shown)
