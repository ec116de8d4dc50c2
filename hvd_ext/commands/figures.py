"""The look of the plots, as PNG files; matplotlib is needed for them alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
# The colour and the mark of each bucketer, from the palette of Okabe and Ito.
BUCKETERS = {
    "wfbp": ("#E69F00", "v"),
    "single": ("#CC79A7", "D"),
    "by_size": ("#56B4E9", "s"),
    "mgwfbp": ("#0072B2", "^"),
    "optimal": ("#D55E00", "o"),
    "auto": ("#009E73", "*"),
}


def check() -> None:
    """Check for matplotlib, before a command works for what it could not draw.

    Raises:
        InvalidError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidError("plot (matplotlib): it is not installed; python -m pip install matplotlib")


def panels(count: int, columns: int, width: float, height: float, margin: float) -> tuple[Figure, list[Axes]]:
    """Make a figure with at most `columns` panels beside each other; sizes are in inches, the margin is for the legend.

    Raises:
        InvalidError: matplotlib is not installed.
    """
    check()
    from matplotlib.figure import Figure

    columns = min(count, columns)
    lines = -(-count // columns)
    # without pyplot, which would look for a display and keep the figure open
    figure = Figure(figsize=(width * columns + margin, height * lines), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axis in axes[count:]:
        axis.remove()
    return figure, axes[:count]


def finish(figure: Figure, left_out: Sequence[str], path: Path) -> None:
    """Give a figure its legend, name what is not drawn although the user has not left it out, and write the file."""
    named = {
        text: handle for axis in figure.axes for handle, text in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    if named:
        figure.legend(named.values(), named.keys(), loc="outside right center", frameon=False)
    if left_out:
        figure.supxlabel(f"not drawn: {', '.join(left_out)}", fontsize="small", wrap=True)
    figure.savefig(path, dpi=DPI, format="png")
