"""What the calls of a plan send, and its price, without its rows: for clusters whose rows are too many to look at.

Each level is taken as a whole: what its calls send over each port, and as many latencies as it has rounds. The busiest
port over the whole plan, which decides on large buffers, is exact; the way of the first segment is exact where one port
is the busiest in all rounds of a level, as in rings, and else estimated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_ext.planning.cost.loads import Ports, Profile
from hvd_ext.planning.cost.sparse import DENSE, Sparsity
from hvd_ext.planning.cost.sparse_levels import (
    all_to_all_units,
    local_of_call,
    message_rounds,
    messages_of_call,
    vectors_at,
)
from hvd_ext.planning.model import LOCAL, SPARSE, Call, Level, LogicalPlan
from hvd_ext.topology.tree import Tree

_Ints = NDArray[np.int64]
# Senders and receivers as places of a group, and units, which may be parts of units where entries are sent.
_Messages = tuple[_Ints, _Ints, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a plan sends over one kind of link: the ports at one depth of the tree.

    Args:
        depth: of the branch that the link belongs to; 0 is the root.
        total: over all ports, both ways, as a multiple of the buffer.
        busiest: over the port and direction that carries most, as a multiple of the buffer.
        busiest_s_per_byte: how long the port and direction is busy that is so for longest, per byte of the buffer.
        bottleneck: what that port carries in that direction, as a multiple of the buffer.
    """

    depth: int
    total: float
    busiest: float
    busiest_s_per_byte: float
    bottleneck: float


def level_profile(plan: LogicalPlan, tree: Tree, sparsity: Sparsity = DENSE) -> Profile:
    """Counts what a plan sends over each port of a cluster, level by level.

    Args:
        plan: of tree.size ranks, as many as you like.
        tree: the cluster; its gamma_s_per_byte prices the reductions.
        sparsity: the sparsity of the step, for sparse plans.

    Returns:
        The load.
    """
    ports = Ports(tree)
    latency_s, levels_s_per_byte = 0.0, 0.0
    port_s, rank_s = np.zeros(2 * len(ports.alpha_s)), np.zeros(plan.size)
    betas = np.repeat(ports.beta_s_per_byte, 2)
    for level, vectors in zip(plan.levels, vectors_at(plan), strict=True):
        local = np.zeros(plan.size)
        for call in level.calls:
            if call.kind in (*LOCAL, *SPARSE):
                local[list(call.ranks)] += local_of_call(call, sparsity, vectors) / plan.units
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
        latency_s += message_rounds(level) * float(ports.alpha_s[used // 2].max())
        chain = _longest_chain(level) / plan.units * float(ports.beta_s_per_byte[used // 2].max())
        levels_s_per_byte += max(float(loads.max()), chain) + float(reductions.max())
        port_s += loads
        rank_s += reductions
    return Profile(latency_s, levels_s_per_byte, float(max(port_s.max(), rank_s.max())))


def _longest_chain(level: Level) -> int:
    """Units times hops of the call that takes longest for one target: its hops come one after the other."""
    chains = [c for c in level.calls if c.root >= 0 and c.method == "ring"]
    return max(((len(call.ranks) - 1) * call.spans[0].count for call in chains), default=0)


@lru_cache(maxsize=64)
def traffic(plan: LogicalPlan, tree: Tree, sparsity: Sparsity = DENSE) -> tuple[Traffic, ...]:
    """Adds up what a plan sends over each kind of link.

    Args:
        plan: a plan for tree.size ranks.
        tree: the cluster.
        sparsity: the sparsity of the step, for sparse plans.

    Returns:
        For each depth of the tree from the root down; the multiples are of the buffer.
    """
    ports = Ports(tree)
    carried = np.zeros(2 * len(ports.depths))
    for level, vectors in zip(plan.levels, vectors_at(plan), strict=True):
        senders, receivers, units = _level(level, sparsity)
        messages, crossed = ports.crossed(senders, receivers)
        carried += np.bincount(crossed, units[messages] / plan.units, len(carried))
        carried += all_to_all_units(level, ports.ways, len(ports.depths), sparsity, vectors) / plan.units
    betas = np.repeat(ports.beta_s_per_byte, 2)
    found = []
    for depth in range(tree.depth):
        chosen = np.repeat(ports.depths == depth, 2)
        here, busy = carried[chosen], (carried * betas)[chosen]
        longest = int(np.lexsort((here, busy))[-1])
        shares = float(here.sum()), float(here.max()), float(busy[longest]), float(here[longest])
        found.append(Traffic(depth, *shares))
    return tuple(found)


def bottleneck(plan: LogicalPlan, tree: Tree, sparsity: Sparsity = DENSE) -> Traffic | None:
    """Finds the kind of link whose busiest port is busy for longest.

    Args:
        plan: a plan for tree.size ranks.
        tree: the cluster.
        sparsity: the sparsity of the step, for sparse plans.

    Returns:
        The traffic over it, of equals that nearest to the root; None where the plan sends nothing.
    """
    kinds = [found for found in traffic(plan, tree, sparsity) if found.total]
    return max(kinds, key=lambda found: found.busiest_s_per_byte, default=None)


def _level(level: Level, sparsity: Sparsity) -> _Messages:
    """All messages of a level that can be listed: ranks instead of places; entries count as the units that hold as many
    bytes."""
    # By group (its id(), as large plans share tuples) and direction: the ranks, and units over each hop of a ring.
    rings: dict[tuple[int, bool], tuple[_Ints, _Ints]] = {}
    found: list[_Messages] = [(np.empty(0, dtype=np.int64),) * 3]
    for call in level.calls:
        if call.kind in LOCAL:
            continue
        if call.kind in SPARSE:
            found.append(messages_of_call(call, sparsity))
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
                one, two = ranks[senders], ranks[receivers]
                found.append((two, one, units) if backwards else (one, two, units))
        if call.root >= 0 and call.root not in call.ranks:
            giver, root = np.array([call.ranks[-1]]), np.array([call.root])
            ends = (root, giver) if backwards else (giver, root)
            found.append((*ends, np.array([call.spans[0].count])))
    for (_, backwards), (ranks, hops) in rings.items():
        following = np.roll(ranks, -1)
        found.append((following, ranks, hops) if backwards else (ranks, following, hops))
    senders, receivers, units = (np.concatenate(parts) for parts in zip(*found, strict=True))
    sent = units > 0
    return senders[sent], receivers[sent], units[sent]


def _add_ring(call: Call, hops: _Ints) -> None:
    """Every chain uses the hop from a place to the next, but for the one that ends at this place."""
    if call.root < 0:
        counts = np.array([span.count for span in call.spans], dtype=np.int64)
        hops += counts.sum() - counts
    else:
        hops += call.spans[0].count
        hops[call.ranks.index(call.root) if call.root in call.ranks else -1] -= call.spans[0].count


def _of_call(call: Call) -> list[_Messages]:
    """The messages of a recursive or direct reduction, of which a gather is the reverse, and of the other kinds."""
    size = len(call.ranks)
    places = np.arange(size, dtype=np.int64)
    counts = np.array([span.count for span in call.spans], dtype=np.int64)
    if call.kind == "exchange":
        return [(places, places[::-1], np.repeat(counts, 2))]
    if call.kind == "all_to_all":
        senders, receivers = np.repeat(places, size), np.tile(places, size)
        return [(senders, receivers, np.where(senders == receivers, 0, np.repeat(counts // size, size)))]
    if call.root < 0:
        owned = counts
    else:
        target = call.ranks.index(call.root) if call.root in call.ranks else size - 1
        owned = np.where(places == target, counts[0], 0)
    if call.method == "direct":
        owners = np.flatnonzero(owned)
        senders, receivers = np.repeat(places, len(owners)), np.tile(owners, size)
        return [(senders, receivers, np.where(senders == receivers, 0, owned[receivers]))]
    found = []
    around = np.concatenate(([0], np.cumsum(np.tile(owned, 2))))
    for step in range((size - 1).bit_length()):
        half = 1 << step
        # What ends at distance [half, 2 half) behind goes half as far.
        units = around[places + size - half + 1] - around[places + size - min(2 * half, size) + 1]
        found.append((places, (places - half) % size, units))
    return found
