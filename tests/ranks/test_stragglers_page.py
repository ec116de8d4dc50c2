"""The examples of docs/stragglers.md, one after the other in one program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.ranks.training import assert_same_bits_on_all_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "stragglers.md"


def test_the_examples_run_and_leave_equal_weights() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    for number, block in enumerate(blocks):
        exec(compile(block, f"docs/stragglers.md, example {number + 1}", "exec"), names)
    assert_same_bits_on_all_ranks([names["variable"]])
    assert_same_bits_on_all_ranks(names["model"].weights)
