"""How the doctor's messages name ranks, and say which of them differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Answers = Sequence[Mapping[str, Any]]


def ranks(numbers: Iterable[int]) -> str:
    """Name ranks in words: "rank 3", or "ranks 0-2, 5"."""
    ordered = sorted(numbers)
    parts: list[list[int]] = []
    for number in ordered:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    text = ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
    return f"rank {text}" if len(ordered) == 1 else f"ranks {text}"


def by_value(answers: Answers, value: Callable[[Mapping[str, Any]], Any]) -> dict[Any, list[int]]:
    """Group the ranks by a value of their answers: each value with its ranks."""
    groups: dict[Any, list[int]] = {}
    for number, answer in enumerate(answers):
        groups.setdefault(value(answer), []).append(rank_of(number, answer, answers))
    return groups


def differing(groups: Mapping[Any, Sequence[int]]) -> str:
    """Say in words which ranks have which value."""
    return "; ".join(f"{value or 'nothing'} ({ranks(numbers)})" for value, numbers in groups.items())


def rank_of(number: int, answer: Mapping[str, Any], answers: Answers) -> int:
    """Return the rank that gave an answer; if there is only one answer, it may come from another rank than 0."""
    return number if len(answers) > 1 or answer["rank"] is None else int(answer["rank"])
