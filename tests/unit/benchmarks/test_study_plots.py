"""The plots of the studies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.studies.__main__ import app
from benchmarks.studies.convergence import results as convergence
from benchmarks.studies.hitopk import results as hitopk
from hvd_ext.bench import plots

pytest.importorskip("matplotlib", reason="needs matplotlib: python -m pip install matplotlib")


def test_no_two_lines_of_a_plot_have_the_same_colour() -> None:
    palettes = {
        "sparse sums": list(hitopk.COLOURS),
        "convergence": ["#000000", *convergence.COLOURS],
    }
    assert {name: len(set(colours)) for name, colours in palettes.items()} == {
        name: len(colours) for name, colours in palettes.items()
    }
    assert min(len(colours) for colours in palettes.values()) >= plots.LINES


COMMANDS = {
    "plot-hitopk": "hitopk",
    "plot-convergence": "convergence",
}


@pytest.mark.parametrize(("command", "name"), COMMANDS.items())
def test_plots_of_kept_results_have_few_lines_and_titles_that_fit(
    command: str, name: str, tmp_path: Path, seen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "DPI", 30)  # quicker
    kept = Path(__file__).parents[3] / "benchmarks" / "results" / f"{name}.json"
    arguments = [command, str(kept), "--output", str(tmp_path / "x.png")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    (drawn,) = seen
    (legend,) = drawn.legends
    assert 2 <= len(legend.get_texts()) <= plots.LINES
    assert drawn.get_supxlabel().startswith("not drawn: ")
    drawn.draw_without_rendering()  # at the figure's own resolution, in which the boxes below are
    boxes = [axis.title.get_window_extent() for axis in drawn.axes if axis.get_title()]
    assert boxes
    assert all(box.x0 >= 0 and box.x1 <= drawn.bbox.x1 and box.y1 <= drawn.bbox.y1 for box in boxes)
    assert not any(one.overlaps(other) for number, one in enumerate(boxes) for other in boxes[:number])


@pytest.mark.parametrize(("command", "name"), COMMANDS.items())
def test_every_command_that_draws_can_be_told_what(command: str, name: str, tmp_path: Path) -> None:
    kept = Path(__file__).parents[3] / "benchmarks" / "results" / f"{name}.json"
    done = CliRunner().invoke(app, [command, str(kept), "--output", str(tmp_path / "x.png"), "--only", "nobody"])
    assert done.exit_code == 1
    assert "only ('nobody'): must be one of the file's" in done.output
