"""The plots of the studies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.studies.__main__ import app
from benchmarks.studies.convergence import results as convergence
from benchmarks.studies.hitopk import results as hitopk
from hvd_ext.commands import figures
from tests.unit.drawing import assert_colours_differ, assert_readable

pytest.importorskip("matplotlib", reason="needs matplotlib: python -m pip install matplotlib")


def test_no_two_lines_of_a_plot_have_the_same_colour() -> None:
    palettes = {
        "sparse sums": list(hitopk.COLOURS),
        "convergence": ["#000000", *convergence.COLOURS],
    }
    assert_colours_differ(palettes)


COMMANDS = {
    "plot-hitopk": "hitopk",
    "plot-convergence": "convergence",
}


@pytest.mark.parametrize(("command", "name"), COMMANDS.items())
def test_plots_of_kept_results_have_few_lines_and_titles_that_fit(
    command: str, name: str, tmp_path: Path, seen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "DPI", 30)  # quicker
    kept = Path(__file__).parents[3] / "benchmarks" / "results" / f"{name}.json"
    arguments = [command, str(kept), "--output", str(tmp_path / "x.png")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    (drawn,) = seen
    assert drawn.get_supxlabel().startswith("not drawn: ")
    assert_readable(drawn)


@pytest.mark.parametrize(("command", "name"), COMMANDS.items())
def test_every_command_that_draws_can_be_told_what(command: str, name: str, tmp_path: Path) -> None:
    kept = Path(__file__).parents[3] / "benchmarks" / "results" / f"{name}.json"
    done = CliRunner().invoke(app, [command, str(kept), "--output", str(tmp_path / "x.png"), "--only", "nobody"])
    assert done.exit_code == 1
    assert "only ('nobody'): must be one of the names in the file" in done.output
