"""The examples of docs/training.md, one after the other in one program, on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

import hvd_ext as hvd
from tests import pages
from tests.ranks.training import assert_same_bits_on_all_ranks

pytestmark = pytest.mark.ranks(2)


def test_the_examples_run_and_leave_equal_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = pages.run("docs/training.md", 7)
    assert_same_bits_on_all_ranks(names["model"].weights)
    assert_same_bits_on_all_ranks(names["normalized"].weights)
    assert (tmp_path / "best.keras").exists() == (hvd.rank() == 0)
