"""The plot of `probe`, and what is refused before anything is measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hvd_ext.commands.probe import Allreduce, app, draw
from hvd_ext.errors import InvalidError
from hvd_ext.job import process
from hvd_ext.topology.fit import Curve
from hvd_ext.topology.tree import Link
from tests.unit.drawing import assert_readable

TIMES = [Allreduce(nbytes, "ring", 1e-3 + nbytes * 1e-9, 1.1e-3 + nbytes * 1e-9) for nbytes in (1 << 14, 1 << 18)]
CURVES = [
    Curve(name, ((1e3, 2e-4), (1e6, 9e-2)), Link(1.1e-4, 8e-8))
    for name in ("between hosts", "a port of first", "a port of second")
]


def test_the_plot_has_a_panel_for_each_curve_with_its_line_in_the_title(tmp_path: Path, seen: list[Any]) -> None:
    draw(tmp_path / "x.png", TIMES, CURVES, "4 ranks on 2 hosts")
    assert_readable(seen[0])
    titles = [axis.get_title() for axis in seen[0].axes]
    assert titles[0].startswith("allreduce: ")
    assert titles[1] == "between hosts: 110 us + 80 ns a byte"
    assert len(titles) == 4
    labels = [text.get_text() for text in seen[0].legends[0].get_texts()]
    assert labels == ["measured", "the line of the title", "the planner's price"]
    with pytest.raises(InvalidError, match="no/x.png: it cannot be written"):
        draw(tmp_path / "no" / "x.png", TIMES, CURVES, "4 ranks on 2 hosts")


def test_without_matplotlib_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(*_: object) -> None:
        raise AssertionError("it measures")

    monkeypatch.setattr(process, "init", init)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = CliRunner().invoke(app, ["--plot", "x.png"])
    assert done.exit_code == 1 and "plot (matplotlib): it is not installed" in done.output
