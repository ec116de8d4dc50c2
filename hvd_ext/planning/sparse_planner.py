"""The planner of sparse collectives: the plan of the selected elements, its dense companion, and when to use each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from hvd_ext.compression.topk import TopK
from hvd_ext.errors import PlanError
from hvd_ext.planning import ir, registry
from hvd_ext.planning.cost import Simulation, Sparsity, bottleneck, load_of, simulate
from hvd_ext.planning.cost.sparse import ELEMENT_NBYTES, ENTRY_NBYTES, SELECT_S_PER_ELEMENT
from hvd_ext.planning.limits import MOST_RANKS, MOST_SIMULATED, size_class, stands_for
from hvd_ext.planning.lower import rows_of
from hvd_ext.planning.model import LogicalPlan
from hvd_ext.planning.planner import Choice
from hvd_ext.topology.tree import Tree

# The lowest density that is considered: if the break-even is not above it, the dense plan is always better.
LEAST_DENSITY = 1e-6
# The break-even is exact up to this factor, because densities are rough numbers.
_PRECISION = 1.01
# This size stands for all smaller buffers, whose price is only latency.
LEAST_NBYTES = 4096


def sparse_plan(
    tree: Tree,
    algorithm: str = "hitopk",
    nbytes: int = 8 << 20,
    density: float = 0.01,
    entry_nbytes: float = ENTRY_NBYTES,
    *,
    select_s_per_element: float | None = None,
    rows: frozenset[str] = TopK.rows,
    height: int | None = 1,
) -> Choice:
    """Chooses the plans of an allreduce that sends selected elements.

    If a schedule has variants (hitopk can gather whole shards or only their non-zero elements), the cheapest variant at
    this size and density is taken.

    Args:
        nbytes: the typical size of a float32 buffer; similar sizes share one choice.
        density: the fraction of the elements that is selected, in (0, 1].
        entry_nbytes: the mean number of bytes of a value and its index, as sent.
        select_s_per_element: the time of a selection, and of any other pass over memory, in seconds per element; None
            for that of the tree, or if it has none for SELECT_S_PER_ELEMENT.
        rows: what the codec's vectors can go through (`Codec.rows`); plans that need more do not apply.
        height: the levels of branches within which all elements are reduced before the selection: 1 for hosts, 2 for
            racks of hosts, and so on; None for the height with the best price.

    Raises:
        PlanError: no schedule has that name, it does not support the cluster, or the density is out of its range.
    """
    reason = registry.supports(registry.sparse(algorithm), tree)
    if reason is not None:
        raise PlanError(f"algorithm {algorithm!r} on {tree.describe()}: {reason}; choose another one")
    if height is not None and height < 0:
        raise PlanError(
            f"height ({height}): must be a number of levels of branches, 0 or more, or None for the best price"
        )
    sparsity = sparsity_on(tree, density, entry_nbytes, select_s_per_element, rows=rows)
    return _chosen(tree, algorithm, max(size_class(nbytes), LEAST_NBYTES), sparsity, height)


def sparsity_on(
    tree: Tree,
    density: float,
    entry_nbytes: float = ENTRY_NBYTES,
    select_s_per_element: float | None = None,
    *,
    rows: frozenset[str] = TopK.rows,
) -> Sparsity:
    """The sparsity of a step on a cluster.

    Args:
        tree: the cluster; its selection_s_per_byte is the time of a pass over memory, if it has one.
    """
    if select_s_per_element is None and tree.selection_s_per_byte is not None:
        select_s_per_element = ELEMENT_NBYTES * tree.selection_s_per_byte
    pass_s = SELECT_S_PER_ELEMENT if select_s_per_element is None else select_s_per_element
    return Sparsity(density, entry_nbytes, pass_s, rows=rows)


@lru_cache(maxsize=256)
def _chosen(tree: Tree, algorithm: str, nbytes: int, sparsity: Sparsity, height: int | None) -> Choice:
    variants_of = {name: best_variant(tree, name, nbytes, sparsity, height) for name in registry.sparse_names()}
    best = variants_of[algorithm]
    if isinstance(best, str):
        raise PlanError(f"algorithm {algorithm!r} on {tree.describe()}: {best}; choose another one")
    price_s, plan, used = best
    dense = companion(tree, algorithm, used)
    _check_shards(plan, dense)
    dense_s = sparse_price(dense, tree, nbytes, sparsity).seconds
    above = break_even(plan, dense_s, tree, nbytes, sparsity)
    candidates = [(name, variant if isinstance(variant, str) else variant[0]) for name, variant in variants_of.items()]
    since = "at every density" if above <= LEAST_DENSITY else f"from density {above:.3g} on"
    why = (
        f"at density {sparsity.density:.3g} {price_s * 1e3:.3g} ms for {nbytes} bytes on {tree.describe()}, dense "
        f"{dense_s * 1e3:.3g} ms; dense {since}; {stands_for(nbytes, LEAST_NBYTES)}"
        + (f"; {plan.note}" if plan.note else "")
    )
    return Choice(plan, algorithm, why, (*candidates, ("dense", dense_s)), dense, above)


def best_variant(
    tree: Tree, name: str, nbytes: int, sparsity: Sparsity, height: int | None
) -> str | tuple[float, LogicalPlan, int]:
    """Finds the cheapest variant of a schedule.

    Args:
        height: as for sparse_plan().

    Returns:
        The price in seconds, the plan and its height; or why the schedule does not apply.
    """
    reason = registry.supports(registry.sparse(name), tree)
    if reason is not None:
        return reason
    plans = [
        (plan, tried)
        for tried in heights(tree, height)
        for plan in variants(tree, name, tried)
        if needs(plan) <= sparsity.rows
    ]
    if not plans:
        return "its plans merge or pack vectors, which the codec cannot"
    priced = [(sparse_price(plan, tree, nbytes, sparsity).seconds, plan, tried) for plan, tried in plans]
    return min(priced, key=lambda variant: variant[0])


@lru_cache(maxsize=64)
def needs(plan: LogicalPlan) -> frozenset[str]:
    """The opcodes of a plan that not every codec has (`Codec.rows`)."""
    opcodes: set[int] = set()
    for rank in range(min(plan.size, MOST_SIMULATED)):
        opcodes |= set(np.unique(rows_of(plan, rank)[:, ir.OPCODE]).tolist())
    return frozenset(ir.OPCODE_NAMES[opcode] for opcode in opcodes & {ir.PACK, ir.TAKE, ir.MERGE, ir.RESELECT})


def heights(tree: Tree, height: int | None) -> Sequence[int]:
    """The heights from which the cheapest is taken: all of the cluster's if `height` is None."""
    return range(1, max(tree.root.height, 2)) if height is None else (height,)


@lru_cache(maxsize=64)
def variants(tree: Tree, name: str, height: int) -> tuple[LogicalPlan, ...]:
    """The plans of a sparse schedule from which the cheapest is taken."""
    return registry.sparse(name).variants(tree, height)


@lru_cache(maxsize=64)
def companion(tree: Tree, name: str, height: int) -> LogicalPlan:
    """The plan of a step in which nothing is selected."""
    return registry.sparse(name).dense(tree, height)


def sparse_price(plan: LogicalPlan, tree: Tree, nbytes: int, sparsity: Sparsity) -> Simulation:
    """The price of a plan with a residual, which runs as one segment.

    Up to 16 ranks the price is simulated. Above, it is the price of the Profile, which is made from the rows of all
    ranks up to 64 ranks, and from the calls of the plan's levels above.
    """
    if tree.size <= MOST_SIMULATED:
        return simulate(plan, tree, nbytes, max(nbytes, 1), sparsity=sparsity)
    busiest, seconds = bottleneck(plan, tree, sparsity), load_of(plan, tree, sparsity).price_s(nbytes)
    return Simulation(seconds, nbytes * busiest.bottleneck, nbytes * busiest.busiest_s_per_byte)


def break_even(plan: LogicalPlan, dense_s: float, tree: Tree, nbytes: int, sparsity: Sparsity) -> float:
    """Finds the density at which a sparse plan takes as long as a dense one, by bisection over the density.

    The size of an entry is taken as constant, although indices become shorter at higher densities; the result errs
    towards the dense plan.

    Args:
        sparsity: the sparsity of the step; its density is not used.

    Returns:
        The density; LEAST_DENSITY if the dense plan is never the dearer one, 1 if the sparse plan is always cheaper.
    """

    def cheaper(density: float) -> bool:
        return sparse_price(plan, tree, nbytes, replace(sparsity, density=density)).seconds < dense_s

    if not cheaper(LEAST_DENSITY):
        return LEAST_DENSITY
    low, high = LEAST_DENSITY, 1.0
    if cheaper(high):
        return high
    while high / low > _PRECISION:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if cheaper(middle) else (low, middle)
    return high


def _check_shards(plan: LogicalPlan, dense: LogicalPlan) -> None:
    """Checks that a rank selects and folds in the same ranges, because its residual belongs to them."""
    if plan.size > MOST_RANKS:
        return  # the tests check larger plans, as they do for proofs
    for rank in range(plan.size):
        selected, folded = shards_of(plan, rank), shards_of(dense, rank)
        if selected != folded:
            raise PlanError(
                f"{plan.algorithm}: rank {rank} selects in {selected} of the buffer and folds in {folded}: a residual "
                "needs the same ranges in both plans"
            )


def shards_of(plan: LogicalPlan, rank: int) -> list[tuple[float, float]]:
    """The begins and ends of the parts of the buffer that go through error feedback on a rank, as shares, sorted."""
    rows = rows_of(plan, rank)
    fed = (rows[:, ir.OPCODE] == ir.SELECT) | (rows[:, ir.OPCODE] == ir.FOLD)
    return sorted(
        (row[ir.BEGIN] / plan.units, (row[ir.BEGIN] + row[ir.COUNT]) / plan.units) for row in rows[fed].tolist()
    )
