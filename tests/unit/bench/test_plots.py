"""The plots of results: files that are written, and what is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hvd_ext.bench
from hvd_ext.bench import plots, results
from hvd_ext.commands import figures
from hvd_ext.errors import InvalidError
from hvd_ext.planning import registry
from tests.unit.drawing import assert_colours_differ, assert_readable

from .test_results import row

pytest.importorskip("matplotlib", reason="needs matplotlib: python -m pip install matplotlib")
PNG = b"\x89PNG\r\n"


def rows_of(*sizes: int, hosts: tuple[int, ...] = (2, 2)) -> list[dict[str, Any]]:
    more = {"ranks_per_host": list(hosts), "ranks": sum(hosts), "hosts": len(hosts)}
    found = []
    for nbytes in sizes:
        bound = nbytes / 12.5e6
        times = {("flexreduce", "graph"): 1.1, ("flexreduce", "engine"): 1.05, ("ring", "graph"): 1.6}
        times.update({("mpi", "engine"): 1.3, ("horovod", "graph"): 1.5, ("noop", "graph"): 0.001})
        for (algorithm, how), share in times.items():
            bounds = None if algorithm == "noop" else bound * (1.5 if algorithm == "ring" else 1)
            found.append(row(algorithm, how, share * bound, bytes=nbytes, bound_seconds=bounds, **more))
    return found


def test_several_sizes_become_lines_with_the_bound_dashed(tmp_path: Path, seen: list[Any]) -> None:
    plots.draw_allreduce(rows_of(1000, 1_000_000) + rows_of(1000, 1_000_000, hosts=(3, 2)), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(PNG)
    axes = seen[0].axes
    assert [axis.get_title() for axis in axes] == ["2 + 2 ranks", "3 + 2 ranks"]
    lines = {line.get_label(): line for line in axes[0].get_lines()}
    assert list(lines) == ["flexreduce", "ring", "MPI_Allreduce", "Horovod", "bound"]
    assert lines["bound"].get_linestyle() == "--"
    assert lines["bound"].get_ydata() == pytest.approx([1000 / 12.5e6, 1_000_000 / 12.5e6])
    assert (axes[0].get_xscale(), axes[0].get_yscale()) == ("log", "log")


def test_one_size_becomes_bars_over_the_bound_by_cluster(tmp_path: Path, seen: list[Any]) -> None:
    plots.draw_allreduce(rows_of(1_000_000) + rows_of(1_000_000, hosts=(3, 2)), tmp_path / "x.png")
    (axis,) = seen[0].axes
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["2 + 2", "3 + 2"]
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in axis.containers}
    # all over the bound of any allreduce, also the ring
    assert heights["flexreduce"] == pytest.approx([1.1, 1.1])
    assert heights["ring"] == pytest.approx([1.6, 1.6])
    assert heights["Horovod"] == pytest.approx([1.5, 1.5])


def test_of_rows_that_were_measured_again_the_later_counts(tmp_path: Path, seen: list[Any]) -> None:
    again = [{**one, "run": 1, "seconds_median": 2 * one["seconds_median"]} for one in rows_of(4000)]
    plots.draw_allreduce(rows_of(4000) + again, tmp_path / "x.png")
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in seen[0].axes[0].containers}
    assert heights["flexreduce"] == pytest.approx([2.2])


def test_a_panel_of_bars_shows_the_clusters_that_have_its_size(tmp_path: Path, seen: list[Any]) -> None:
    plots.draw_allreduce(rows_of(1000, 4000) + rows_of(4000, hosts=(3, 2)), tmp_path / "x.png", kind="clusters")
    shown = [[tick.get_text() for tick in axis.get_xticklabels()] for axis in seen[0].axes]
    assert shown == [["2 + 2"], ["2 + 2", "3 + 2"]]


def test_the_way_of_calling_can_be_chosen(tmp_path: Path, seen: list[Any]) -> None:
    plots.draw_allreduce(rows_of(1_000_000), tmp_path / "x.png", how="engine")
    heights = {bars.get_label(): bars[0].get_height() for bars in seen[0].axes[0].containers}
    assert heights["flexreduce"] == pytest.approx(1.05)
    assert "ring" not in heights


@pytest.mark.parametrize("yardstick", results.YARDSTICKS)
def test_a_yardstick_is_drawn_where_it_is_named(yardstick: str, tmp_path: Path, seen: list[Any]) -> None:
    rows = rows_of(1000, 4000)
    rows += [row(yardstick, "engine", nbytes / 1e6, bytes=nbytes, ranks_per_host=[2, 2]) for nbytes in (1000, 4000)]
    plots.draw_allreduce(rows, tmp_path / "x.png", how="graph", only=["flexreduce", yardstick])
    lines = {line.get_label(): line for line in seen[0].axes[0].get_lines()}
    assert set(lines) == {"flexreduce", yardstick, "bound"}
    assert lines[yardstick].get_ydata() == pytest.approx([1e-3, 4e-3])


def test_no_more_panels_are_left_than_there_are_clusters(tmp_path: Path, seen: list[Any]) -> None:
    rows = [one for hosts in ((2, 2), (3, 2), (3, 3), (4, 3)) for one in rows_of(1000, 4000, hosts=hosts)]
    plots.draw_allreduce(rows, tmp_path / "x.png")
    assert len(seen[0].axes) == 4


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        ([], {}, "nothing to draw"),
        ([row("ring", "graph", 1.0)], {}, "bound_seconds"),
        (rows_of(4), {"kind": "pie"}, "kind.*sizes, clusters"),
        (rows_of(4), {"how": "lazy"}, "how.*graph"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path: Path, rows: Any, options: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        plots.draw_allreduce(rows, tmp_path / "x.png", **options)
    assert not (tmp_path / "x.png").exists()


def test_the_command_draws_several_files(tmp_path: Path, seen: list[Any]) -> None:
    for name, hosts in (("a", (2, 2)), ("b", (4, 4))):
        results.save(tmp_path / f"{name}.json", results.result_of({}, rows_of(1_000_000, hosts=hosts)))
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    done = CliRunner().invoke(hvd_ext.bench.app, ["plot", *files, "--output", str(tmp_path / "x.png")])
    assert done.exit_code == 0, done.output
    assert [tick.get_text() for tick in seen[0].axes[0].get_xticklabels()] == ["2 + 2", "4 + 4"]


def test_the_command_refuses_a_file_that_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({}))
    arguments = ["plot", str(tmp_path / "a.json"), "--output", str(tmp_path / "x.png")]
    done = CliRunner().invoke(hvd_ext.bench.app, arguments)
    assert done.exit_code == 1
    assert "must be a result" in done.output


def test_clusters_that_were_measured_in_different_ways_are_drawn_side_by_side() -> None:
    one = [
        {**row("ring", "engine", 1.0), "ranks_per_host": [2, 2]},
        {**row("mpi", "engine", 2.0), "ranks_per_host": [2, 2]},
    ]
    two = [{**row("ring", how, 1.0), "ranks_per_host": [3, 2]} for how in ("engine", "graph")]
    chosen = plots._of_one_kind([*one, *two], "auto")
    assert [(found["ranks_per_host"], found["algorithm"], found["how"]) for found in chosen] == [
        ([2, 2], "ring", "engine"),
        ([2, 2], "mpi", "engine"),
        ([3, 2], "ring", "graph"),
    ]


def test_a_plot_has_at_most_six_lines_and_names_what_it_leaves_out(tmp_path: Path, seen: list[Any]) -> None:
    hows = {name: "engine" if name == "mpi" else "graph" for name in plots.STYLES}
    many = [row(name, hows[name], 1.0, bytes=size, bound_seconds=0.5) for name in hows for size in (1, 2)]
    plots.draw_allreduce(many, tmp_path / "x.png")
    labels = [line.get_label() for line in seen[0].axes[0].get_lines()]
    assert labels == ["flexreduce", "blueconnect", "ring", "auto", "MPI_Allreduce", "bound"]
    assert seen[0].get_supxlabel().startswith("not drawn: Horovod, torus2d, two_level")
    plots.draw_allreduce(many, tmp_path / "x.png", only=["tree", "mpi"])
    assert [line.get_label() for line in seen[1].axes[0].get_lines()] == ["MPI_Allreduce", "tree", "bound"]
    assert seen[1].get_supxlabel() == ""  # the user has chosen
    with pytest.raises(InvalidError, match=r"only \(6 names\): a panel shows at most 5"):
        plots.draw_allreduce(many, tmp_path / "x.png", only=list(plots.STYLES)[:6])
    with pytest.raises(
        InvalidError, match=r"only \('rings'\): must be one of the names in the file, which are flexreduce"
    ):
        plots.draw_allreduce(many, tmp_path / "x.png", only=["rings"])


def test_no_two_lines_of_a_plot_have_the_same_colour() -> None:
    palettes = {
        "allreduce": [colour for colour, _ in plots.STYLES.values()],
        "top-k": list(plots.TOPK_COLOURS.values()),
    }
    assert_colours_differ(palettes)


COMMANDS = {
    "plot": "allreduce_nine",
    "plot-training": "training_horovod",
    "plot-topk": "topk",
}


@pytest.mark.parametrize(("command", "name"), COMMANDS.items())
def test_plots_of_kept_results_have_few_lines_and_titles_that_fit(
    command: str, name: str, tmp_path: Path, seen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "DPI", 30)  # quicker
    kept = Path(__file__).parents[3] / "benchmarks" / "results" / f"{name}.json"
    arguments = [command, str(kept), "--output", str(tmp_path / "x.png")]
    done = CliRunner().invoke(hvd_ext.bench.app, arguments)
    assert done.exit_code == 0, done.output
    (drawn,) = seen
    left_out = command != "plot-training"  # that file has few contestants
    assert drawn.get_supxlabel().startswith("not drawn: " if left_out else "")
    assert_readable(drawn)


@pytest.mark.parametrize(("command", "name"), COMMANDS.items())
def test_every_command_that_draws_can_be_told_what(command: str, name: str, tmp_path: Path) -> None:
    kept = Path(__file__).parents[3] / "benchmarks" / "results" / f"{name}.json"
    done = CliRunner().invoke(
        hvd_ext.bench.app, [command, str(kept), "--output", str(tmp_path / "x.png"), "--only", "nobody"]
    )
    assert done.exit_code == 1
    assert "only ('nobody'): must be one of the names in the file" in done.output


def test_every_algorithm_has_a_colour() -> None:
    assert set(registry.names()) <= set(plots.STYLES)
