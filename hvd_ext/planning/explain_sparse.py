"""What every sparse algorithm would cost on a cluster at a density, and where the time goes: for `python -m hvd_ext
plan --density`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from hvd_ext.errors import InvalidError
from hvd_ext.planning import planner, registry
from hvd_ext.planning.choice import Choice
from hvd_ext.planning.cost import Sparsity, traffic
from hvd_ext.planning.cost.commlib import inter_host_nbytes
from hvd_ext.planning.cost.sparse import ELEMENT_NBYTES, ENTRY_NBYTES
from hvd_ext.planning.explain import Entry, LinkKind, Load, kinds, links, pricing
from hvd_ext.planning.limits import size_class
from hvd_ext.planning.lower import rounds_of
from hvd_ext.planning.model import LogicalPlan
from hvd_ext.planning.sparse_planner import (
    LEAST_NBYTES,
    best_variant,
    break_even,
    sparse_plan,
    sparse_price,
)
from hvd_ext.topology.tree import Tree

DENSE, DENSE_STEP = "dense", "dense step"


@dataclass(frozen=True, slots=True)
class Step:
    """One level of a plan.

    Args:
        name: what it is for; of hitopk's levels on hosts, the four steps of CommLib's Algorithm 2.
        seconds: by which the plan is longer with this level.
        sent_nbytes: over each kind of link from the root down, all ranks together.
    """

    name: str
    seconds: float
    sent_nbytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SparseExplanation:
    """All sparse algorithms on a cluster at one size and density.

    Args:
        cluster: described.
        links: of the cluster, by kind from the root down.
        nbytes: of the buffer, float32.
        chosen_for_nbytes: the size at which plans are chosen, which stands for all near ones.
        density: the part of the elements that is selected.
        entry_nbytes: of a value and its index on the way.
        algorithm: the one whose steps are told.
        dense_algorithm: of the best dense plan, which is what runs without TopK.
        dense_why: why it is the best, in a line.
        dense_from: from this density on that plan is no dearer than the one of `algorithm`.
        dense_above: from this density on TopK takes dense steps of `algorithm`.
        host_nbytes: what each host sends to the others by hitopk's formula at height 1, (m - 1) K entries.
        pricing: how prices were found.
        entries: by price the algorithms, "dense", the best dense plan, and "dense step", a step of `algorithm` in which
            nothing is selected; then the algorithms that do not apply.
        steps: of the plan of `algorithm`.
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
) -> tuple[SparseExplanation, Choice]:
    """Prices every sparse algorithm as the runtime does.

    Args:
        tree: the cluster.
        nbytes: of the buffer, float32.
        density: the part of the elements that is selected, in (0, 1].
        algorithm: whose steps to tell.
        entry_nbytes: of a value and its index on the way, in the mean.
        height: levels of branches that add up before they select; None for the one with the best price.

    Returns:
        The explanation, and the plans of the algorithm.

    Raises:
        PlanError: there is no such algorithm, or the density is out of its range.
        InvalidError: the buffer has a part of an element.
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
        found = best_variant(tree, name, chosen_for, sparsity, height)
        if isinstance(found, str):
            refused.append(Entry(name, None, None, None, (), f"does not apply: {found}"))
        else:
            plans[name] = found[1]
    prices = {name: sparse_price(plan, tree, nbytes, sparsity).seconds for name, plan in plans.items() if name != DENSE}
    prices[DENSE] = planner.price(tree, best.algorithm, nbytes).seconds
    entries = [
        _entry(name, plans[name], tree, nbytes, sparsity, prices, algorithm)
        for name in sorted(prices, key=lambda other: (prices[other], other))
    ]
    dense_from = break_even(chosen.plan, prices[DENSE], tree, nbytes, sparsity)
    host_nbytes = round(inter_host_nbytes(len(tree.hosts()), nbytes // ELEMENT_NBYTES, density, entry_nbytes))
    told = steps(chosen.plan, tree, nbytes, sparsity)
    facts = (tree.describe(), links(tree), nbytes, chosen_for, density, entry_nbytes)
    dense = (best.algorithm, best.why, dense_from, chosen.dense_above)
    how = pricing(tree, "dense pipelined and the others in one segment")
    return SparseExplanation(*facts, algorithm, *dense, host_nbytes, how, (*entries, *refused), told), chosen


def _entry(
    name: str,
    plan: LogicalPlan,
    tree: Tree,
    nbytes: int,
    sparsity: Sparsity,
    prices: dict[str, float],
    algorithm: str,
) -> Entry:
    loads = tuple(
        Load(kind, round(found.busiest * nbytes), round(found.total * nbytes))
        for kind, found in zip(kinds(tree), traffic(plan, tree, sparsity), strict=True)
    )
    closed_s, verdict = None, f"{plan.algorithm}: the best without TopK"
    if name != DENSE:
        times = prices[name] / prices[DENSE] if prices[DENSE] else 1.0
        tie = max(times, 1 / times) <= 1 + planner.TIE
        verdict = f"a tie with dense within {planner.TIE:.0%}" if tie else f"{times:.2f} x dense"
    if name == DENSE_STEP:
        verdict += f": {algorithm} with nothing selected"
    elif name != DENSE:
        closed_s = registry.sparse(name).cost(tree, nbytes, sparsity.density)
        verdict = f"asked for: {verdict}" if name == algorithm else verdict
    return Entry(name, prices[name], closed_s, rounds_of(plan), loads, verdict, plan.note)


def steps(plan: LogicalPlan, tree: Tree, nbytes: int, sparsity: Sparsity) -> tuple[Step, ...]:
    """Where the time of a plan goes, level by level.

    Args:
        plan: sparse, or its dense companion.
        tree: the cluster.
        nbytes: of the buffer, float32.
        sparsity: of the step.

    Returns:
        The levels; their seconds add up to the plan's price.
    """
    found, before_s, before = [], 0.0, [0.0] * tree.depth
    for number, level in enumerate(plan.levels, 1):
        part = replace(plan, levels=plan.levels[:number])
        now_s = sparse_price(part, tree, nbytes, sparsity).seconds
        # A message goes over two ports of each kind.
        now = [kind.total * nbytes / 2 for kind in traffic(part, tree, sparsity)]
        sent = tuple(round(one - other) for one, other in zip(now, before, strict=True))
        found.append(Step(level.name, now_s - before_s, sent))
        before_s, before = now_s, now
    return tuple(found)


def as_json(explanation: SparseExplanation) -> dict[str, object]:
    """An explanation for programs.

    Args:
        explanation: from explain().

    Returns:
        Numbers, texts, lists and dictionaries of them only; times in seconds, sizes in bytes.
    """
    return asdict(explanation)
