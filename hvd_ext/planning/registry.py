"""The schedules by name: every module of hvd_ext/planning/schedules is one, and needs no other mention."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, cast

from hvd_ext.errors import PlanError
from hvd_ext.planning import schedules
from hvd_ext.planning.model import LogicalPlan
from hvd_ext.topology.tree import Tree


@dataclass(frozen=True, slots=True)
class Card:
    """What people read about a schedule; the tables of the README and of the commands are made from it.

    Args:
        name: the schedule's, equal to its module's.
        idea: one sentence.
        drawing: an example, drawn.
        rounds: closed form.
        bytes: closed form, where n is the size of the buffer.
        limits: where it does not apply, or is slow.
        source: paper, section, equations.
    """

    name: str
    idea: str
    drawing: str
    rounds: str
    bytes: str
    limits: str
    source: str


class Schedule(Protocol):
    """What a module in hvd_ext/planning/schedules offers."""

    @property
    def card(self) -> Card:
        """What people read about it."""

    @staticmethod
    def supports(tree: Tree, /) -> str | None:
        """Says whether it can run on a cluster.

        Args:
            tree: the cluster.

        Returns:
            None if it can, else the reason in words.
        """

    @staticmethod
    def cost(tree: Tree, nbytes: int, /) -> float:
        """The closed form of its source.

        Args:
            tree: the cluster.
            nbytes: of the buffer.

        Returns:
            Seconds.
        """

    @staticmethod
    def build(tree: Tree, /) -> LogicalPlan:
        """The plan of an allreduce.

        Args:
            tree: a cluster that it supports.

        Returns:
            The plan of all ranks.
        """


@lru_cache(maxsize=1)
def _found() -> dict[str, Schedule]:
    found: dict[str, Schedule] = {}
    for info in sorted(pkgutil.iter_modules(schedules.__path__), key=lambda info: info.name):
        module = cast(Schedule, importlib.import_module(f"{schedules.__name__}.{info.name}"))
        if module.card.name != info.name:
            raise PlanError(f"schedule {info.name!r}: its card has the name of its module, got {module.card.name!r}")
        found[info.name] = module
    return found


def names() -> tuple[str, ...]:
    """The names of all schedules.

    Returns:
        Sorted.
    """
    return tuple(_found())


def get(name: str) -> Schedule:
    """The schedule of a name.

    Args:
        name: one of names().

    Returns:
        The module that implements it.

    Raises:
        PlanError: there is none; the text lists the names and the nearest one.
    """
    try:
        return _found()[name]
    except KeyError:
        near = difflib.get_close_matches(name, names(), n=1)
        guess = f"; did you mean {near[0]!r}?" if near else ""
        raise PlanError(f"algorithm {name!r}: it is 'auto' or one of {', '.join(names())}{guess}") from None
