"""Bucketers by name: every module here is a way to divide the tensors of a step into buckets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hvd_ext.errors import PlanError
from hvd_ext.planning.registry import modules
from hvd_ext.planning.step_times import ready_order
from hvd_ext.planning.tensors import Tensor

DEFAULT_BUCKET_NBYTES = 8 << 20

# Tensors of different classes never share a bucket: the dtype, and whether they may be sparsified.
Class = tuple[str, bool]

# Without times "auto" takes the first that can meet a request; with times the best, and the first in a tie.
SIMPLEST_FIRST = ("by_size", "by_groups", "single", "wfbp", "mgwfbp", "optimal")


class Price(Protocol):
    """The price of a bucket in a lane (planning/cost/lane.py); a larger bucket is never cheaper."""

    def parts_s(self, nbytes: NDArray[np.float64], /) -> tuple[NDArray[Any], NDArray[Any]]:
        """How long each bucket of these sizes in memory holds the lane, and what it takes after that, seconds."""


@dataclass(frozen=True, slots=True)
class Request:
    """The tensors that need buckets, and the user's wishes.

    Args:
        tensors: the tensors in the order of the model's layers.
        groups: the number of groups of consecutive tensors, which get about equal bytes; there are fewer groups if
            there are fewer tensors. Or the groups themselves: lists of indices of tensors, of any sizes and dtypes;
            empty lists are ignored. None for none.
        sparse: the indices of the tensors that may be sparsified, which share no bucket with the others.
        ready_s: the time at which each tensor is ready, seconds; None if it is not known.
        price: gives the price of the buckets of a class; None if it is not known.
    """

    tensors: Sequence[Tensor]
    bucket_nbytes: int = DEFAULT_BUCKET_NBYTES
    groups: int | Sequence[Sequence[int]] | None = None
    sparse: Collection[int] = ()
    ready_s: Sequence[float] | None = None
    price: Callable[[Class], Price] | None = None

    @property
    def order(self) -> tuple[int, ...]:
        """The indices of the tensors in ready order; without times back-propagation goes from the last to the first."""
        return tuple(reversed(range(len(self.tensors)))) if self.ready_s is None else ready_order(self.ready_s)

    @property
    def classes(self) -> dict[Class, list[int]]:
        """The indices of the tensors of each class in ready order, the classes in the order of their first tensors."""
        return self.by_class(self.order)

    def class_of(self, index: int) -> Class:
        """The class of a tensor."""
        return self.tensors[index].dtype, index in self.sparse

    def by_class(self, indices: Iterable[int]) -> dict[Class, list[int]]:
        """Some tensors by their class."""
        classes: dict[Class, list[int]] = {}
        for index in indices:
            classes.setdefault(self.class_of(index), []).append(index)
        return classes


@dataclass(frozen=True, slots=True)
class Card:
    """The description of a bucketer: a sentence, and a paper's section or a similar program."""

    name: str
    idea: str
    source: str


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors of one dtype that are sent together: indices into the request's tensors, in their order in the buffer."""

    dtype: str
    tensors: tuple[int, ...]
    nbytes: int


def bucket_of(tensors: Sequence[Tensor], indices: Sequence[int]) -> Bucket:
    """Makes a bucket of tensors of one dtype, at least one, in their order in the buffer."""
    dtype = tensors[indices[0]].dtype
    return Bucket(dtype, tuple(indices), sum(tensors[index].nbytes for index in indices))


def in_order(buckets: Iterable[Bucket], order: Sequence[int]) -> tuple[Bucket, ...]:
    """Sorts buckets in the order in which their last tensors are ready; `order` is that of all tensors."""
    place = {index: number for number, index in enumerate(order)}
    return tuple(sorted(buckets, key=lambda bucket: max(place[index] for index in bucket.tensors)))


def without_groups(request: Request) -> str | None:
    """Says that a bucketer takes no groups, where a request has them."""
    return None if request.groups is None else "it does not support groups"


def with_prices(request: Request) -> str | None:
    """Says what a bucketer lacks that decides by ready times and prices."""
    if request.ready_s is None or request.price is None:
        return "it needs the times at which tensors are ready, and the price of a bucket"
    return without_groups(request)


class Bucketer(Protocol):
    """The interface of a module here. A bucketer that cannot meet every request also has `supports(request)`."""

    @property
    def card(self) -> Card:
        """The bucketer's description."""

    @staticmethod
    def build(request: Request, /) -> tuple[Bucket, ...]:
        """Plans a request.

        Returns:
            The buckets in the order in which they start, the same on all ranks: that in which their last tensor is
            ready (the request's ready order). Each has one class, and every tensor is in exactly one bucket.

        Raises:
            PlanError: the tensors, the size or the groups are wrong.
        """


@lru_cache(maxsize=1)
def _bucketers() -> dict[str, Bucketer]:
    return modules(__name__, __path__, "bucketer")


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


def plan(request: Request, bucketer: str = "auto") -> tuple[Bucket, ...]:
    """Divides the tensors of a request into buckets.

    Raises:
        PlanError: no bucketer has that name, it does not support the request, or the request is wrong.
    """
    name = choose(request) if bucketer == "auto" else bucketer
    reason = supports(get(name), request)
    if reason is not None:
        raise PlanError(f"bucketer {name!r}: {reason}; choose another one, or 'auto'")
    return get(name).build(request)
