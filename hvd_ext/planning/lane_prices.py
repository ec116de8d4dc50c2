"""The prices of the buckets of a step in its lane: tables of dense and sparse plans, by cluster and by name.

A table is made once for a cluster: of a schedule's plan, played at powers of two, or of the best schedule at each of
them. So a price costs no more than a look at a table, and a search for buckets can ask for many thousands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

from hvd_ext.compression import Codec
from hvd_ext.errors import PlanError
from hvd_ext.planning import planner, registry
from hvd_ext.planning.cost import load_of
from hvd_ext.planning.cost.lane import (
    LEAST_NBYTES,
    MOST_NBYTES,
    PLAYED_WINDOWS,
    Parts,
    Table,
    doubling,
    parts_of,
    table,
)
from hvd_ext.planning.cost.simulate import WINDOW
from hvd_ext.planning.cost.sparse import DENSE, Sparsity
from hvd_ext.planning.grain import coarser, segment_nbytes
from hvd_ext.planning.limits import size_class
from hvd_ext.planning.model import LogicalPlan
from hvd_ext.planning.sparse_planner import best_variant, companion, sparsity_on
from hvd_ext.topology.tree import Tree

# Segments may be larger than the grain by these factors, where a rank's messages take more than BUSY_RANK of the time
# of the busiest port. They are larger where a bucket then takes no more than WORTH_COARSER of its time.
COARSER = (1, 2, 4)
BUSY_RANK = 0.5
WORTH_COARSER = 0.97


@lru_cache(maxsize=4096)
def segment_of(tree: Tree, name: str, nbytes: int) -> int:
    """The segments of a bucket as sent: of the grain, or larger where messages take much of the processor."""
    plan = planner.allreduce_plan(tree, name).plan
    return coarser(segment_nbytes(plan, nbytes, tree), nbytes, _factor(tree, name, size_class(nbytes)))


@lru_cache(maxsize=1024)
def _factor(tree: Tree, name: str, nbytes: int) -> int:
    plan = planner.allreduce_plan(tree, name).plan
    grain = segment_nbytes(plan, nbytes, tree)
    if not tree.message_s or nbytes <= grain:
        return 1
    load = load_of(plan, tree)
    if load.messages_s <= BUSY_RANK * grain * load.busiest_s_per_byte:
        return 1
    prices = {factor: parts_of(plan, tree, nbytes, coarser(grain, nbytes, factor)).seconds for factor in COARSER}
    best = min(COARSER, key=lambda factor: prices[factor])
    return best if prices[best] < prices[1] * WORTH_COARSER else 1


@lru_cache(maxsize=1024)
def _point(tree: Tree, name: str, nbytes: int) -> Parts:
    """The price of a bucket by one schedule, at a power of two."""
    half, quarter = nbytes // 2, nbytes // 4
    grains = [segment_of(tree, name, size) for size in (half, nbytes)]
    # Behind this number of segments a larger bucket continues at their pace, unless its segments have another size.
    if half >= 2 * PLAYED_WINDOWS * WINDOW * grains[0] and abs(grains[1] - grains[0]) <= 0.1 * grains[0]:
        smaller, larger = _point(tree, name, quarter), _point(tree, name, half)
        return Parts(3 * larger.hold_s - 2 * smaller.hold_s, larger.tail_s)
    plan = planner.allreduce_plan(tree, name).plan
    return parts_of(plan, tree, nbytes, grains[1])


@lru_cache(maxsize=256)
def _near(tree: Tree, nbytes: int) -> tuple[str, ...]:
    """The schedules whose quick price at a size is near that of the best; others are not played."""
    names = [name for name in registry.names() if registry.supports(registry.get(name), tree) is None]
    prices = {name: planner.quick_price_s(tree, name, nbytes) for name in names}
    worth_s = min(prices.values()) * planner.WORTH_SIMULATING
    return tuple(name for name, price_s in prices.items() if price_s <= worth_s)


@lru_cache(maxsize=64)
def dense_table(tree: Tree, algorithm: str) -> Table:
    """The price of a bucket in the lane, as a table by bytes as sent.

    Args:
        algorithm: a schedule's name, or "auto" for the best schedule at each size.
    """

    def price(nbytes: int) -> Parts:
        names = _near(tree, nbytes) if algorithm == "auto" else (algorithm,)
        return min((_point(tree, name, nbytes) for name in names), key=lambda parts: parts.seconds)

    return doubling(price)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule for a bucket, and its price there."""

    name: str
    parts: Parts


def candidates(tree: Tree, nbytes: int) -> tuple[Candidate, ...]:
    """Prices a bucket as sent by all schedules that may be the best.

    Returns:
        The schedules, the cheapest in a lane of its own first; in a tie the one that holds the lane less, then the
        ring, as the simplest.
    """
    low = _low(nbytes)
    names = sorted({*_near(tree, low), *_near(tree, 2 * low)})
    priced = [Candidate(name, _between(partial(_point, tree, name), nbytes)) for name in names]
    best_s = min(candidate.parts.seconds for candidate in priced)

    def rank(candidate: Candidate) -> tuple[float, float, bool, str]:
        name, parts = candidate.name, candidate.parts
        tied = parts.seconds <= best_s * (1 + planner.TIE)
        return (best_s if tied else parts.seconds, round(parts.hold_s, 9), name != "ring", name)

    return tuple(sorted(priced, key=rank))


def chosen(tree: Tree, name: str, nbytes: int, among: tuple[Candidate, ...]) -> planner.Choice:
    """Says why a bucket has its schedule."""
    parts = {candidate.name: candidate.parts for candidate in among}
    first = sorted(parts, key=lambda other: (other != name, parts[other].seconds, other))[: 1 + planner.MOST_NAMED]
    listed = ", ".join(
        f"{other} {parts[other].hold_s * 1e3:.3g} + {parts[other].tail_s * 1e3:.3g} ms" for other in first
    )
    plan = planner.allreduce_plan(tree, name).plan
    why = f"cheapest in its lane for {nbytes} bytes on {tree.describe()} (hold + tail): {listed}"
    return planner.Choice(
        plan,
        name,
        why + (f"; {plan.note}" if plan.note else ""),
        tuple((candidate.name, candidate.parts.seconds) for candidate in among),
    )


def sparsity_of(tree: Tree, codec: Codec) -> Sparsity:
    """The sparsity of an ordinary step, after the warm-up."""
    return sparsity_on(tree, codec.schedule.densities[-1], codec.entry_nbytes, rows=codec.rows)


@lru_cache(maxsize=64)
def sparse_table(tree: Tree, name: str, sparsity: Sparsity, height: int | None, *, selects: bool = True) -> Table:
    """The price of a bucket that keeps a residual, by bytes of the float32 buffer.

    Args:
        selects: True for a bucket that selects, or is sent whole by its dense companion where that is cheaper. False
            for one that sends all elements; its plan is chosen for the sparsity of other steps.
    """

    def price(nbytes: int) -> Parts:
        variant = best_variant(tree, name, nbytes, sparsity, height)
        if isinstance(variant, str):
            raise PlanError(f"algorithm {name!r} on {tree.describe()}: {variant}; choose another one")
        _, plan, used = variant
        plans = [*([plan] if selects else []), companion(tree, name, used)]
        parts = [sparse_parts(either, tree, nbytes, sparsity) for either in plans]
        return min(parts, key=lambda either: either.seconds)

    return doubling(price)


def sparse_parts(plan: LogicalPlan, tree: Tree, nbytes: int, sparsity: Sparsity) -> Parts:
    """The price in the lane of a sparse plan or of its dense companion, which runs as one segment."""
    if nbytes == _low(nbytes):
        return _one_segment(plan, tree, sparsity, nbytes)
    return _between(partial(_one_segment, plan, tree, sparsity), nbytes)


def gather_parts(tree: Tree, nbytes: int) -> Parts:
    """The price in the lane of an all-gather of so many bytes in all, as of the rows of an embedding."""
    return _one_segment(planner.all_gather_plan(tree), tree, DENSE, nbytes)


@lru_cache(maxsize=512)
def _one_segment(plan: LogicalPlan, tree: Tree, sparsity: Sparsity, nbytes: int) -> Parts:
    return parts_of(plan, tree, nbytes, max(nbytes, 1), sparsity)


def _between(price: Callable[[int], Parts], nbytes: int) -> Parts:
    """The price at a size between two powers of two, from the prices of both."""
    low = _low(nbytes)
    return table([(size, price(size)) for size in (low, 2 * low)]).parts([nbytes])[0]


def _low(nbytes: int) -> int:
    """The power of two below a size, such that a table has it and the next one."""
    return min(max(1 << max(nbytes.bit_length() - 1, 0), LEAST_NBYTES), MOST_NBYTES // 2)
