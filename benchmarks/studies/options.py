"""The option --scale of several studies."""

from __future__ import annotations

from fractions import Fraction

import typer


def part(option: str, text: str) -> float:
    """Read the value of an option: a number, or a fraction as 1/16."""
    try:
        return float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        raise typer.BadParameter(f"{text!r}: must be a number or a fraction, as 1/16", param_hint=option) from None
