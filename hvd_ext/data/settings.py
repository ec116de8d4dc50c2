"""What `shard`, `DataCache` and `cached` check of their arguments alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from hvd_ext.errors import InvalidError

Remainder = Literal["drop", "repeat", "uneven"]


def check_whole(subject: str, value: object, least: int, optional: bool = False) -> None:
    """Check that an argument is a whole number.

    Raises:
        InvalidError: it is something else, or less than the least.
    """
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        words = ", or None" if optional else ""
        raise InvalidError(f"{subject} ({value!r}): must be a whole number from {least}{words}")


def check_division(subject: str, settings: Mapping[str, Any]) -> None:
    """Check "remainder" and "steps" of the settings by which ranks divide data.

    Raises:
        InvalidError: one breaks its rule.
    """
    remainder, steps = settings["remainder"], settings["steps"]
    check_whole(f"{subject}steps", steps, 1, optional=True)
    if remainder not in get_args(Remainder):
        raise InvalidError(f"{subject}remainder ({remainder!r}): must be one of {', '.join(get_args(Remainder))}")
    if remainder == "uneven" and steps is not None:
        raise InvalidError(
            f"{subject}steps ({steps}): cannot be given with remainder='uneven', where every element is seen once"
        )


def check_enough(subject: str, elements: int, size: int, remainder: str) -> None:
    """Check that each rank gets an element, unless remainder="uneven".

    Raises:
        InvalidError: there are fewer elements than ranks.
    """
    if elements < size and remainder != "uneven":
        raise InvalidError(f"{subject} cannot be divided among {size} ranks; each needs at least one")
