"""The examples of docs/saving.md run, one after the other, as a reader would type them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hvd_ext import state

PAGE = Path(__file__).resolve().parents[3] / "docs" / "saving.md"


def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["exit_status"] == 0
    assert (names["epoch"], names["folder"].name) == (3, "checkpoint-000003")
    assert names["evaluated"].optimizer.iterations == 6
    assert state.unclaimed() == {}
