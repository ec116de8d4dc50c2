"""The schedules by name. Every module of hvd_ext/planning/schedules is a schedule; no list has to name it."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, cast

from hvd_ext.errors import PlanError
from hvd_ext.planning import schedules
from hvd_ext.planning.model import LogicalPlan
from hvd_ext.topology.tree import Tree


@dataclass(frozen=True, slots=True)
class Card:
    """The description of a schedule for people; the tables of docs/algorithms.md and of the commands are made from it.

    Args:
        rounds: the number of rounds, in closed form.
        bytes: the bytes sent, in closed form; n is the size of the buffer.
        limits: the cases in which the schedule does not apply or is slow.
        source: paper, section, equations.
    """

    name: str
    idea: str
    drawing: str
    rounds: str
    bytes: str
    limits: str
    source: str
    sparse: bool = False


class Schedule(Protocol):
    """The interface of a module in hvd_ext/planning/schedules; each function takes a cluster that it supports."""

    @property
    def card(self) -> Card:
        """The schedule's description."""

    @staticmethod
    def build(tree: Tree, /) -> LogicalPlan:
        """The plan of an allreduce; in a sparse one each contribution goes through one selection."""


class SparseSchedule(Schedule, Protocol):
    """The interface of a module in hvd_ext/planning/schedules whose card says `sparse`."""

    @staticmethod
    def dense(tree: Tree, /, height: int = 1) -> LogicalPlan:
        """The plan of a step in which nothing is selected.

        Each rank folds the same range in which it selects in the plans of variants(), because its residual belongs to
        this range.
        """

    @staticmethod
    def variants(tree: Tree, /, height: int = 1) -> tuple[LogicalPlan, ...]:
        """The plans from which the planner takes the cheapest.

        Args:
            height: the levels of branches within which all elements are reduced before the selection: 1 for hosts, 2
                for racks of hosts. Ignored if every rank selects by itself.

        Returns:
            Plans that all select in the same ranges; at height 1 the plan of build() is the first.
        """


def modules(package: str, path: Iterable[str], what: str) -> dict[str, Any]:
    """Imports the modules of a package, each of which has a card with its own name.

    Args:
        path: the folders of the package.
        what: says in messages what a module is.

    Returns:
        The modules by name, sorted.

    Raises:
        PlanError: a card has another name than its module.
    """
    found = {}
    for name in sorted(info.name for info in pkgutil.iter_modules(path)):
        module: Any = importlib.import_module(f"{package}.{name}")
        if module.card.name != name:
            raise PlanError(f"{what} {name!r}: its card must have the name of its module, got {module.card.name!r}")
        found[name] = module
    return found


@lru_cache(maxsize=1)
def _modules() -> dict[str, Schedule | SparseSchedule]:
    return modules(schedules.__name__, schedules.__path__, "schedule")


def names() -> tuple[str, ...]:
    """The sorted names of all schedules that send whole buffers."""
    return tuple(name for name, module in _modules().items() if not module.card.sparse)


def sparse_names() -> tuple[str, ...]:
    """The sorted names of all schedules that select elements."""
    return tuple(name for name, module in _modules().items() if module.card.sparse)


def get(name: str) -> Schedule:
    """Finds the module of a schedule that sends whole buffers.

    Raises:
        PlanError: there is no such schedule; the message lists the names and suggests the nearest.
    """
    if name in sparse_names():
        raise PlanError(
            f"algorithm {name!r}: it sends selected elements only; give compression=hvd_ext.TopK(...) or "
            f"another codec too, or one of {', '.join(names())}"
        )
    return _module(name, names(), "must be 'auto' or one of")


def sparse(name: str) -> SparseSchedule:
    """Finds the module of a schedule that selects elements.

    Raises:
        PlanError: there is no such schedule; the message lists the names and suggests the nearest.
    """
    return cast(
        SparseSchedule,
        _module(name, sparse_names(), "with compression=hvd_ext.TopK(...) or another codec it must be one of"),
    )


def card(name: str) -> Card:
    """Finds the card of a schedule.

    Raises:
        PlanError: there is no such schedule; the message lists the names and suggests the nearest.
    """
    return _module(name, tuple(_modules())).card


def supports(schedule: Schedule | SparseSchedule, tree: Tree) -> str | None:
    """Says why a schedule cannot run on a cluster, in words; None if it can.

    A schedule that cannot run on every cluster has a function `supports(tree)`.
    """
    check: Callable[[Tree], str | None] | None = getattr(schedule, "supports", None)
    return None if check is None else check(tree)


def _module(name: str, valid: tuple[str, ...], rule: str = "must be one of") -> Schedule | SparseSchedule:
    if name in valid:
        return _modules()[name]
    near = difflib.get_close_matches(name, valid, n=1)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    raise PlanError(f"algorithm {name!r}: {rule} {', '.join(valid)}{guess}")
