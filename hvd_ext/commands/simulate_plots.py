"""The plots of `simulate`: where a step's time goes, speed-up over ranks, and one step with its buckets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_ext.commands.app import writing
from hvd_ext.commands.figures import BUCKETERS, finish, panels
from hvd_ext.planning.scaling import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OTHER = ("#555555", "p")
_FORWARD, _BACKWARD = "#DDDDDD", "#999999"
FILES = ("bars.png", "speedup.png", "step.png")


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw the three plots.

    Args:
        folder: where the files of FILES are written; it is made.

    Raises:
        InvalidError: matplotlib is not installed, or a file cannot be written.
    """
    paths = [folder / name for name in FILES]
    with writing(f"--plots {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        for drawn, path in zip((bars, speedup, step), paths, strict=True):
            drawn(rows, path)
    return paths


def bars(rows: Sequence[Row], path: Path) -> None:
    """Draw computation and exposed communication, stacked, for each number of ranks (MG-WFBP's Fig. 8)."""
    algorithms, names = _names(rows)
    ranks = sorted({row.ranks for row in rows})
    figure, axes = panels(len(algorithms), 2, 5.0, 3.6, 1.6)
    width = 0.85 / len(names)
    for axis, algorithm in zip(axes, algorithms, strict=True):
        for number, name in enumerate(names):
            mine = {row.ranks: row for row in rows if (row.algorithm, row.bucketer) == (algorithm, name)}
            x = [ranks.index(at) + (number + 0.5) * width - 0.425 for at in mine]
            computed = [row.iteration_s - row.exposed_s for row in mine.values()]
            look: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.8}
            axis.bar(x, computed, width, color=_FORWARD, label="computation", **look)
            exposed = [row.exposed_s for row in mine.values()]
            axis.bar(x, exposed, width, bottom=computed, color=_style(name)[0], label=f"{name}, exposed", **look)
        axis.set_xticks(range(len(ranks)), [str(count) for count in ranks])
        _labelled(axis, algorithm, "ranks", "seconds of a step")
    finish(figure, [], path)


def speedup(rows: Sequence[Row], path: Path) -> None:
    """Draw the speed-up over the ranks (MG-WFBP's Fig. 9)."""
    algorithms, names = _names(rows)
    figure, axes = panels(len(algorithms), 2, 5.0, 3.6, 1.6)
    for axis, algorithm in zip(axes, algorithms, strict=True):
        ranks = sorted({row.ranks for row in rows})
        axis.plot(ranks, ranks, "k--", linewidth=1.2, label="linear")
        for name in names:
            mine = [row for row in rows if (row.algorithm, row.bucketer) == (algorithm, name)]
            points = sorted((row.ranks, row.speedup) for row in mine)
            colour, mark = _style(name)
            axis.plot(*zip(*points, strict=True), color=colour, marker=mark, markersize=5, label=name)
        axis.set(xscale="log", yscale="log", ylim=(0.8 * min(row.speedup for row in rows), 1.2 * ranks[-1]))
        axis.set_xticks(ranks, [str(count) for count in ranks])
        axis.set_yticks(ranks, [str(count) for count in ranks])
        axis.minorticks_off()
        _labelled(axis, algorithm, "ranks", "speed-up")
    finish(figure, [], path)


def step(rows: Sequence[Row], path: Path) -> None:
    """Draw one step on the most ranks with the first algorithm: computation and buckets (MG-WFBP's Fig. 2 and 4)."""
    most = max(row.ranks for row in rows)
    shown = [row for row in rows if row.ranks == most and row.algorithm == rows[0].algorithm]
    figure, axes = panels(len(shown), 1, 7.5, 1.4, 1.8)
    end = max(row.iteration_s for row in shown)
    for axis, row in zip(axes, shown, strict=True):
        forward, computed = row.times.forward_s, row.times.computed_s
        axis.barh(1, forward, color=_FORWARD, label="forward pass")
        axis.barh(1, computed - forward, left=forward, color=_BACKWARD, label="backward pass")
        colour = _style(row.bucketer)[0]
        for begin, done in zip(row.predicted.begins_s, row.predicted.ends_s, strict=True):
            # a white edge would hide the shortest
            edge = "white" if done - begin > 0.01 * end else colour
            axis.barh(0, done - begin, left=begin, color=colour, edgecolor=edge, linewidth=0.5)
        axis.plot(row.predicted.ready_s, [0.5] * row.buckets, "k|", markersize=6, label="a bucket is ready")
        axis.set_yticks([0, 1], ["communication", "computation"])
        axis.set_xlim(0, end * 1.02)
        axis.set_title(f"{row.bucketer}, {_count(row.buckets)}, {row.ranks} ranks: {row.iteration_s * 1e3:.4g} ms")
    axes[-1].set_xlabel("seconds since the step began")
    finish(figure, [], path)


def _names(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """The algorithms and the bucketers of the rows, in their order."""
    return list(dict.fromkeys(row.algorithm for row in rows)), list(dict.fromkeys(row.bucketer for row in rows))


def _count(buckets: int) -> str:
    return "1 bucket" if buckets == 1 else f"{buckets} buckets"


def _style(name: str) -> tuple[str, str]:
    return BUCKETERS.get(name, _OTHER)


def _labelled(axis: Axes, title: str, xlabel: str, ylabel: str) -> None:
    axis.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axis.grid(True, linewidth=0.4, alpha=0.5)
    axis.set_axisbelow(True)
