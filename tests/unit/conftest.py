"""What tests of plots share."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that a test has drawn, in their order."""
    figure = pytest.importorskip("matplotlib.figure", reason="needs matplotlib: python -m pip install matplotlib")
    figures: list[Any] = []
    save = figure.Figure.savefig
    monkeypatch.setattr(
        figure.Figure, "savefig", lambda self, *args, **kwargs: (figures.append(self), save(self, *args, **kwargs))
    )
    return figures
