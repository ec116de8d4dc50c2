"""The table of pairs: every two features have an entry, each feature its places, and the tests named are there."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest

from docs import tables
from hvd_ext.compression import CODECS, Codec
from hvd_ext.options import compatibility

ROOT = Path(__file__).resolve().parents[3]


def test_every_pair_of_features_has_one_entry() -> None:
    entries = [frozenset({pair.first, pair.second}) for pair in compatibility.pairs()]
    assert len(entries) == len(set(entries))
    assert set(entries) == {frozenset(pair) for pair in itertools.combinations(compatibility.FEATURES, 2)}
    assert set(compatibility.REFUSED) <= set(entries)
    assert compatibility.words("op=Sum", "predivide") == compatibility.words("predivide", "op=Sum") != ""
    assert compatibility.words("groups", "compression") == ""


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_a_codec_that_excludes_more_than_others_has_a_feature_of_its_own(codec: type[Codec]) -> None:
    assert codec.feature in compatibility.FEATURES
    assert (codec.feature == Codec.feature) == (codec.refuses == Codec.refuses)
    assert all(compatibility.words(codec.feature, other) == words for other, words in codec.refuses.items())


def test_every_feature_says_where_it_acts() -> None:
    assert compatibility.ACTS_AT.keys() == compatibility.FEATURES.keys()
    for feature, places in compatibility.ACTS_AT.items():
        assert set(places) <= compatibility.PLACES.keys()
        refused = all(compatibility.words(feature, other) for other in compatibility.FEATURES if other != feature)
        assert bool(places) != refused, f"{feature}: name the places at which it acts"
    assert {place for places in compatibility.ACTS_AT.values() for place in places} == compatibility.PLACES.keys()


def test_a_pair_is_risky_where_both_act_and_only_what_meets_nowhere_has_no_test() -> None:
    found = {frozenset({pair.first, pair.second}): pair for pair in compatibility.pairs()}
    assert found[frozenset({"compression", "sparse gradients"})].places == ("wire",)
    assert found[frozenset({"accumulation", "mixed_float16"})].places == ("passes", "memory", "update")
    assert not found[frozenset({"compression", "clipping"})].risky
    for pair in found.values():
        assert bool(pair.test) == bool(pair.words or pair.risky)
        assert not (pair.words and pair.risky)


@pytest.mark.parametrize("refused", [False, True], ids=["works", "refused"])
def test_the_tests_that_the_table_names_are_there_and_walk_all_of_it(refused: bool) -> None:
    chosen = "words" if refused else "risky"
    named = {pair.test for pair in compatibility.pairs() if getattr(pair, chosen)}
    assert len(named) == 1
    for file, function in (test.split("::") for test in named):
        text = (ROOT / file).read_text(encoding="utf-8")
        functions = [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        assert function in functions
        assert f"[pair for pair in pairs() if pair.{chosen}]" in text


def test_the_page_names_every_feature_and_every_refusal() -> None:
    table = tables.pairs()
    assert all(f"| {feature} |" in table for feature in compatibility.FEATURES)
    for pair in compatibility.pairs():
        if pair.words and "XLA" not in (pair.first, pair.second):
            assert f"- {pair.first} and {pair.second}: " in table
    assert table.count("XLA") >= len(compatibility.FEATURES)
