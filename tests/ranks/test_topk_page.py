"""The examples of docs/topk.md, one after the other in one program, on any number of ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hvd_ext import state
from tests.ranks.training import assert_same_bits_on_all_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "topk.md"


def test_the_examples_run_and_leave_equal_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    for number, block in enumerate(blocks):
        exec(compile(block, f"docs/topk.md, example {number + 1}", "exec"), names)
    assert_same_bits_on_all_ranks(names["model"].weights)
    assert (names["values"].numpy().tolist(), names["indices"].numpy().tolist()) == ([-4.0], [5])
    assert names["residual"].numpy().tolist() == [[0.5, -3.0, 2.0], [0.0, 3.0, 0.0]]
    for owner in [name for name in state.collect() if name.startswith("top-k: tape")]:
        state.unregister(owner)
