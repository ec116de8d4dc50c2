"""The table of pairs: every two features have an entry, and the tests that it names are there."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest

from docs import tables
from hvd_ext.options import compatibility

ROOT = Path(__file__).resolve().parents[3]


def test_every_pair_of_features_has_one_entry() -> None:
    entries = [frozenset({pair.first, pair.second}) for pair in compatibility.pairs()]
    assert len(entries) == len(set(entries))
    assert set(entries) == {frozenset(pair) for pair in itertools.combinations(compatibility.FEATURES, 2)}
    assert set(compatibility.REFUSED) <= set(entries)


@pytest.mark.parametrize("refused", [False, True], ids=["works", "refused"])
def test_the_tests_that_the_table_names_are_there_and_walk_all_of_it(refused: bool) -> None:
    named = {pair.test for pair in compatibility.pairs() if bool(pair.words) == refused}
    for file, function in (test.split("::") for test in named):
        text = (ROOT / file).read_text(encoding="utf-8")
        functions = [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        assert function in functions
        assert f"[pair for pair in pairs() if {'' if refused else 'not '}pair.words]" in text


def test_words_do_not_depend_on_the_order() -> None:
    assert compatibility.words("op=Sum", "predivide") == compatibility.words("predivide", "op=Sum") != ""
    assert compatibility.words("groups", "compression") == ""


def test_the_page_names_every_feature_and_every_refusal() -> None:
    table = tables.pairs()
    assert all(f"| {feature} |" in table for feature in compatibility.FEATURES)
    for pair in compatibility.pairs():
        if pair.words and "XLA" not in (pair.first, pair.second):
            assert f"- {pair.first} and {pair.second}: " in table
    assert table.count("XLA") >= len(compatibility.FEATURES)
