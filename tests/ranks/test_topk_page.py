"""The examples of docs/topk.md and docs/compression.md, one after the other, on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_ext import state
from tests import pages
from tests.ranks.training import assert_same_bits_on_all_ranks

pytestmark = pytest.mark.ranks(2)


def test_the_examples_run_and_leave_equal_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = pages.run("docs/topk.md", 6)
    assert_same_bits_on_all_ranks(names["model"].weights)
    assert (names["values"].numpy().tolist(), names["indices"].numpy().tolist()) == ([-4.0], [5])
    assert names["residual"].numpy().tolist() == [[0.5, -3.0, 2.0], [0.0, 3.0, 0.0]]
    for owner in [name for name in state.collect() if name.startswith("top-k: tape")]:
        state.unregister(owner)


def test_every_form_of_the_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_same_bits_on_all_ranks(pages.run("docs/compression.md", 5)["model"].weights)
