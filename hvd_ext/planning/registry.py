"""The schedules by name: every module of hvd_ext/planning/schedules is one, and needs no other mention."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, cast

from hvd_ext.errors import PlanError
from hvd_ext.planning import schedules
from hvd_ext.planning.model import LogicalPlan
from hvd_ext.topology.tree import Tree


@dataclass(frozen=True, slots=True)
class Card:
    """What people read about a schedule; the tables of docs/algorithms.md and of the commands are made from it.

    Args:
        name: the schedule's, equal to its module's.
        idea: one sentence.
        drawing: an example, drawn.
        rounds: closed form.
        bytes: closed form, where n is the size of the buffer.
        limits: where it does not apply, or is slow.
        source: paper, section, equations.
        sparse: True for a schedule that selects a part of the elements.
    """

    name: str
    idea: str
    drawing: str
    rounds: str
    bytes: str
    limits: str
    source: str
    sparse: bool = False


class _Described(Protocol):
    @property
    def card(self) -> Card:
        """What people read about it."""


class Schedule(_Described, Protocol):
    """What a module in hvd_ext/planning/schedules offers."""

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


class SparseSchedule(_Described, Protocol):
    """What a module in hvd_ext/planning/schedules offers whose card says `sparse`."""

    @staticmethod
    def cost(tree: Tree, nbytes: int, density: float, /) -> float:
        """The closed form of its source, with what is really sent.

        Args:
            tree: the cluster.
            nbytes: of the buffer, float32.
            density: the part of the elements that is selected.

        Returns:
            Seconds.
        """

    @staticmethod
    def build(tree: Tree, /) -> LogicalPlan:
        """The plan of an allreduce of the selected elements.

        Args:
            tree: a cluster that it supports.

        Returns:
            The plan of all ranks; it selects each contribution once.
        """

    @staticmethod
    def dense(tree: Tree, /, height: int = 1) -> LogicalPlan:
        """The plan of a step in which nothing is selected.

        Args:
            tree: a cluster that it supports.
            height: as for variants().

        Returns:
            A dense plan that folds the same ranges of each rank in which variants() select: the residuals live there.
        """

    @staticmethod
    def variants(tree: Tree, /, height: int = 1) -> tuple[LogicalPlan, ...]:
        """The plans among which the price decides.

        Args:
            tree: a cluster that it supports.
            height: levels of branches that add up before anything is selected: 1 for hosts, 2 for racks of hosts. Of
                no account where ranks select by themselves.

        Returns:
            At height 1 the plan of build() first; all select in the same ranges.
        """


@lru_cache(maxsize=1)
def _found() -> dict[str, Schedule | SparseSchedule]:
    found: dict[str, Schedule | SparseSchedule] = {}
    for info in sorted(pkgutil.iter_modules(schedules.__path__), key=lambda info: info.name):
        module = cast("Schedule | SparseSchedule", importlib.import_module(f"{schedules.__name__}.{info.name}"))
        if module.card.name != info.name:
            raise PlanError(f"schedule {info.name!r}: its card has the name of its module, got {module.card.name!r}")
        found[info.name] = module
    return found


def names() -> tuple[str, ...]:
    """The names of all schedules of whole buffers.

    Returns:
        Sorted.
    """
    return tuple(name for name, module in _found().items() if not module.card.sparse)


def sparse_names() -> tuple[str, ...]:
    """The names of all schedules that select a part of the elements.

    Returns:
        Sorted.
    """
    return tuple(name for name, module in _found().items() if module.card.sparse)


def get(name: str) -> Schedule:
    """The schedule of a name.

    Args:
        name: one of names().

    Returns:
        The module that implements it.

    Raises:
        PlanError: there is none; the text lists the names and the nearest one.
    """
    if name in sparse_names():
        raise PlanError(
            f"algorithm {name!r}: it sends selected elements only; give compression=hvd_ext.TopK(...) too, or one of "
            f"{', '.join(names())}"
        )
    return cast(Schedule, _named(name, names(), "'auto' or "))


def sparse(name: str) -> SparseSchedule:
    """The schedule of a name, one that selects a part of the elements.

    Args:
        name: one of sparse_names().

    Returns:
        The module that implements it.

    Raises:
        PlanError: there is none; the text lists the names and the nearest one.
    """
    return cast(SparseSchedule, _named(name, sparse_names(), "with compression=hvd_ext.TopK(...) "))


def card(name: str) -> Card:
    """The card of a schedule.

    Args:
        name: one of names() or of sparse_names().

    Returns:
        What people read about it.

    Raises:
        PlanError: there is none; the text lists the names and the nearest one.
    """
    return _named(name, tuple(_found())).card


def supports(schedule: Schedule | SparseSchedule, tree: Tree) -> str | None:
    """Says whether a schedule can run on a cluster.

    Args:
        schedule: one that cannot run everywhere has a function `supports(tree)`, which gives None or the reason.
        tree: the cluster.

    Returns:
        None if it can, else the reason in words.
    """
    asked: Callable[[Tree], str | None] | None = getattr(schedule, "supports", None)
    return None if asked is None else asked(tree)


def _named(name: str, known: tuple[str, ...], before: str = "") -> Schedule | SparseSchedule:
    if name in known:
        return _found()[name]
    near = difflib.get_close_matches(name, known, n=1)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    raise PlanError(f"algorithm {name!r}: it is {before}one of {', '.join(known)}{guess}")
