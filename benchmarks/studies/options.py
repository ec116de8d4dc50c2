"""Options of several studies, and what is read from them."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import typer

from hvd_ext.bench import results

Output = Annotated[Path, typer.Option(metavar="FILE", help="The PNG file.")]
Only = Annotated[
    str, typer.Option(metavar="NAMES", help="What is drawn, with commas; six lines at most, a bound is one of them.")
]


def part(option: str, text: str) -> float:
    """Read the value of an option: a number, or a fraction as 1/16."""
    try:
        return float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        raise typer.BadParameter(f"{text!r}: must be a number or a fraction, as 1/16", param_hint=option) from None


def rows_of(paths: Iterable[Path], benchmark: str) -> list[dict[str, Any]]:
    """Read the rows of several files, one after the other; see `results.load`."""
    return [row for path in paths for row in results.load(path, benchmark)["rows"]]
