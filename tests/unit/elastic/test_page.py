"""The examples of docs/elastic.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import pages


def test_the_examples_of_the_page_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, session: Any) -> None:
    monkeypatch.chdir(tmp_path)
    names = pages.run("docs/elastic.md", 3)
    assert names["state"].step == 40
    assert (tmp_path / "model.keras").exists()
