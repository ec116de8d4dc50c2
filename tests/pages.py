"""The Python examples of a page, which tests run one after the other in one program, as a reader would paste them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run(page: str, number: int, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Runs the examples of a page.

    Args:
        page: its path in the repository.
        number: how many examples it must have.
        names: those that the program begins with; None: its `__name__` is "page".

    Returns:
        The names that the program has at its end.
    """
    names = {"__name__": "page"} if names is None else names
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == number
    for place, block in enumerate(blocks, 1):
        exec(compile(block, f"{page}, example {place}", "exec"), names)
    return names
