"""The script of the README, as it is pasted, on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import pages
from tests.ranks.training import assert_same_bits_on_all_ranks

pytestmark = pytest.mark.ranks(2)


def test_the_script_of_the_readme_learns_the_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn: python -m pip install scikit-learn")
    monkeypatch.chdir(tmp_path)
    names = pages.run("README.md", 1, {"__name__": "__main__"})
    assert_same_bits_on_all_ranks(names["model"].trainable_weights)
    assert names["model"].history.history["val_accuracy"][-1] > 0.8  # a tenth by guessing
