"""The script of the README, and the examples of pages, those of a page one after the other in one program."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests import pages
from tests.ranks.training import assert_same_bits_on_all_ranks

pytestmark = pytest.mark.ranks(2)


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_script_of_the_readme_learns_the_digits() -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn: python -m pip install scikit-learn")
    names = pages.run("README.md", 1, {"__name__": "__main__"})
    assert_same_bits_on_all_ranks(names["model"].trainable_weights)
    assert names["model"].history.history["val_accuracy"][-1] > 0.8  # a tenth by guessing


def test_training(hvd: ModuleType, tmp_path: Path) -> None:
    names = pages.run("docs/training.md", 7)
    assert_same_bits_on_all_ranks(names["model"].weights)
    assert_same_bits_on_all_ranks(names["normalized"].weights)
    assert (tmp_path / "best.keras").exists() == (hvd.rank() == 0)


def test_optimizers() -> None:
    names = pages.run("docs/optimizers.md", 5)
    assert_same_bits_on_all_ranks([*names["model"].weights, *names["sparse"].weights])
    assert abs(float(names["model"].optimizer.momentum) - 0.94) < 1e-6
    assert [float(one[0, 0]) for one in names["inverses"]] == [1 / 4, 1 / 32, 1 / 16, 1 / 8]
    np.testing.assert_allclose(names["recipe"].momentum, 0.98, rtol=1e-6)


def test_local_steps(hvd: ModuleType) -> None:
    names = pages.run("docs/local_steps.md", 3)
    hvd.flush(names["sparing"])
    names["model"].fit(names["x"][:8], names["x"][:8, :4], batch_size=8, verbose=0)
    assert_same_bits_on_all_ranks(names["model"].trainable_weights)


def test_stragglers() -> None:
    names = pages.run("docs/stragglers.md", 3)
    assert_same_bits_on_all_ranks([names["variable"]])
    assert_same_bits_on_all_ranks(names["model"].weights)
