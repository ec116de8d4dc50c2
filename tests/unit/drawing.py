"""What a terminal shows, and what every plot must keep to: colours that differ, few lines, titles that fit."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from hvd_ext.bench import plots


def printed(*things: Any, width: int = 250) -> str:
    """Give what a terminal of this width shows."""
    console = Console(file=io.StringIO(), width=width)
    console.print(*things)
    return console.file.getvalue()  # type: ignore[attr-defined]


def assert_colours_differ(palettes: Mapping[str, Sequence[str]]) -> None:
    """Each palette has as many colours as a panel may have lines, and no colour twice."""
    assert {name: len(set(colours)) for name, colours in palettes.items()} == {
        name: len(colours) for name, colours in palettes.items()
    }
    assert min(len(colours) for colours in palettes.values()) >= plots.LINES


def assert_readable(drawn: Any) -> None:
    """A figure has one legend of few lines, and titles inside of it that do not overlap."""
    (legend,) = drawn.legends
    assert 2 <= len(legend.get_texts()) <= plots.LINES
    drawn.draw_without_rendering()  # at the figure's own resolution, in which the boxes below are
    boxes = [axis.title.get_window_extent() for axis in drawn.axes if axis.get_title()]
    assert boxes
    assert all(box.x0 >= 0 and box.x1 <= drawn.bbox.x1 and box.y1 <= drawn.bbox.y1 for box in boxes)
    assert not any(one.overlaps(other) for number, one in enumerate(boxes) for other in boxes[:number])
