"""The examples of docs/optimizers.md, one after the other in one program, on any number of ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from tests.ranks.training import assert_same_bits_on_all_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "optimizers.md"


def test_the_examples_run_and_leave_equal_models() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    for number, block in enumerate(blocks):
        exec(compile(block, f"docs/optimizers.md, example {number + 1}", "exec"), names)
    assert_same_bits_on_all_ranks(names["model"].weights)
    assert abs(float(names["model"].optimizer.momentum) - 0.94) < 1e-6
    assert [float(one[0, 0]) for one in names["inverses"]] == [1 / 4, 1 / 32, 1 / 16, 1 / 8]
    np.testing.assert_allclose(names["recipe"].momentum, 0.98, rtol=1e-6)
