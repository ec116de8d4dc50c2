"""The price of a plan from its calls, without its rows: for clusters whose rows are too many to look at.

Each level is taken as a whole: what its calls send over each port, and as many latencies as it has rounds. The busiest
port over the whole plan, which decides on large buffers, is exact; the way of the first segment is exact where one port
is the busiest in all rounds of a level, as in rings, and else a little short.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hvd_ext.planning.cost.loads import Ports, Profile
from hvd_ext.planning.lower import rounds_of_level
from hvd_ext.planning.model import Call, Level, LogicalPlan
from hvd_ext.topology.tree import Tree

_Ints = NDArray[np.int64]
# Senders and receivers as places of a group, and units.
_Messages = tuple[_Ints, _Ints, _Ints]


def level_profile(plan: LogicalPlan, tree: Tree) -> Profile:
    """Counts what a plan sends over each port of a cluster, level by level.

    Args:
        plan: of tree.size ranks, as many as you like.
        tree: the cluster; its gamma_s_per_byte prices the reductions.

    Returns:
        The load.
    """
    ports = Ports(tree)
    latency_s, levels_s_per_byte = 0.0, 0.0
    port_s, rank_s = np.zeros(2 * len(ports.alpha_s)), np.zeros(plan.size)
    betas = np.repeat(ports.beta_s_per_byte, 2)
    for level in plan.levels:
        senders, receivers, units = _level(level)
        messages, crossed = ports.crossed(senders, receivers)
        if not len(crossed):
            continue
        shares = units / plan.units
        loads = np.bincount(crossed, shares[messages], len(betas)) * betas
        reductions = np.zeros(plan.size)
        if any(call.kind in ("reduce", "reduce_scatter", "exchange") for call in level.calls):
            reductions = np.bincount(receivers, shares, plan.size) * tree.gamma_s_per_byte
        latency_s += rounds_of_level(level) * float(ports.alpha_s[crossed // 2].max())
        levels_s_per_byte += float(loads.max() + reductions.max())
        port_s += loads
        rank_s += reductions
    return Profile(latency_s, levels_s_per_byte, float(max(port_s.max(), rank_s.max())))


def _level(level: Level) -> _Messages:
    """All messages of a level: ranks instead of places."""
    groups: dict[int, _Ints] = {}
    found: list[_Messages] = [(np.empty(0, dtype=np.int64),) * 3]
    for call in level.calls:
        key = id(call.ranks)
        if key not in groups:
            groups[key] = np.array(call.ranks, dtype=np.int64)
        ranks = groups[key]
        backwards = call.kind in ("all_gather", "broadcast")
        for senders, receivers, units in _of_call(call):
            one, two = ranks[senders], ranks[receivers]
            found.append((two, one, units) if backwards else (one, two, units))
        if call.root >= 0 and call.root not in call.ranks:
            giver, root = np.array([call.ranks[-1]]), np.array([call.root])
            ends = (root, giver) if backwards else (giver, root)
            found.append((*ends, np.array([call.spans[0].count])))
    senders, receivers, units = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return senders, receivers, units


def _of_call(call: Call) -> list[_Messages]:
    """The messages of a reduction, of which a gather is the reverse; an exchange and an all_to_all as they are."""
    size = len(call.ranks)
    places = np.arange(size, dtype=np.int64)
    counts = np.array([span.count for span in call.spans], dtype=np.int64)
    if call.kind == "exchange":
        return [(places, places[::-1], np.repeat(counts, 2))]
    if call.kind == "all_to_all":
        senders, receivers = np.repeat(places, size), np.tile(places, size)
        return [(senders, receivers, np.where(senders == receivers, 0, np.repeat(counts // size, size)))]
    if call.root < 0:
        owned, total = counts, int(counts.sum())
    else:
        target = call.ranks.index(call.root) if call.root in call.ranks else size - 1
        owned, total = np.where(places == target, counts[0], 0), int(counts[0])
    if call.method == "ring":
        # Every chain uses the hop from a place to the next, but for the one that ends at this place.
        return [(places, (places + 1) % size, total - owned)]
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
