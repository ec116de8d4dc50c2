"""Bucketers by name: every module here but `model` is one way to say which gradients travel together."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol, cast

from hvd_ext.errors import PlanError
from hvd_ext.planning.buckets.apart import apart
from hvd_ext.planning.buckets.by_groups import by_groups
from hvd_ext.planning.buckets.by_size import by_size
from hvd_ext.planning.buckets.model import (
    DEFAULT_BUCKET_NBYTES,
    Bucket,
    BucketPlan,
    Card,
    Request,
)

__all__ = [
    "DEFAULT_BUCKET_NBYTES",
    "Bucket",
    "BucketPlan",
    "Bucketer",
    "Card",
    "Request",
    "apart",
    "by_groups",
    "by_size",
    "choose",
    "get",
    "names",
    "plan",
    "supports",
]


_SIMPLEST_FIRST = ("by_size", "by_groups", "apart")


class Bucketer(Protocol):
    """What a module here offers. One that cannot meet every request also has `supports(request)`."""

    @property
    def card(self) -> Card:
        """What people read about it."""

    @staticmethod
    def build(request: Request, /) -> BucketPlan:
        """Plans a request.

        Args:
            request: one that it supports.

        Returns:
            The plan: one dtype per bucket, each tensor in one bucket, the buckets in the order in which their last
            tensor is ready.

        Raises:
            PlanError: the tensors, the size or the groups are wrong.
        """


@lru_cache(maxsize=1)
def _found() -> dict[str, Bucketer]:
    found: dict[str, Bucketer] = {}
    for name in sorted(info.name for info in pkgutil.iter_modules(__path__) if info.name != "model"):
        module = cast(Bucketer, importlib.import_module(f"{__name__}.{name}"))
        if module.card.name != name:
            raise PlanError(f"bucketer {name!r}: its card has the name of its module, got {module.card.name!r}")
        found[name] = module
    return found


def names() -> tuple[str, ...]:
    """The names of all bucketers.

    Returns:
        Sorted.
    """
    return tuple(_found())


def get(name: str) -> Bucketer:
    """The bucketer of a name.

    Args:
        name: one of names().

    Returns:
        The module that implements it.

    Raises:
        PlanError: there is none.
    """
    if name not in _found():
        raise PlanError(f"bucketer {name!r}: it is one of {', '.join(names())}")
    return _found()[name]


def supports(bucketer: Bucketer, request: Request) -> str | None:
    """Says whether a bucketer can meet a request.

    Args:
        bucketer: by get().
        request: of the user.

    Returns:
        None if it can, else the reason in words.
    """
    asked: Callable[[Request], str | None] | None = getattr(bucketer, "supports", None)
    return None if asked is None else asked(request)


def choose(request: Request) -> str:
    """Chooses a bucketer.

    Args:
        request: of the user.

    Returns:
        Its name: the simplest that can meet the request.
    """
    return next(name for name in _SIMPLEST_FIRST if supports(get(name), request) is None)


def plan(request: Request, bucketer: str = "auto") -> BucketPlan:
    """Plans which tensors travel together.

    Args:
        request: of the user.
        bucketer: one of names(), or "auto".

    Returns:
        The plan, the same on all ranks for the same request.

    Raises:
        PlanError: no bucketer has that name, it does not support the request, or the request is wrong.
    """
    name = choose(request) if bucketer == "auto" else bucketer
    reason = supports(get(name), request)
    if reason is not None:
        raise PlanError(f"bucketer {name!r}: {reason}; choose another one, or 'auto'")
    return get(name).build(request)
