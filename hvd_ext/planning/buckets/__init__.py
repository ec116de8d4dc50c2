"""Bucketers by name: every module here except `model` is a way to divide the tensors of a step into buckets."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol, cast

from hvd_ext.errors import PlanError
from hvd_ext.planning.buckets.model import (
    DEFAULT_BUCKET_NBYTES,
    Bucket,
    BucketPlan,
    Card,
    Class,
    Price,
    Request,
)

__all__ = [
    "DEFAULT_BUCKET_NBYTES",
    "Bucket",
    "BucketPlan",
    "Bucketer",
    "Card",
    "Class",
    "Price",
    "Request",
    "choose",
    "get",
    "names",
    "plan",
    "supports",
]


# Without times "auto" takes the first that can meet a request; with times the best, and the first in a tie.
SIMPLEST_FIRST = ("by_size", "by_groups", "single", "wfbp", "mgwfbp", "optimal")


class Bucketer(Protocol):
    """The interface of a module here. A bucketer that cannot meet every request also has `supports(request)`."""

    @property
    def card(self) -> Card:
        """The bucketer's description."""

    @staticmethod
    def build(request: Request, /) -> BucketPlan:
        """Plans a request.

        Returns:
            The plan: one class per bucket, each tensor in one bucket, the buckets in the order in which their last
            tensor is ready (the request's ready order).

        Raises:
            PlanError: the tensors, the size or the groups are wrong.
        """


@lru_cache(maxsize=1)
def _bucketers() -> dict[str, Bucketer]:
    bucketers: dict[str, Bucketer] = {}
    for name in sorted(info.name for info in pkgutil.iter_modules(__path__) if info.name != "model"):
        module = cast(Bucketer, importlib.import_module(f"{__name__}.{name}"))
        if module.card.name != name:
            raise PlanError(f"bucketer {name!r}: its card must have the name of its module, got {module.card.name!r}")
        bucketers[name] = module
    return bucketers


def names() -> tuple[str, ...]:
    """The sorted names of all bucketers."""
    return tuple(_bucketers())


def get(name: str) -> Bucketer:
    """Finds the module of a bucketer.

    Raises:
        PlanError: there is no such bucketer.
    """
    if name not in _bucketers():
        raise PlanError(f"bucketer {name!r}: must be one of {', '.join(names())}")
    return _bucketers()[name]


def supports(bucketer: Bucketer, request: Request) -> str | None:
    """Says why a bucketer cannot meet a request, in words; None if it can."""
    check: Callable[[Request], str | None] | None = getattr(bucketer, "supports", None)
    return None if check is None else check(request)


def choose(request: Request) -> str:
    """Chooses the simplest bucketer that can meet a request, and returns its name."""
    return next(name for name in SIMPLEST_FIRST if supports(get(name), request) is None)


def plan(request: Request, bucketer: str = "auto") -> BucketPlan:
    """Divides the tensors of a request into buckets.

    Raises:
        PlanError: no bucketer has that name, it does not support the request, or the request is wrong.
    """
    name = choose(request) if bucketer == "auto" else bucketer
    reason = supports(get(name), request)
    if reason is not None:
        raise PlanError(f"bucketer {name!r}: {reason}; choose another one, or 'auto'")
    return get(name).build(request)
