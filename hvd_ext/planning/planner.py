"""The planner's door for the runtime: which plan, in which grain, and proven. All answers are cached."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hvd_ext.errors import PlanError
from hvd_ext.planning import registry
from hvd_ext.planning.cost import MESSAGE_NBYTES, Profile, level_profile, profile
from hvd_ext.planning.model import Call, Level, LogicalPlan, Span
from hvd_ext.planning.verify import verify
from hvd_ext.topology.tree import Node, Tree

DEFAULT_NBYTES = 8 << 20
SMALLEST_SEGMENT_NBYTES = 32 << 10
LARGEST_SEGMENT_NBYTES = 4 << 20
SEGMENT_ALIGNMENT = 64  # a multiple of every dtype's size, and a cache line
# A chain moves each byte once over each port but takes d - 1 rounds; above this size a broadcast halves its way
# instead.
LONGEST_CHAIN = 16
# The rows of all ranks are looked at, to price and to prove a plan, in jobs of up to this size.
MOST_RANKS = 64
# Prices this near to each other are a tie: then the simplest plan, the ring, wins.
TIE = 0.01
MOST_NAMED = 3  # losers in the line that explains a choice


@dataclass(frozen=True, slots=True)
class Chosen:
    """A plan and how it was found.

    Args:
        plan: of an allreduce.
        algorithm: its schedule.
        why: one line.
        candidates: for every schedule its name and its price in seconds, or the reason why it does not apply.
    """

    plan: LogicalPlan
    algorithm: str
    why: str
    candidates: tuple[tuple[str, float | str], ...]


@lru_cache(maxsize=1024)
def allreduce_plan(tree: Tree, algorithm: str = "auto", nbytes: int = DEFAULT_NBYTES) -> Chosen:
    """Chooses the plan of an allreduce.

    Args:
        tree: the cluster.
        algorithm: a schedule's name, or "auto": the cheapest at `nbytes`. The price is that of the plan as it runs,
            pipelined: up to 64 ranks from the rows of all ranks, above from the calls of its levels.
        nbytes: typical size of a buffer, for example of a bucket.

    Returns:
        The choice, with its reason.

    Raises:
        PlanError: no schedule has that name, or it does not support the cluster.
    """
    candidates: list[tuple[str, float | str]] = []
    for name in registry.names():
        schedule = registry.get(name)
        reason = schedule.supports(tree)
        candidates.append((name, _price_s(tree, name, nbytes) if reason is None else reason))
    if algorithm == "auto":
        name, why = _cheapest(tree, candidates, nbytes)
    else:
        name, why = algorithm, "asked for by name"
        reason = registry.get(name).supports(tree)
        if reason is not None:
            raise PlanError(f"algorithm {name!r} on {tree.describe()}: {reason}; choose another one, or 'auto'")
    plan = _built(tree, name)
    return Chosen(plan, name, why + (f"; {plan.note}" if plan.note else ""), tuple(candidates))


def _price_s(tree: Tree, name: str, nbytes: int) -> float:
    return profile_of(tree, name).price_s(nbytes, segment_nbytes(_built(tree, name), nbytes))


@lru_cache(maxsize=64)
def profile_of(tree: Tree, name: str) -> Profile:
    """How a schedule's plan loads a cluster.

    Args:
        tree: the cluster.
        name: of a schedule that supports it.

    Returns:
        The load, as the choice takes it.
    """
    return (profile if tree.size <= MOST_RANKS else level_profile)(_built(tree, name), tree)


@lru_cache(maxsize=64)
def _built(tree: Tree, name: str) -> LogicalPlan:
    return registry.get(name).build(tree)


def _cheapest(tree: Tree, candidates: list[tuple[str, float | str]], nbytes: int) -> tuple[str, str]:
    prices = {name: price for name, price in candidates if not isinstance(price, str)}
    best = min(prices.values())
    tied = [name for name, price in prices.items() if price <= best * (1 + TIE)]
    name = "ring" if "ring" in tied else min(tied, key=lambda other: (prices[other], other))
    nearest = sorted(prices, key=lambda other: (other != name, prices[other], other))[: 1 + MOST_NAMED]
    listed = ", ".join(f"{other} {prices[other] * 1e3:.3g} ms" for other in nearest)
    return name, f"cheapest for {nbytes} bytes on {tree.describe()}: {listed}"


@lru_cache(maxsize=64)
def all_gather_plan(tree: Tree) -> LogicalPlan:
    """The plan of an all-gather: a ring in tree order, which enters and leaves each host once.

    Args:
        tree: the cluster.

    Returns:
        A plan with one unit per rank; unit r belongs to rank r, of whatever size the engine maps it to.
    """
    spans = tuple(Span(rank, 1) for rank in tree.ranks)
    levels = (Level((Call("all_gather", tree.ranks, spans),), "all-gather over all ranks"),) if tree.size > 1 else ()
    return LogicalPlan("ring", "all_gather", tree.size, tree.size, levels)


@lru_cache(maxsize=256)
def broadcast_plan(tree: Tree, root: int) -> LogicalPlan:
    """The plan of a broadcast: from the root to one rank of each rack, then of each host, then to all ranks of a host.

    Args:
        tree: the cluster.
        root: the rank that has the data.

    Returns:
        A plan of one unit; each link between hosts carries the buffer once.

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
    """From a node's head to the heads of its children; a head is the root where that is below, else the first rank."""
    heads = tuple(root if root in child.ranks else child.ranks[0] for child in node.children)
    head = root if root in heads else heads[0]
    return Call("broadcast", heads, (Span(0, 1),), head, "ring" if len(heads) <= LONGEST_CHAIN else "recursive")


def segment_nbytes(plan: LogicalPlan, nbytes: int) -> int:
    """The grain of pipelining: bytes of a segment such that the plan's messages are about 60,000 bytes.

    A plan has messages of different sizes (large inside a host, small between hosts): their geometric mean counts.

    Args:
        plan: any plan.
        nbytes: of the buffer, 0 or more.

    Returns:
        A multiple of 64, between 32 KiB and 4 MiB, that cuts the buffer into equal segments; the whole buffer where
        the plan sends nothing.
    """
    shares = _message_shares(plan)
    if shares is None:
        return _aligned(max(nbytes, 1))
    wanted = int(MESSAGE_NBYTES / (shares[0] * shares[1]) ** 0.5)
    grain = min(max(wanted, SMALLEST_SEGMENT_NBYTES), LARGEST_SEGMENT_NBYTES)
    segments = max(-(-nbytes // grain), 1)
    return min(max(_aligned(-(-nbytes // segments)), SMALLEST_SEGMENT_NBYTES), LARGEST_SEGMENT_NBYTES)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT


@lru_cache(maxsize=64)
def _message_shares(plan: LogicalPlan) -> tuple[float, float] | None:
    """The smallest and the largest level's mean message, as shares of the buffer; None if nothing is sent."""
    shares = []
    for level in plan.levels:
        messages = [_messages(call) for call in level.calls if len(call.ranks) > 1]
        units, count = (sum(parts) for parts in zip(*messages, strict=True)) if messages else (0, 0)
        if units:
            shares.append(units / count / plan.units)
    return (min(shares), max(shares)) if shares else None


def _messages(call: Call) -> tuple[float, int]:
    """Units and number of the messages of a call, in the mean over its ranks."""
    spans = [span.count for span in call.spans if span.count]
    if call.method == "recursive" and call.root < 0:
        # Halving: ceil(log2 d) messages hold what a ring sends in d - 1.
        d = len(call.ranks)
        return sum(spans) * (d - 1) / d, (d - 1).bit_length() if spans else 0
    if call.kind == "all_to_all":
        return sum(spans), len(spans) * len(call.ranks)
    return sum(spans), len(spans)


@lru_cache(maxsize=64)
def reduce_scatter_plan(tree: Tree) -> LogicalPlan:
    """The plan of a reduce-scatter: a ring in tree order, which enters and leaves each host once.

    Args:
        tree: the cluster.

    Returns:
        A plan with one unit per rank: unit r ends, reduced, on rank r, of whatever size the engine maps it to.
    """
    spans = tuple(Span(rank, 1) for rank in tree.ranks)
    call = Call("reduce_scatter", tree.ranks, spans)
    levels = (Level((call,), "reduce-scatter over all ranks"),) if tree.size > 1 else ()
    return LogicalPlan("ring", "reduce_scatter", tree.size, tree.size, levels)


@lru_cache(maxsize=64)
def all_to_all_plan(tree: Tree) -> LogicalPlan:
    """The plan of an all-to-all: in round s each rank sends to the one s + 1 on, so no rank gets two messages at once.

    Args:
        tree: the cluster.

    Returns:
        A plan of P^2 units: unit s * P + r goes from rank s to rank r. The engine maps units to uneven sizes, and to
        none where neither is this rank.
    """
    size = tree.size
    spans = tuple(Span(rank * size, size) for rank in range(size))
    levels = (Level((Call("all_to_all", tuple(range(size)), spans),), "all-to-all"),) if size > 1 else ()
    return LogicalPlan("pairwise", "all_to_all", size, size * size, levels)


@lru_cache(maxsize=256)
def prove(plan: LogicalPlan, max_ranks: int = MOST_RANKS) -> bool:
    """Verifies a plan once in a process.

    Args:
        plan: any plan.
        max_ranks: larger plans are left to the tests, because a proof looks at the rows of all ranks.

    Returns:
        True if the plan was verified, False if it is too large.

    Raises:
        PlanError: the plan does not do what it says.
    """
    if plan.size > max_ranks:
        return False
    verify(plan)
    return True
