"""The plots of results: what is in them, and what cannot be drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvd_ext.bench import breakdown, plots
from hvd_ext.commands import figures
from hvd_ext.errors import InvalidError
from hvd_ext.planning import registry
from tests.unit.bench.rows import row, training_row, training_rows
from tests.unit.drawing import assert_colours_differ

pytest.importorskip("matplotlib", reason="needs matplotlib: python -m pip install matplotlib")


def test_every_algorithm_has_a_colour_and_no_two_have_the_same() -> None:
    assert_colours_differ(
        {
            "allreduce": [colour for colour, _ in plots.STYLES.values()],
            "bucketers": [colour for colour, _ in figures.BUCKETERS.values()],
        }
    )
    assert set(registry.names()) <= set(plots.STYLES)


@pytest.mark.parametrize(
    ("draw", "rows"),
    [(plots.draw_allreduce, []), (plots.draw_training, [training_row("compute")]), (breakdown.draw, [])],
)
def test_a_plot_of_nothing_is_refused(draw: Callable[..., None], rows: list[Any], tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="nothing to draw"):
        draw(rows, tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


def allreduces(*sizes: int, hosts: tuple[int, ...] = (2, 2)) -> list[dict[str, Any]]:
    """Make rows whose times are these shares of the bound of any allreduce; that of the ring is higher."""
    more = {"ranks_per_host": list(hosts), "ranks": sum(hosts), "hosts": len(hosts)}
    rows = []
    for nbytes in sizes:
        bound = nbytes / 12.5e6
        times = {("flexreduce", "graph"): 1.1, ("flexreduce", "engine"): 1.05, ("ring", "graph"): 1.6}
        times.update({("mpi", "engine"): 1.3, ("horovod", "graph"): 1.5, ("noop", "graph"): 0.001})
        for (algorithm, how), share in times.items():
            bounds = None if algorithm == "noop" else bound * (1.5 if algorithm == "ring" else 1)
            rows.append(row(algorithm, how, share * bound, bytes=nbytes, bound_seconds=bounds, **more))
    return rows


def lines_of(axis: Any) -> dict[str, list[float]]:
    return {line.get_label(): list(line.get_ydata()) for line in axis.get_lines()}


def bars_of(axis: Any) -> dict[str, list[float]]:
    return {bars.get_label(): [bar.get_height() for bar in bars] for bars in axis.containers}


def ticks_of(axis: Any) -> list[str]:
    return [tick.get_text() for tick in axis.get_xticklabels()]


def test_several_sizes_become_lines_with_the_bound_a_panel_for_each_cluster(tmp_path: Path, seen: list[Any]) -> None:
    rows = [one for hosts in ((2, 2), (3, 2), (3, 3), (4, 3)) for one in allreduces(1000, 4000, hosts=hosts)]
    yardsticks = [row("tcp", "engine", nbytes / 1e6, bytes=nbytes, ranks_per_host=[2, 2]) for nbytes in (1000, 4000)]
    plots.draw_allreduce(rows + yardsticks, tmp_path / "x.png")
    axes = seen[0].axes
    assert [axis.get_title() for axis in axes] == [f"{hosts} ranks" for hosts in ("2 + 2", "3 + 2", "3 + 3", "4 + 3")]
    assert list(lines_of(axes[0])) == ["flexreduce", "ring", "MPI_Allreduce", "Horovod", "tcp", "bound"]
    assert lines_of(axes[0])["bound"] == pytest.approx([1000 / 12.5e6, 4000 / 12.5e6])
    plots.draw_allreduce(rows + yardsticks, tmp_path / "x.png", how="graph", only=["flexreduce", "tcp"])
    assert set(lines_of(seen[1].axes[0])) == {"flexreduce", "tcp", "bound"}
    assert lines_of(seen[1].axes[0])["tcp"] == pytest.approx([1e-3, 4e-3])


def test_bars_over_the_bound_by_cluster_are_of_one_way_to_call_and_the_later_row_counts(
    tmp_path: Path, seen: list[Any]
) -> None:
    rows = allreduces(4000) + allreduces(4000, hosts=(3, 2))
    path = tmp_path / "x.png"
    plots.draw_allreduce(rows, path)
    (axis,) = seen[0].axes
    assert ticks_of(axis) == ["2 + 2", "3 + 2"]
    for name, height in {"flexreduce": 1.1, "ring": 1.6, "Horovod": 1.5}.items():  # the ring's too, over any bound
        assert bars_of(axis)[name] == pytest.approx([height, height])
    again = [{**one, "run": 1, "seconds_median": 2 * one["seconds_median"]} for one in rows]
    plots.draw_allreduce(rows + again, path, how="engine")
    assert bars_of(seen[1].axes[0])["flexreduce"] == pytest.approx([2.1, 2.1])
    assert "ring" not in bars_of(seen[1].axes[0])
    plots.draw_allreduce(rows + allreduces(1000), path, kind="clusters")
    assert [ticks_of(axis) for axis in seen[2].axes] == [["2 + 2"], ["2 + 2", "3 + 2"]]
    # clusters that were measured in different ways stand side by side
    engines = [{**one, "how": "engine"} for one in allreduces(4000, hosts=(4, 4)) if one["how"] == "graph"]
    plots.draw_allreduce(rows + engines, path)
    assert bars_of(seen[3].axes[0])["flexreduce"] == pytest.approx([1.1, 1.1, 1.1])


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        ([row("ring", "graph", 1.0)], {}, "bound_seconds"),
        (allreduces(4), {"kind": "pie"}, "kind.*sizes, clusters"),
        (allreduces(4), {"how": "lazy"}, "how.*graph"),
        (allreduces(4), {"only": ["rings"]}, r"only \('rings'\): must be one of the names in the file.*flexreduce"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path: Path, rows: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        plots.draw_allreduce(rows, tmp_path / "x.png", **options)
    assert not (tmp_path / "x.png").exists()


def test_a_plot_has_at_most_six_lines_and_names_what_it_leaves_out(tmp_path: Path, seen: list[Any]) -> None:
    hows = {name: "engine" if name == "mpi" else "graph" for name in plots.STYLES}
    many = [row(name, hows[name], 1.0, bytes=size, bound_seconds=0.5) for name in hows for size in (1, 2)]
    plots.draw_allreduce(many, tmp_path / "x.png")
    assert list(lines_of(seen[0].axes[0])) == ["flexreduce", "blueconnect", "ring", "auto", "MPI_Allreduce", "bound"]
    assert seen[0].get_supxlabel().startswith("not drawn: Horovod, torus2d, two_level")
    plots.draw_allreduce(many, tmp_path / "x.png", only=["tree", "mpi"])
    assert list(lines_of(seen[1].axes[0])) == ["MPI_Allreduce", "tree", "bound"]
    assert seen[1].get_supxlabel() == ""  # the user has chosen
    with pytest.raises(InvalidError, match=r"only \(6 names\): a panel shows at most 5"):
        plots.draw_allreduce(many, tmp_path / "x.png", only=list(plots.STYLES)[:6])


def test_bars_of_training_are_the_time_of_an_epoch_by_cluster_and_the_later_row_counts(
    tmp_path: Path, seen: list[Any]
) -> None:
    rows = [*training_rows(3, 2), *training_rows(2, 2), *training_rows(2, 2, 2), training_row("auto", 0.5)]
    plots.draw_training(rows, tmp_path / "x.png")
    (axis,) = seen[0].axes
    assert ticks_of(axis) == ["2 + 2", "3 + 2", "2 + 2 + 2"]
    _, labels = axis.get_legend_handles_labels()
    assert labels == ["ring", "auto", "Horovod", "Horovod, 2 TCP links", "computation of it"]
    of_auto = [1797 / (4 * 64) * 0.5, 1797 / (5 * 64), 1797 / (6 * 64)]
    assert sorted(bars_of(axis)["auto"]) == pytest.approx(sorted(of_auto))
    assert max(bars_of(axis)["computation of it"]) == pytest.approx(1797 / (4 * 64) * 0.25)
