"""The prices of all sparse algorithms on a cluster at a density, and the time of each step of a plan.

`python -m hvd_ext plan --density` prints these values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hvd_ext.errors import InvalidError
from hvd_ext.planning import planner, registry
from hvd_ext.planning.cost import Sparsity, traffic
from hvd_ext.planning.cost.sparse import ELEMENT_NBYTES, ENTRY_NBYTES
from hvd_ext.planning.explain import Entry, LinkKind, links, loads, pricing
from hvd_ext.planning.limits import size_class
from hvd_ext.planning.lower import rounds_of
from hvd_ext.planning.model import LogicalPlan
from hvd_ext.planning.sparse_planner import LEAST_NBYTES, best_variant, break_even, sparse_plan, sparse_price
from hvd_ext.topology.tree import Tree

DENSE, DENSE_STEP = "dense", "dense step"


@dataclass(frozen=True, slots=True)
class Step:
    """One level of a plan.

    Args:
        name: the purpose of the level; hitopk's levels on hosts are the four steps of CommLib's Algorithm 2.
        seconds: the time that the level adds to the plan.
        sent_nbytes: the bytes that all ranks send over each kind of link, from the root down.
    """

    name: str
    seconds: float
    sent_nbytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SparseExplanation:
    """All sparse algorithms on a cluster at one size and density.

    Args:
        links: the links of the cluster, by kind from the root down.
        chosen_for_nbytes: the size at which plans are chosen, which stands for all similar sizes.
        entry_nbytes: the bytes of a value and its index, as sent.
        algorithm: the algorithm of `steps`.
        dense_algorithm: the algorithm of the best dense plan, which runs without TopK.
        dense_from: the density from which this plan costs no more than the plan of `algorithm`.
        dense_above: the density from which TopK takes dense steps of `algorithm`.
        host_nbytes: the bytes that each host sends to the others by hitopk's formula at height 1, (m - 1) K entries.
        entries: sorted by price, the algorithms, "dense" for the best dense plan, and "dense step" for a step of
            `algorithm` in which nothing is selected; then the algorithms that do not apply.
    """

    cluster: str
    links: tuple[LinkKind, ...]
    nbytes: int
    chosen_for_nbytes: int
    density: float
    entry_nbytes: float
    algorithm: str
    dense_algorithm: str
    dense_why: str
    dense_from: float
    dense_above: float
    host_nbytes: int
    pricing: str
    entries: tuple[Entry, ...]
    steps: tuple[Step, ...]


def explain(
    tree: Tree,
    nbytes: int,
    density: float,
    algorithm: str = "hitopk",
    entry_nbytes: float = ENTRY_NBYTES,
    height: int | None = 1,
) -> tuple[SparseExplanation, planner.Choice]:
    """Prices every sparse algorithm as the runtime does.

    Args:
        density: the fraction of the elements that is selected, in (0, 1].
        entry_nbytes: the mean number of bytes of a value and its index, as sent.
        height: the levels of branches within which all elements are reduced before the selection; None for the height
            with the best price.

    Raises:
        PlanError: there is no such algorithm, or the density is out of its range.
        InvalidError: nbytes is not a multiple of 4.
    """
    if nbytes % ELEMENT_NBYTES:
        raise InvalidError(f"bytes ({nbytes}): must be a multiple of {ELEMENT_NBYTES}: elements are float32")
    sparsity = Sparsity(density, entry_nbytes)
    chosen = sparse_plan(tree, algorithm, nbytes, density, entry_nbytes, height=height)
    best = planner.allreduce_plan(tree, "auto", nbytes)
    assert chosen.dense is not None
    plans, refused = {DENSE: best.plan, DENSE_STEP: chosen.dense}, []
    chosen_for = max(size_class(nbytes), LEAST_NBYTES)
    for name in registry.sparse_names():
        variant = best_variant(tree, name, chosen_for, sparsity, height)
        if isinstance(variant, str):
            refused.append(Entry(name, None, None, (), f"does not apply: {variant}"))
        else:
            plans[name] = variant[1]
    prices = {name: sparse_price(plan, tree, nbytes, sparsity).seconds for name, plan in plans.items() if name != DENSE}
    prices[DENSE] = planner.price(tree, best.algorithm, nbytes).seconds
    entries = [
        _entry(name, plans[name], tree, nbytes, sparsity, prices, algorithm)
        for name in sorted(prices, key=lambda other: (prices[other], other))
    ]
    dense_from = break_even(chosen.plan, prices[DENSE], tree, nbytes, sparsity)
    host_nbytes = round(inter_host_nbytes(len(tree.hosts()), nbytes // ELEMENT_NBYTES, density, entry_nbytes))
    levels = steps(chosen.plan, tree, nbytes, sparsity)
    facts = (tree.describe(), links(tree), nbytes, chosen_for, density, entry_nbytes)
    dense = (best.algorithm, best.why, dense_from, chosen.dense_above)
    how = pricing(tree, "dense pipelined and the others in one segment")
    return SparseExplanation(*facts, algorithm, *dense, host_nbytes, how, (*entries, *refused), levels), chosen


def inter_host_nbytes(hosts: int, elements: int, density: float, entry_nbytes: float = ENTRY_NBYTES) -> float:
    """The bytes that each of m hosts sends to the others in a step of hitopk: (m - 1) K entries.

    The shards of a host together are the whole buffer, so that its ranks, however many, select K = round(density * n)
    elements in all. Each of these is sent to one rank of every other host, the one that holds its place.
    """
    return (hosts - 1) * int(density * elements + 0.5) * entry_nbytes


def _entry(
    name: str,
    plan: LogicalPlan,
    tree: Tree,
    nbytes: int,
    sparsity: Sparsity,
    prices: dict[str, float],
    algorithm: str,
) -> Entry:
    verdict = f"{plan.algorithm}: the best without TopK"
    if name != DENSE:
        times = prices[name] / prices[DENSE] if prices[DENSE] else 1.0
        tie = max(times, 1 / times) <= 1 + planner.TIE
        verdict = f"a tie with dense within {planner.TIE:.0%}" if tie else f"{times:.2f} x dense"
    if name == DENSE_STEP:
        verdict += f": {algorithm} with nothing selected"
    elif name != DENSE:
        verdict = f"asked for: {verdict}" if name == algorithm else verdict
    return Entry(name, prices[name], rounds_of(plan), loads(plan, tree, nbytes, sparsity), verdict, plan.note)


def steps(plan: LogicalPlan, tree: Tree, nbytes: int, sparsity: Sparsity) -> tuple[Step, ...]:
    """The time and the traffic of a plan, level by level; the seconds of the levels add up to the plan's price."""
    levels, before_s, before = [], 0.0, [0.0] * tree.depth
    for number, level in enumerate(plan.levels, 1):
        part = replace(plan, levels=plan.levels[:number])
        until_s = sparse_price(part, tree, nbytes, sparsity).seconds
        # The totals count each message twice, at the sender's port and at the receiver's.
        until = [kind.total * nbytes / 2 for kind in traffic(part, tree, sparsity)]
        sent = tuple(round(total - earlier) for total, earlier in zip(until, before, strict=True))
        levels.append(Step(level.name, until_s - before_s, sent))
        before_s, before = until_s, until
    return tuple(levels)
