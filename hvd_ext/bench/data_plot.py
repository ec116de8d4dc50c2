"""The plot of the data benchmark, as a PNG file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_ext.bench.data import NAMES
from hvd_ext.bench.data_goals import OURS
from hvd_ext.bench.data_table import hits_ratios
from hvd_ext.bench.plots import LINES, finish, panels, selected
from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# From the palette of Okabe and Ito, in the order in which most readers want to compare them.
COLOURS = {
    OURS: "#D55E00",
    "cache": "#0072B2",
    "cache-file": "#56B4E9",
    "snapshot": "#CC79A7",
    "memmap": "#E69F00",
    "grain": "#009E73",
    "streaming": "#555555",
    "decode": "#999999",
}
BARS = LINES - 1  # the yardstick is in the legend too


def draw_data(rows: Sequence[Mapping[str, Any]], path: Path, only: Sequence[str] = ()) -> None:
    """Draw the processor time of hits beside a copy of the same bytes, by the size of a sample.

    Args:
        rows: of one result of bench data or of several; of rows measured again, the last counts.
        path: of the file.
        only: at most five contestants; empty: the first five of `COLOURS`.

    Raises:
        InvalidError: nothing to draw, an unknown contestant, too many of them, or no matplotlib.
    """
    bars = {key: value for key, value in hits_ratios(rows).items() if key[1] in COLOURS}
    if not bars:
        raise InvalidError("plot (no rows): there is nothing to draw; name results of bench data with hits and memcpy")
    present = [name for name in COLOURS if any(key[1] == name for key in bars)]
    names = selected(present, only, BARS)
    places = list(dict.fromkeys(place for place, _ in bars))
    figure, axes = panels(1, 1, max(6.0, 1.0 + 2.0 * len(places)), 3.8, 1.8)
    _bars(axes[0], bars, places, names)
    finish(figure, [] if only else [NAMES[name] for name in present if name not in names], path)


def _bars(axis: Axes, bars: Mapping[tuple[str, str], float], places: Sequence[str], names: Sequence[str]) -> None:
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        mine = [(at, bars[place, name]) for at, place in enumerate(places) if (place, name) in bars]
        x = [at + (number + 0.5) * width - 0.4 for at, _ in mine]
        axis.bar(x, [value for _, value in mine], width, color=COLOURS[name], label=NAMES[name])
    axis.axhline(1.0, color="black", linestyle="--", linewidth=1.2, label=NAMES["memcpy"])
    axis.set(yscale="log", ylabel="CPU time over memcpy", xlabel="bytes of a sample")
    axis.set_xticks(range(len(places)), places)
