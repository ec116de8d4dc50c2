"""What identifies an optimizer or tape, so that the gradients of two different ones are never reduced together.

The ranks meet in the order of their first steps, and this order alone would pair optimizers that have nothing to do
with each other. Names tell them apart, except for the numbers that Keras appends: a process counts the optimizers and
layers that it has made, and a rank may have made more of them than others. Where names differ in nothing but a number,
the order in which optimizers were wrapped decides. A tape has no name; the numbers of its variables must rise and fall
from tape to tape on all ranks alike.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hvd_ext.errors import MismatchError
from hvd_ext.job import consensus

if TYPE_CHECKING:
    from hvd_ext.job.runtime import Runtime

Described = dict[str, Any]

_ORDER = "all ranks must take the first steps of their optimizers and tapes in the same order"


@dataclasses.dataclass(frozen=True)
class Identity:
    """The names of an optimizer or tape.

    Args:
        label: of a tape, or of a wrapped optimizer: the name given to `DistributedOptimizer`, or its class's name.
        name: Keras' name of the optimizer; "" for a tape.
        number: among the optimizers that this process has wrapped under this label, and under this name without Keras'
            number: 0, 1, ...
    """

    label: str
    name: str = ""
    number: int = 0

    def described(self) -> Described:
        """Return what the ranks exchange."""
        alike = _wrapped.get((self.label, consensus.unnumbered(self.name)), [])
        return {**dataclasses.asdict(self), "unique": alike.count(self.name) == 1}


# Keras' names of the optimizers wrapped so far, by label and name without number. Of deleted optimizers too: when an
# optimizer is deleted may differ between ranks.
_wrapped: dict[tuple[str, str], list[str]] = {}

# for each tape so far, the numbers in its variables' names, by rank
_tapes: weakref.WeakKeyDictionary[Runtime, list[tuple[list[str], list[list[int]]]]] = weakref.WeakKeyDictionary()


def of_optimizer(label: str, name: str) -> Identity:
    """Give an optimizer that is being wrapped its identity."""
    alike = _wrapped.setdefault((label, consensus.unnumbered(name)), [])
    alike.append(name)
    return Identity(label, name, len(alike) - 1)


def check_names(values: Sequence[Described], ranks: Sequence[int]) -> None:
    """Raise `MismatchError` if optimizers or tapes, from `Identity.described` by rank, differ in more than a number."""
    first = values[0]
    for rank, value in zip(ranks, values, strict=True):
        if value["label"] != first["label"] or consensus.unnumbered(value["name"]) != consensus.unnumbered(
            first["name"]
        ):
            raise MismatchError(
                f"gradients: all ranks must reduce those of the same optimizer or tape; rank {rank} has "
                f"{_words(value)}, rank {ranks[0]} has {_words(first)}; {_ORDER}"
            )


def check_numbers(job: Runtime, values: Sequence[dict[str, Any]], ranks: Sequence[int]) -> None:
    """Check that the ranks' optimizers or tapes, whose names differ at most in numbers, are not two different ones.

    Args:
        values: what each rank sent: "identity", of `Identity.described`, and "tensors", the gradients as pairs (name,
            dtype and shape as text).

    Raises:
        MismatchError: they may be different ones; the message has both ranks' names.
    """
    identities = [value["identity"] for value in values]
    names = [[name for name, _ in value["tensors"]] for value in values]
    first = identities[0]
    if not first["name"]:
        _check_tape(job, first["label"], names, ranks)
        return
    for rank, value, names_here in zip(ranks, identities, names, strict=True):
        same = value["unique"] and first["unique"] and (value["name"], names_here) == (first["name"], names[0])
        if value["number"] != first["number"] and not same:
            raise MismatchError(
                f"optimizer {first['label']!r}: rank {rank} is at the first step of {_numbered(value)}, rank "
                f"{ranks[0]} at that of {_numbered(first)}, and their names do not tell whether they are the same; "
                f"{_ORDER}; if the order is the same, and a rank has wrapped one that others have not, give each a "
                "name: hvd_ext.DistributedOptimizer(optimizer, name=...)"
            )


def _check_tape(job: Runtime, label: str, names: list[list[str]], ranks: Sequence[int]) -> None:
    unnumbered = [consensus.unnumbered(name) for name in names[0]]
    numbers = [[number for name in names_here for number in consensus.numbers(name)] for names_here in names]
    earlier = _tapes.setdefault(job, [])
    for alike, before in earlier:
        if alike != unnumbered:
            continue
        signs = [(now > then) - (now < then) for now, then in zip(numbers, before, strict=True)]
        for rank, sign, names_here in zip(ranks, signs, names, strict=True):
            if sign != signs[0]:
                raise MismatchError(
                    f"{label}: rank {rank} is at the first step of {names_here[0]!r}, ..., rank {ranks[0]} at that of "
                    f"{names[0][0]!r}, ..., but they have taken first steps of other variables in another order; "
                    f"{_ORDER}"
                )
    earlier.append((unnumbered, numbers))


def _words(value: Described) -> str:
    return f"{value['label']!r}" + (f" (Keras' name: {value['name']!r})" if value["name"] else "")


def _numbered(value: Described) -> str:
    return f"{value['name']!r}, number {value['number'] + 1} of those wrapped"
