"""The examples of docs/saving.md run, one after the other, as a reader would type them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_ext import state
from tests import pages


def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = pages.run("docs/saving.md", 6)
    assert names["exit_status"] == 0
    assert (names["epoch"], names["folder"].name) == (3, "checkpoint-000003")
    assert names["evaluated"].optimizer.iterations == 6
    assert [path.name for path in (tmp_path / "run-3").glob("checkpoint-*3")] == ["checkpoint-000003"]
    assert state.unclaimed() == {}
