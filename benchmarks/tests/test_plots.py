"""The plots of the studies: files that are written, and what is in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.studies.__main__ import app
from benchmarks.studies.convergence import results as convergence
from benchmarks.studies.data import results as data
from benchmarks.studies.data.goals import CPU
from benchmarks.studies.hitopk import results as hitopk
from benchmarks.studies.schedule import results as schedule
from benchmarks.studies.stragglers import results as stragglers
from benchmarks.studies.stragglers.worker import MODES
from benchmarks.studies.topk import results as topk
from benchmarks.tests.rows import topk_rows
from hvd_ext.bench import results
from hvd_ext.commands import figures
from hvd_ext.errors import InvalidError
from tests.unit.bench.rows import KEPT
from tests.unit.bench.test_plots import allreduces, bars_of, lines_of, ticks_of
from tests.unit.drawing import assert_colours_differ, assert_readable

pytest.importorskip("matplotlib", reason="needs matplotlib: python -m pip install matplotlib")
# By command: a kept result, which has more contestants than a panel may show except of FEW.
COMMANDS = {
    "plot-allreduce": "allreduce_nine",
    "plot-training": "training_horovod",
    "plot-breakdown": "breakdown",
    "plot-topk": "topk_sweep",
    "plot-schedule": "schedule",
    "plot-stragglers": "stragglers",
    "plot-data": "data",
    "plot-hitopk": "hitopk",
    "plot-convergence": "convergence",
}
FEW = ("plot-training", "plot-breakdown")


def drawn_by(command: str, path: Path, *options: str) -> Any:
    return CliRunner().invoke(app, [command, str(KEPT / f"{COMMANDS[command]}.json"), "--output", str(path), *options])


@pytest.mark.parametrize("command", COMMANDS)
def test_plots_of_kept_results_have_few_lines_and_titles_that_fit(
    command: str, tmp_path: Path, seen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "DPI", 30)  # quicker
    done = drawn_by(command, tmp_path / "x.png")
    assert done.exit_code == 0, done.output
    (figure,) = seen
    assert figure.get_supxlabel().startswith("not drawn: ") == (command not in FEW)
    if command != "plot-data":  # whose only panel needs no title
        assert_readable(figure)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"plot-breakdown"}))
def test_every_command_that_draws_can_be_told_what(command: str, tmp_path: Path) -> None:
    done = drawn_by(command, tmp_path / "x.png", "--only", "nobody")
    assert done.exit_code == 1
    assert "only ('nobody'): must be one of the names in the file" in done.output


def test_a_plot_without_rows_of_pytorch_leaves_it_out(tmp_path: Path) -> None:
    kept = results.load(KEPT / "topk_sweep.json", topk.BENCHMARK)
    without = {**kept, "rows": [row for row in kept["rows"] if row["contestant"] != "torch"]}
    results.save(tmp_path / "topk.json", without)
    arguments = [str(tmp_path / "topk.json"), "--only", "exact,torch", "--output", str(tmp_path / "x.png")]
    done = CliRunner().invoke(app, ["plot-topk", *arguments])
    assert done.exit_code == 0, done.output


def test_several_files_become_one_plot_and_one_that_is_no_result_none(tmp_path: Path, seen: list[Any]) -> None:
    def drawn(*names: str) -> Any:
        files = [str(tmp_path / f"{name}.json") for name in names]
        return CliRunner().invoke(app, ["plot-allreduce", *files, "--output", str(tmp_path / "x.png")])

    for name, hosts in (("a", (2, 2)), ("b", (4, 4))):
        results.save(tmp_path / f"{name}.json", results.result_of({}, allreduces(1_000_000, hosts=hosts)))
    done = drawn("a", "b")
    assert done.exit_code == 0, done.output
    assert ticks_of(seen[0].axes[0]) == ["2 + 2", "4 + 4"]
    (tmp_path / "a.json").write_text("{}")
    refused = drawn("a")
    assert refused.exit_code == 1
    assert "must be a result" in refused.output


def test_every_contestant_has_a_colour_and_no_two_of_a_plot_have_the_same() -> None:
    assert_colours_differ(
        {
            "top-k": list(topk.COLOURS.values()),
            "modes": list(stragglers.COLOURS.values()),
            "data": list(data.COLOURS.values()),
            "sparse sums": list(hitopk.COLOURS),
            "convergence": ["#000000", *convergence.COLOURS],
        }
    )
    assert set(stragglers.COLOURS) == {*MODES, "horovod"} - {"full"}


@pytest.mark.parametrize(
    ("draw", "rows"),
    [
        (topk.draw, topk_rows(input="nan")),
        (schedule.draw, []),
        (stragglers.draw, [{"mode": "full"}]),
        (data.draw, [{"part": "hits", "quantity": CPU, "place": "x", "contestant": "cache", "median": 1}]),
        (lambda rows, path: hitopk.draw(rows, path, "steps"), []),
        (lambda rows, path: convergence.draw({"rows": rows}, path), []),
    ],
)
def test_a_plot_of_nothing_is_refused(draw: Callable[..., None], rows: list[Any], tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="nothing to draw"):
        draw(rows, tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


def test_selections_have_bars_beside_the_pass_or_lines_over_the_length(tmp_path: Path, seen: list[Any]) -> None:
    rows = [*topk_rows(), *topk_rows(input="laplace"), *topk_rows(input="nan")]
    topk.draw(rows, tmp_path / "x.png")
    (axis,) = seen[0].axes
    assert bars_of(axis)["hvd_ext.mstopk"] == pytest.approx([1.1, 1.1])
    assert "hvd_ext.topk_error_feedback" not in bars_of(axis)  # it stands beside another yardstick
    sizes = [one for elements in (1, 2, 3) for one in topk_rows(elements=elements)]
    topk.draw(sizes, tmp_path / "x.png")
    assert len(seen[1].axes) == 3
    topk.draw(sizes, tmp_path / "x.png", "sizes")
    (axis,) = seen[2].axes
    assert lines_of(axis)["hvd_ext.mstopk"] == pytest.approx([0.275] * 3)
    assert lines_of(axis)["one prefetched read pass"] == [0.25] * 3
    for draw in (topk.draw, hitopk.draw):
        with pytest.raises(InvalidError, match=r"kind \('pie'\): must be one of"):
            draw(sizes, tmp_path / "x.png", "pie")


def test_bars_of_data_are_over_a_copy_of_the_same_bytes(tmp_path: Path, seen: list[Any]) -> None:
    times: dict[str, dict[str, float]] = {
        "27.6 kB": {"memcpy": 4, "datacache": 6, "decode": 1000},
        "3.1 kB": {"memcpy": 0.5, "datacache": 3},
    }
    rows = [
        {"part": "hits", "quantity": CPU, "place": place, "contestant": name, "median": 1e-6 * micros}
        for place, contestants in times.items()
        for name, micros in contestants.items()
    ]
    data.draw(rows, tmp_path / "x.png")
    (axis,) = seen[0].axes
    assert ticks_of(axis) == ["27.6 kB", "3.1 kB"]
    assert bars_of(axis)["DataCache"] == pytest.approx([1.5, 6])
    assert bars_of(axis)["decode from disk"] == pytest.approx([250])
