"""The script of the README, as it is pasted, on any number of ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.training import assert_same_bits_on_all_ranks

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_script_of_the_readme_learns_the_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn: python -m pip install scikit-learn")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    (script,) = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    exec(compile(script, "the script of README.md", "exec"), names)
    assert_same_bits_on_all_ranks(names["model"].trainable_weights)
    assert names["model"].history.history["val_accuracy"][-1] > 0.8  # a tenth by guessing
