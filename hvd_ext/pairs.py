"""Which features may be used together: every pair works, and a test shows it, or it is refused in words."""

from __future__ import annotations

REFUSED: dict[frozenset[str], str] = {
    frozenset({"local variables", "global_clipnorm"}): (
        "global_clipnorm: local variables count in the norm, so that each rank would scale the reduced gradients "
        "differently and the ranks would part; use clipnorm or clipvalue, which look at one variable at a time"
    ),
    frozenset({"predivide", "op=Sum"}): (
        "gradient_predivide_factor: it splits the division of an average, and with op=Sum nothing is divided; leave "
        "one of them out"
    ),
}


def words(first: str, second: str) -> str:
    """Give the words that refuse a pair.

    Args:
        first: a feature.
        second: another.

    Returns:
        The error's message.
    """
    return REFUSED[frozenset({first, second})]
