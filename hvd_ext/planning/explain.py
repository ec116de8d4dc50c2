"""The prices of all algorithms on a cluster, and the reason for the choice, for `python -m hvd_ext plan`."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from hvd_ext.planning import planner, registry
from hvd_ext.planning.cost import Sparsity, allreduce_bound_s, load_of, traffic
from hvd_ext.planning.cost.sparse import DENSE
from hvd_ext.planning.grain import segment_nbytes
from hvd_ext.planning.limits import MOST_RANKS, MOST_SIMULATED, size_class
from hvd_ext.planning.lower import rounds_of, rounds_of_level
from hvd_ext.planning.model import Call, LogicalPlan
from hvd_ext.planning.planner import Choice
from hvd_ext.topology.tree import MEDIA, Link, Node, Tree

MOST_DRAWN = 32
_BAR = 48
_BETWEEN = ("", "in hosts", "between hosts", "between racks")


@dataclass(frozen=True, slots=True)
class LinkKind:
    """The links of one kind, such as those between hosts.

    Args:
        kind: "in hosts", "between hosts", ...
        bits_per_s: the rates of the slowest and the fastest link, per direction; None if a rate is unlimited.
        alpha_s: the lowest and the highest latency of a message, seconds.
    """

    kind: str
    bits_per_s: tuple[float | None, float | None]
    alpha_s: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Load:
    """A plan's traffic over one kind of link.

    Args:
        busiest_nbytes: the bytes over the busiest port, in its busier direction.
        total_nbytes: the bytes over all ports, in both directions.
    """

    kind: str
    busiest_nbytes: int
    total_nbytes: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One algorithm on a cluster; if it does not apply, its values are None and its loads are empty.

    Args:
        loads: the loads of each kind of link, from the root down.
        verdict: the reason why the algorithm won, lost, or does not apply.
    """

    name: str
    price_s: float | None
    rounds: int | None
    loads: tuple[Load, ...]
    verdict: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """All algorithms on a cluster at one size.

    Args:
        links: the links of the cluster, by kind from the root down.
        chosen_for_nbytes: the size at which "auto" chooses, which stands for all similar sizes.
        bound_s: the time that no dense allreduce on the cluster can beat (cost/bounds.py), seconds.
        entries: the winner, the other algorithms by price, then those that do not apply.
    """

    cluster: str
    links: tuple[LinkKind, ...]
    nbytes: int
    chosen_for_nbytes: int
    winner: str
    why: str
    pricing: str
    bound_s: float
    entries: tuple[Entry, ...]


def explain(tree: Tree, nbytes: int) -> Explanation:
    """Prices every algorithm as the runtime does."""
    chosen = planner.allreduce_plan(tree, "auto", nbytes)
    names = [name for name, price in chosen.candidates if not isinstance(price, str)]
    prices = {name: planner.price(tree, name, nbytes).seconds for name in names}
    plans = {name: chosen.plan if name == chosen.algorithm else registry.get(name).build(tree) for name in prices}
    parts = {name: _parts(plan, tree, nbytes, prices[name]) for name, plan in plans.items()}
    chosen_for = size_class(nbytes)
    entries = []
    for name in sorted(prices, key=lambda other: (other != chosen.algorithm, prices[other], other)):
        verdict = _verdict(tree, chosen, name, prices, parts, chosen_for)
        plan = plans[name]
        entries.append(Entry(name, prices[name], rounds_of(plan), loads(plan, tree, nbytes), verdict, plan.note))
    entries += [
        Entry(name, None, None, (), f"does not apply: {reason}")
        for name, reason in chosen.candidates
        if isinstance(reason, str)
    ]
    bound_s = allreduce_bound_s(tree, nbytes)
    facts = (tree.describe(), links(tree), nbytes, chosen_for, chosen.algorithm, chosen.why, pricing(tree), bound_s)
    return Explanation(*facts, tuple(entries))


def pricing(tree: Tree, grain: str = "pipelined") -> str:
    """Describes, in words, the method that finds prices."""
    how = "round by round" if tree.size <= MOST_RANKS else "level by level"
    how = "simulated message by message" if tree.size <= MOST_SIMULATED else how
    return f"the plan as it runs, {grain}, {how}"


def kinds(tree: Tree) -> tuple[str, ...]:
    """Names the kinds of links of a cluster, one for each depth, from the root down."""
    return tuple(_kind(*max(map(_place, nodes))) for nodes in reversed(tree.levels()))


def _place(node: Node) -> tuple[int, int]:
    """Give the place of a node among the kinds, ascending: its height, and which medium it has."""
    return node.height, MEDIA.index(node.medium) if node.medium else -1


def _kind(height: int, medium: int) -> str:
    name = _BETWEEN[height] if height < len(_BETWEEN) else f"level {height}"
    return name if medium < 0 else f"{name}, {MEDIA[medium]}"


def links(tree: Tree) -> tuple[LinkKind, ...]:
    """The kinds of links of a cluster, from the root down, without links that join only one child."""
    joining: dict[tuple[int, int], list[Link]] = {}
    for node in (node for nodes in tree.levels() for node in nodes if len(node.children) > 1):
        joining.setdefault(_place(node), []).extend(node.ports)  # not by depth, because hosts may have different depths
    kinds_of_links = []
    for place, joined in sorted(joining.items(), reverse=True):
        betas, alphas = sorted(link.beta_s_per_byte for link in joined), sorted(link.alpha_s for link in joined)
        slowest, fastest = (8 / beta if beta else None for beta in (betas[-1], betas[0]))
        kinds_of_links.append(LinkKind(_kind(*place), (slowest, fastest), (alphas[0], alphas[-1])))
    return tuple(kinds_of_links)


def loads(plan: LogicalPlan, tree: Tree, nbytes: int, sparsity: Sparsity = DENSE) -> tuple[Load, ...]:
    """A plan's traffic over each kind of link, from the root down."""
    return tuple(
        Load(kind, round(carried.busiest * nbytes), round(carried.total * nbytes))
        for kind, carried in zip(kinds(tree), traffic(plan, tree, sparsity), strict=True)
    )


def _parts(plan: LogicalPlan, tree: Tree, nbytes: int, price_s: float) -> dict[str, float]:
    """The parts of a price, as Profile.price_s() adds them up, and what a simulation adds to them, seconds."""
    load, grain = load_of(plan, tree), min(segment_nbytes(plan, nbytes, tree), nbytes)
    parts = {
        "rounds": load.latency_s,
        "first segment": grain * load.rounds_s_per_byte,
        "busiest port": (nbytes - grain) * load.pace_s_per_byte(grain),
    }
    return {**parts, "waiting": price_s - sum(parts.values())}


def _verdict(
    tree: Tree, chosen: Choice, name: str, prices: dict[str, float], parts: dict[str, dict[str, float]], chosen_for: int
) -> str:
    winner = chosen.algorithm
    if name == winner:
        least = min(prices.values())
        if prices[name] > least * (1 + planner.TIE):
            return f"chosen: cheapest for {chosen_for} bytes, which stands for all sizes near it"
        tie = prices[name] > least
        better = "simpler" if name == "ring" else "lighter on the other links"
        return f"chosen: within {planner.TIE:.0%} of the cheapest, and {better}" if tie else "chosen: cheapest"
    if prices[name] <= prices[winner] * (1 + planner.TIE):
        if prices[name] * (1 + planner.TIE) < prices[winner]:
            return "cheaper"
        return f"a tie within {planner.TIE:.0%}: {winner} {planner.preference(tree, chosen, name)}"
    longer_s = {part: seconds - parts[winner][part] for part, seconds in parts[name].items()}
    part = max(longer_s, key=lambda part: longer_s[part])
    return f"{prices[name] / prices[winner]:.2f} x, {part} +{longer_s[part] * 1e3:.3g} ms"


def as_json(explanation: Explanation) -> dict[str, object]:
    """Converts an explanation to values that JSON can hold; times are in seconds, sizes in bytes."""
    values = asdict(explanation)
    values["algorithms"] = values.pop("entries")
    for entry in values["algorithms"]:
        entry["links"] = entry.pop("loads")
    return values


def draw(plan: LogicalPlan) -> str:
    """Draws, for at most 32 ranks, the parts of the buffer that each rank receives in each level of a plan.

    Returns:
        For each level a title, and for each rank that takes part a bar of the buffer, with # for the units that the
        level leaves complete on the rank.
    """
    width = min(plan.units, _BAR)
    ranks, units = (f"{n} {word}{'s' if n > 1 else ''}" for n, word in ((plan.size, "rank"), (plan.units, "unit")))
    lines = [f"{plan.algorithm}: {plan.collective} of {ranks}, {units}"]
    if plan.note:
        lines.append(f"  {plan.note}")
    for number, level in enumerate(plan.levels):
        rounds = rounds_of_level(level)
        lines.append(f"level {number}: {level.name} ({rounds} round{'s' if rounds > 1 else ''})")
        bars: dict[int, list[str]] = {}
        groups: dict[int, list[str]] = {}
        for call in level.calls:
            for rank in sorted({*call.ranks, *([call.root] if call.root >= 0 else [])}):
                bar = bars.setdefault(rank, ["."] * width)
                for begin, end in _received(call, rank):
                    first, last = begin * width // plan.units, -(-end * width // plan.units)
                    bar[first:last] = "#" * (last - first)
                name = "{" + " ".join(map(str, sorted(call.ranks))) + "}"
                if name not in groups.setdefault(rank, []):
                    groups[rank].append(name)
        lines += [f"  rank {rank:>3} |{''.join(bars[rank])}| {' '.join(groups[rank])}" for rank in sorted(bars)]
    return "\n".join(lines)


def _received(call: Call, rank: int) -> list[tuple[int, int]]:
    """The ranges of units, as begin and end, that a call leaves complete on a rank."""
    if call.kind in ("reduce", "sparse_merge"):
        ends_on = call.root if call.kind == "reduce" else call.ranks[0]
        return [(call.spans[0].begin, call.spans[0].end)] if rank == ends_on else []
    if call.kind == "reduce_scatter":
        span = call.spans[call.ranks.index(rank)]
        return [(span.begin, span.end)]
    if call.kind == "all_to_all":
        place, size = call.ranks.index(rank), len(call.ranks)
        widths = [(span.begin, span.count // size) for span in call.spans]
        return [(begin + place * width, begin + (place + 1) * width) for begin, width in widths]
    return [(span.begin, span.end) for span in call.spans]
