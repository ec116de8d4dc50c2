"""The traffic and the price of a plan from its calls, for clusters that have too many rows.

Each level is priced as a whole, by the traffic of its calls over each port and one latency per round. The busiest port
over the whole plan, which decides on large buffers, is exact. The time of the first segment is exact if one port is the
busiest in all rounds of a level, as in rings; otherwise it is estimated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_ext.planning.cost.loads import (
    Ports,
    Profile,
    exchanged_s_per_byte,
    messages_s as _messages_s,
    profile,
)
from hvd_ext.planning.cost.sparse import DENSE, Sparsity
from hvd_ext.planning.cost.sparse_levels import (
    all_to_all_units,
    local_of_call,
    message_rounds,
    messages_of_call,
    vectors_at,
)
from hvd_ext.planning.limits import MOST_RANKS
from hvd_ext.planning.model import LOCAL, SPARSE, Call, Level, LogicalPlan
from hvd_ext.topology.tree import Tree

_Ints = NDArray[np.int64]
# Senders and receivers as places in a group, and the units of each message, which are fractions for sparse vectors.
_Messages = tuple[_Ints, _Ints, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Traffic:
    """A plan's traffic over one kind of link, the ports at one depth of the tree; bytes are multiples of the buffer.

    Args:
        depth: the depth of the branch that the link belongs to; 0 is the root.
        total: the traffic over all ports in both directions.
        busiest: the traffic over the port and direction with the most bytes.
        busiest_s_per_byte: the time for which the slowest port and direction is busy, per byte of the buffer.
        bottleneck: the traffic over this slowest port and direction.
    """

    depth: int
    total: float
    busiest: float
    busiest_s_per_byte: float
    bottleneck: float


@lru_cache(maxsize=256)
def load_of(plan: LogicalPlan, tree: Tree, sparsity: Sparsity = DENSE) -> Profile:
    """The load of a plan on a cluster.

    It is made from the rows of all ranks up to 64 ranks, and from the calls of the levels above.
    """
    return (profile if tree.size <= MOST_RANKS else level_profile)(plan, tree, sparsity)


def level_profile(plan: LogicalPlan, tree: Tree, sparsity: Sparsity = DENSE) -> Profile:
    """Counts what a plan sends over each port of a cluster, level by level."""
    ports = Ports(tree)
    latency_s, levels_s_per_byte, messages_s = 0.0, 0.0, 0.0
    port_s, rank_s = np.zeros(2 * len(ports.alpha_s)), np.zeros(plan.size)
    betas, sharing = np.repeat(ports.beta_s_per_byte, 2), np.array(tree.sharing)
    for level, vectors in zip(plan.levels, vectors_at(plan), strict=True):
        local = np.zeros(plan.size)
        for call in level.calls:
            if call.kind in (*LOCAL, *SPARSE):
                local[list(call.ranks)] += local_of_call(call, sparsity, vectors) / plan.units
        local *= sharing
        levels_s_per_byte += float(local.max())
        rank_s += local
        senders, receivers, units = _level(level, sparsity)
        messages, crossed = ports.crossed(senders, receivers)
        others = all_to_all_units(level, ports.ways, len(ports.depths), sparsity, vectors) / plan.units
        used = np.concatenate((crossed, np.flatnonzero(others)))
        if not len(used):
            continue
        shares = units / plan.units
        loads = (np.bincount(crossed, shares[messages], len(betas)) + others) * betas
        reduces = any(call.kind in ("reduce", "reduce_scatter", "exchange") for call in level.calls)
        reductions = np.bincount(receivers, shares, plan.size) * (tree.gamma_s_per_byte if reduces else 0.0)
        if any(call.kind == "exchange" for call in level.calls):
            exchanged_s = exchanged_s_per_byte(tree, ports, senders, receivers)
            reductions += np.bincount(receivers, shares * exchanged_s, plan.size)
        latency_s += message_rounds(level) * float(ports.alpha_s[used // 2].max())
        listed_s = float(_messages_s(tree, senders, receivers).max(initial=0.0))
        busy_s = tree.message_s if others.any() else listed_s
        messages_s += 2 * message_rounds(level) * busy_s  # one message each way in each round
        chain = _longest_chain(level) / plan.units * float(ports.beta_s_per_byte[used // 2].max())
        levels_s_per_byte += max(float(loads.max()), chain) + float(reductions.max())
        port_s += loads
        rank_s += reductions
    latency_s += messages_s + tree.handover.alpha_s
    busiest = float(max(port_s.max(), rank_s.max()))
    return Profile(latency_s, levels_s_per_byte, busiest, messages_s, tree.handover.beta_s_per_byte)


def _longest_chain(level: Level) -> int:
    """The largest product of units and hops over all rings with one target, whose hops follow one another."""
    chains = [c for c in level.calls if c.root >= 0 and c.method == "ring"]
    return max(((len(call.ranks) - 1) * call.spans[0].count for call in chains), default=0)


@lru_cache(maxsize=64)
def traffic(plan: LogicalPlan, tree: Tree, sparsity: Sparsity = DENSE) -> tuple[Traffic, ...]:
    """Adds up what a plan sends over each kind of link: the traffic at each depth of the tree, from the root down."""
    ports = Ports(tree)
    carried = np.zeros(2 * len(ports.depths))
    for level, vectors in zip(plan.levels, vectors_at(plan), strict=True):
        senders, receivers, units = _level(level, sparsity)
        messages, crossed = ports.crossed(senders, receivers)
        carried += np.bincount(crossed, units[messages] / plan.units, len(carried))
        carried += all_to_all_units(level, ports.ways, len(ports.depths), sparsity, vectors) / plan.units
    betas = np.repeat(ports.beta_s_per_byte, 2)
    kinds = []
    for depth in range(tree.depth):
        chosen = np.repeat(ports.depths == depth, 2)
        here, busy = carried[chosen], (carried * betas)[chosen]
        longest = int(np.lexsort((here, busy))[-1])
        shares = float(here.sum()), float(here.max()), float(busy[longest]), float(here[longest])
        kinds.append(Traffic(depth, *shares))
    return tuple(kinds)


def bottleneck(plan: LogicalPlan, tree: Tree, sparsity: Sparsity = DENSE) -> Traffic:
    """Finds the traffic over the kind of link whose busiest port is busy for longest; no bytes if the plan sends none.

    Of equals it is the kind nearest to the root.
    """
    kinds = [kind for kind in traffic(plan, tree, sparsity) if kind.total]
    return max(kinds, key=lambda kind: kind.busiest_s_per_byte, default=Traffic(0, 0.0, 0.0, 0.0, 0.0))


def _level(level: Level, sparsity: Sparsity) -> _Messages:
    """The messages of a level between ranks, except for kinds in which all send to all.

    Entries count as the units that have as many bytes.
    """
    # By group (its id(): large plans share tuples) and direction: the ranks, and the units of each hop of a ring.
    rings: dict[tuple[int, bool], tuple[_Ints, _Ints]] = {}
    messages: list[_Messages] = [(np.empty(0, dtype=np.int64),) * 3]
    for call in level.calls:
        if call.kind in LOCAL:
            continue
        if call.kind in SPARSE:
            messages.append(messages_of_call(call, sparsity))
            continue
        backwards = call.kind in ("all_gather", "broadcast")
        key = (id(call.ranks), backwards)
        if key not in rings:
            rings[key] = np.array(call.ranks, dtype=np.int64), np.zeros(len(call.ranks), dtype=np.int64)
        ranks, hops = rings[key]
        if call.method == "ring" and call.kind not in ("exchange", "all_to_all"):
            _add_ring(call, hops)
        else:
            for senders, receivers, units in _of_call(call):
                origins, targets = ranks[senders], ranks[receivers]
                messages.append((targets, origins, units) if backwards else (origins, targets, units))
        if call.root >= 0 and call.root not in call.ranks:
            giver, root = np.array([call.ranks[-1]]), np.array([call.root])
            ends = (root, giver) if backwards else (giver, root)
            messages.append((*ends, np.array([call.spans[0].count])))
    for (_, backwards), (ranks, hops) in rings.items():
        following = np.concatenate((ranks[1:], ranks[:1]))
        messages.append((following, ranks, hops) if backwards else (ranks, following, hops))
    senders, receivers, units = (np.concatenate(parts) for parts in zip(*messages, strict=True))
    sent = units > 0
    return senders[sent], receivers[sent], units[sent]


def _add_ring(call: Call, hops: _Ints) -> None:
    """Adds a ring's units to each hop. All chains use the hop from a place to the next, except those that end there."""
    if call.root < 0:
        counts = np.array([span.count for span in call.spans], dtype=np.int64)
        hops += counts.sum() - counts
    else:
        hops += call.spans[0].count
        hops[call.target] -= call.spans[0].count


def _of_call(call: Call) -> list[_Messages]:
    """The messages of an exchange, an all_to_all, or a recursive or direct reduction, whose reverse is a gather."""
    size = len(call.ranks)
    places = np.arange(size, dtype=np.int64)
    counts = np.array([span.count for span in call.spans], dtype=np.int64)
    if call.kind == "exchange":
        return [(places, places[::-1], np.repeat(counts, 2))]
    if call.kind == "all_to_all":
        senders, receivers = np.repeat(places, size), np.tile(places, size)
        return [(senders, receivers, np.where(senders == receivers, 0, np.repeat(counts // size, size)))]
    owned = counts if call.root < 0 else np.where(places == call.target, counts[0], 0)
    if call.method == "direct":
        owners = np.flatnonzero(owned)
        senders, receivers = np.repeat(places, len(owners)), np.tile(owners, size)
        return [(senders, receivers, np.where(senders == receivers, 0, owned[receivers]))]
    messages = []
    around = np.concatenate(([0], np.cumsum(np.tile(owned, 2))))
    for step in range((size - 1).bit_length()):
        half = 1 << step
        # The units whose targets are [half, 2 half) places behind are sent over the distance `half`.
        units = around[places + size - half + 1] - around[places + size - min(2 * half, size) + 1]
        messages.append((places, (places - half) % size, units))
    return messages
