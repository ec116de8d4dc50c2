"""The planner's interface for the runtime: the choice, the price and the proof of plans. All answers are cached."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hvd_ext.errors import PlanError
from hvd_ext.planning import registry
from hvd_ext.planning.cost import Simulation, bottleneck, load_of, simulate, traffic
from hvd_ext.planning.grain import segment_nbytes
from hvd_ext.planning.limits import MOST_RANKS, MOST_SIMULATED, size_class, stands_for
from hvd_ext.planning.model import Call, Level, LogicalPlan, Span
from hvd_ext.planning.verify import verify
from hvd_ext.topology.tree import Node, Tree

DEFAULT_NBYTES = 8 << 20
# A chain moves each byte once over each port but takes d - 1 rounds; in larger groups a broadcast is recursive.
LONGEST_CHAIN = 16
# For a choice, only plans whose quick price is within this factor of the best are simulated.
WORTH_SIMULATING = 1.5
# Prices within this factor are a tie. In a tie the ring wins, as the simplest plan, or else the plan that loads its
# links least. If the network limits the plans, a plan that sends everything through one rank of each host costs no more
# than a plan that all ranks share, but this rank has all the work.
TIE = 0.01
MOST_NAMED = 3  # losers in the line that explains a choice


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan and the reason for it. A plan with a selection has a dense companion.

    Args:
        candidates: the name of every schedule with its price in seconds, or with the reason why it does not apply;
            empty if the schedule was asked for by name. For a sparse choice the last one is "dense", with the price of
            the plan `dense`.
        dense: the plan of a step in which nothing is selected, with the same residuals as `plan`; None for a dense
            choice.
        dense_above: the density in (0, 1] from which `dense` is cheaper.
    """

    plan: LogicalPlan
    algorithm: str
    why: str
    candidates: tuple[tuple[str, float | str], ...] = ()
    dense: LogicalPlan | None = None
    dense_above: float = 1.0

    @property
    def selects(self) -> bool:
        """Whether `plan` selects; on one host it does not, because all elements are reduced there."""
        return any(call.kind == "select" for level in self.plan.levels for call in level.calls)


def allreduce_plan(tree: Tree, algorithm: str = "auto", nbytes: int = DEFAULT_NBYTES) -> Choice:
    """Chooses the plan of an allreduce.

    Args:
        algorithm: a schedule's name, or "auto" for the cheapest at size_class(nbytes), so that the buckets of a model,
            which have many similar sizes, share one choice. Prices are those of price(), except that schedules far from
            the best have the price of their Profile.
        nbytes: the typical size of a buffer, for example of a bucket.

    Raises:
        PlanError: no schedule has that name, or it does not support the cluster.
    """
    return _cheapest(tree, size_class(nbytes)) if algorithm == "auto" else _by_name(tree, algorithm)


@lru_cache(maxsize=64)
def _by_name(tree: Tree, name: str) -> Choice:
    reason = registry.supports(registry.get(name), tree)
    if reason is not None:
        raise PlanError(f"algorithm {name!r} on {tree.describe()}: {reason}; choose another one, or 'auto'")
    plan = _built(tree, name)
    return Choice(plan, name, "asked for by name" + (f"; {plan.note}" if plan.note else ""))


@lru_cache(maxsize=256)
def _cheapest(tree: Tree, nbytes: int) -> Choice:
    reasons = {name: registry.supports(registry.get(name), tree) for name in registry.names()}
    prices = {name: quick_price_s(tree, name, nbytes) for name, reason in reasons.items() if reason is None}
    near = [name for name, price_s in prices.items() if price_s <= min(prices.values()) * WORTH_SIMULATING]
    prices.update({name: price(tree, name, nbytes).seconds for name in near})
    best = min(prices[name] for name in near)
    tied = [name for name in near if prices[name] <= best * (1 + TIE)]
    name = "ring" if "ring" in tied else min(tied, key=lambda other: (_load_s(tree, other), prices[other], other))
    nearest = sorted(prices, key=lambda other: (other != name, prices[other], other))[: 1 + MOST_NAMED]
    listed = ", ".join(f"{other} {prices[other] * 1e3:.3g} ms" for other in nearest)
    plan = _built(tree, name)
    ties: dict[str, list[str]] = {}
    for other in tied:
        if other != name:
            ties.setdefault(_preference(tree, name, other, prices), []).append(other)
    words = [f"{listed}; {stands_for(nbytes)}"]
    words += [f"a tie within {TIE:.0%} with {', '.join(names)}: {name} {reason}" for reason, names in ties.items()]
    why = f"cheapest for {nbytes} bytes on {tree.describe()}: " + "; ".join([*words, *filter(None, [plan.note])])
    return Choice(plan, name, why, tuple((other, prices.get(other, reason or "")) for other, reason in reasons.items()))


def preference(tree: Tree, chosen: Choice, other: str) -> str:
    """Gives the reason why the choice of "auto" was preferred to another algorithm that takes nearly as long.

    Returns:
        A predicate about the chosen algorithm, such as "is the simplest".
    """
    prices = {name: price_s for name, price_s in chosen.candidates if not isinstance(price_s, str)}
    if prices[other] > min(prices.values()) * (1 + TIE):
        return "is cheaper at the size that stands for this one"
    return _preference(tree, chosen.algorithm, other, prices)


def _preference(tree: Tree, name: str, other: str, prices: dict[str, float]) -> str:
    if name == "ring":
        return "is the simplest"
    if _load_s(tree, name) < _load_s(tree, other):
        return "loads the links less"
    if prices[name] < prices[other]:
        return "is the cheaper one of equal load"
    return "comes first by name, all else being equal"


def _load_s(tree: Tree, name: str) -> float:
    """The sum of the busiest ports of all kinds of links; rounded, because equal plans may differ in the last bit."""
    return float(f"{sum(kind.busiest_s_per_byte for kind in traffic(_built(tree, name), tree)):.9g}")


@lru_cache(maxsize=1024)
def price(tree: Tree, name: str, nbytes: int) -> Simulation:
    """The price of a schedule's plan, pipelined in the segments of segment_nbytes().

    Up to 16 ranks the price is simulated. Above, it is the price of the Profile.
    """
    plan = _built(tree, name)
    if tree.size <= MOST_SIMULATED:
        return simulate(plan, tree, nbytes, segment_nbytes(plan, nbytes, tree))
    busiest, seconds = bottleneck(plan, tree), quick_price_s(tree, name, nbytes)
    return Simulation(seconds, nbytes * busiest.bottleneck, nbytes * busiest.busiest_s_per_byte)


def quick_price_s(tree: Tree, name: str, nbytes: int) -> float:
    """The price of the Profile, which takes no simulation."""
    load = load_of(_built(tree.at(nbytes), name), tree.at(nbytes))
    return load.price_s(nbytes, segment_nbytes(_built(tree, name), nbytes, tree))


@lru_cache(maxsize=128)
def _built(tree: Tree, name: str) -> LogicalPlan:
    return registry.get(name).build(tree)


@lru_cache(maxsize=64)
def all_gather_plan(tree: Tree) -> LogicalPlan:
    """The plan of an all-gather: a ring in tree order, which enters and leaves each host once.

    It has one unit per rank; unit r belongs to rank r. The engine maps units to parts of any sizes.
    """
    spans = tuple(Span(rank, 1) for rank in tree.ranks)
    levels = (Level((Call("all_gather", tree.ranks, spans),), "all-gather over all ranks"),) if tree.size > 1 else ()
    return LogicalPlan("ring", "all_gather", tree.size, tree.size, levels)


@lru_cache(maxsize=256)
def broadcast_plan(tree: Tree, root: int) -> LogicalPlan:
    """The plan of a broadcast: from the root to one rank of each rack, then of each host, then to all ranks of a host.

    Returns:
        A plan of one unit, which sends the buffer once over each link between hosts.

    Raises:
        PlanError: there is no such rank.
    """
    if not 0 <= root < tree.size:
        raise PlanError(f"broadcast from root_rank {root}: the ranks are 0 .. {tree.size - 1}")
    levels = tuple(
        Level(calls, "broadcast to the heads of the next level")
        for nodes in reversed(tree.levels())
        if (calls := tuple(_heads(node, root) for node in nodes if len(node.children) > 1))
    )
    return LogicalPlan("tree", "broadcast", tree.size, 1, levels, root=root)


def _heads(node: Node, root: int) -> Call:
    """Broadcasts from a branch to its children's heads; a head is the root if it is below, else the first rank."""
    heads = tuple(root if root in child.ranks else child.ranks[0] for child in node.children)
    head = root if root in heads else heads[0]
    return Call("broadcast", heads, (Span(0, 1),), head, "ring" if len(heads) <= LONGEST_CHAIN else "recursive")


@lru_cache(maxsize=64)
def reduce_scatter_plan(tree: Tree) -> LogicalPlan:
    """The plan of a reduce-scatter: a ring in tree order, which enters and leaves each host once.

    It has one unit per rank: rank r gets unit r, reduced. The engine maps units to parts of any sizes.
    """
    spans = tuple(Span(rank, 1) for rank in tree.ranks)
    call = Call("reduce_scatter", tree.ranks, spans)
    levels = (Level((call,), "reduce-scatter over all ranks"),) if tree.size > 1 else ()
    return LogicalPlan("ring", "reduce_scatter", tree.size, tree.size, levels)


@lru_cache(maxsize=64)
def all_to_all_plan(tree: Tree) -> LogicalPlan:
    """The plan of an all-to-all: in round s rank r sends to rank r + s + 1, so that no rank gets two messages at once.

    It has P^2 units: unit s * P + r goes from rank s to rank r. The engine maps units to parts of any sizes, and to
    empty parts if this rank neither sends nor receives them.
    """
    size = tree.size
    spans = tuple(Span(rank * size, size) for rank in range(size))
    levels = (Level((Call("all_to_all", tuple(range(size)), spans),), "all-to-all"),) if size > 1 else ()
    return LogicalPlan("pairwise", "all_to_all", size, size * size, levels)


@lru_cache(maxsize=256)
def prove(plan: LogicalPlan, max_ranks: int = MOST_RANKS) -> bool:
    """Verifies a plan, once in a process; False if it is too large.

    A proof needs the rows of all ranks, so that larger plans are proven only in the tests.

    Raises:
        PlanError: the plan does not compute its collective.
    """
    if plan.size > max_ranks:
        return False
    verify(plan)
    return True
