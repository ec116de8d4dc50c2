"""The grain of pipelining: the size of a buffer's segments, which depends on the kind of link that limits the plan."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np

from hvd_ext.planning.cost import MESSAGE_NBYTES, Traffic, traffic
from hvd_ext.planning.cost.loads import Ports
from hvd_ext.planning.cost.simulate import WINDOW
from hvd_ext.planning.model import Call, LogicalPlan, is_sparse
from hvd_ext.topology.tree import Tree

# Inside a host, messages below an eager limit bring nothing, and each message costs a wake-up.
HOST_MESSAGE_NBYTES = 512 << 10
# Between hosts, a longer message delays the first and the last segment more, and a shorter one costs more CPU time per
# byte; the best size grows with the square root of the rate. Measured on 2 and 3 hosts with 4 to 12 ranks, the best
# sizes were 5 to 16 kB at 100 Mbit/s and 16 to 32 kB at 1 Gbit/s. It stays below the 60 kB that MPI sends at once.
MESSAGE_AT_S_PER_BYTE = (8_000, 8 / 100e6)
SMALLEST_MESSAGE_NBYTES = 4_000
SMALLEST_SEGMENT_NBYTES = 32 << 10
LARGEST_SEGMENT_NBYTES = 4 << 20
SEGMENT_ALIGNMENT = 64  # a multiple of every dtype's size, and a cache line
# On a tree of three or more levels, the stages inside a rack delay those between racks: all segments in flight queue on
# the links between hosts before the first segment reaches the links between racks, and likewise at the end. Segments
# are chosen such that at most this share of the time is lost, but messages are at least half of their best size.
FILL_SHARE = 0.03
FINEST = 0.5
_SLACK_NBYTES = 64  # units differ by one element, which must not make a message need a second part


def segment_nbytes(plan: LogicalPlan, nbytes: int, tree: Tree) -> int:
    """Chooses the bytes of a segment such that messages have the best size for the link that limits the plan.

    On several hosts, this is the link between hosts that is busy for longest. The messages of the calls that cross it
    have 8,000 bytes at 100 Mbit/s, 25,000 at 1 Gbit/s, and at most 60,000, which is one part. If the messages of a
    level differ in size, their mean size weighted by bytes is used; over the levels, the geometric mean of the smallest
    and the largest size. On one host all calls count, and messages have 512 KiB. Segments are smaller if too many of
    them would queue on the way to the limiting link (FILL_SHARE).

    Returns:
        A multiple of 64, between 32 KiB and 4 MiB, that cuts the buffer into equal segments. It is the whole buffer if
        the plan sends nothing, and if the plan is sparse: a rank's selection and residual belong to one range of the
        buffer.
    """
    limiting = None if is_sparse(plan) else _limiting(plan, tree)
    if limiting is None:
        return _aligned(max(nbytes, 1))
    message_share, beta_s_per_byte, fill = limiting
    message = HOST_MESSAGE_NBYTES if len(tree.hosts()) == 1 else message_nbytes(beta_s_per_byte)
    ideal = (message - _SLACK_NBYTES) / message_share
    filled = FILL_SHARE * nbytes / (WINDOW * fill) if fill else ideal
    ideal = min(ideal, max(filled, FINEST * ideal))
    grain = min(max(int(ideal), SMALLEST_SEGMENT_NBYTES), LARGEST_SEGMENT_NBYTES)
    segments = max(-(-nbytes // grain), 1)
    return min(max(_aligned(-(-nbytes // segments)), SMALLEST_SEGMENT_NBYTES), LARGEST_SEGMENT_NBYTES)


def coarser(segment_nbytes: int, nbytes: int, factor: int) -> int:
    """Makes segments larger by a factor, up to 4 MiB: multiples of 64 that cut the buffer into equal parts."""
    if factor == 1:
        return segment_nbytes
    ideal = min(segment_nbytes * factor, max(LARGEST_SEGMENT_NBYTES, segment_nbytes))
    segments = max(-(-nbytes // ideal), 1)
    return _aligned(max(-(-nbytes // segments), 1))


def message_nbytes(beta_s_per_byte: float) -> float:
    """The best size of a message over a link between hosts."""
    nbytes, at_s_per_byte = MESSAGE_AT_S_PER_BYTE
    if beta_s_per_byte == 0:
        return MESSAGE_NBYTES
    best = nbytes * math.sqrt(at_s_per_byte / beta_s_per_byte)
    return min(max(best, SMALLEST_MESSAGE_NBYTES), MESSAGE_NBYTES)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT


@lru_cache(maxsize=64)
def _limiting(plan: LogicalPlan, tree: Tree) -> tuple[float, float, float] | None:
    """Finds the links that limit the plan, on several hosts among the links between hosts.

    Returns:
        The size of the messages over these links, as a share of the buffer; the time per byte of these links; and the
        time for which the links between hosts are busy in the levels that do not use the limiting links, divided by the
        time for which the limiting links are busy. None if the links are unused.
    """
    counted = _counted(plan, tree)
    if not counted:
        return None
    busiest = max(counted, key=lambda kind: kind.busiest_s_per_byte)
    ports = Ports(tree)
    ways = ports.ways[:, busiest.depth]
    crossing: dict[int, bool] = {}  # whether a group, by its id(), crosses the links: large plans share their tuples
    shares, others = [], []
    for level in plan.levels:
        messages = []
        for call in level.calls:
            if id(call.ranks) not in crossing:
                crossing[id(call.ranks)] = len(np.unique(ways[list(call.ranks)])) > 1
            if crossing[id(call.ranks)]:
                messages.append(_messages(call))
        units, weighted = (sum(parts) for parts in zip(*messages, strict=True)) if messages else (0.0, 0.0)
        if units:
            shares.append(weighted / units / plan.units)
        else:
            others.append(level)
    fill_s = max((kind.busiest_s_per_byte for kind in _counted(replace(plan, levels=tuple(others)), tree)), default=0)
    fill = fill_s / busiest.busiest_s_per_byte if len(tree.hosts()) > 1 and fill_s else 0.0
    beta = float(ports.beta_s_per_byte[ports.depths == busiest.depth].max())
    return (min(shares) * max(shares)) ** 0.5, beta, fill


def _counted(plan: LogicalPlan, tree: Tree) -> list[Traffic]:
    """A plan's traffic over each kind of link between hosts, or over all kinds on one host."""
    one_host, levels = len(tree.hosts()) == 1, tuple(reversed(tree.levels()))
    joins_hosts = [max(node.height for node in nodes) > 1 for nodes in levels]
    return [kind for kind in traffic(plan, tree) if kind.total and (one_host or joins_hosts[kind.depth])]


def _messages(call: Call) -> tuple[float, float]:
    """The units that a rank of a call sends on average, and the same sum weighted with the sizes of the messages."""
    spans = [span.count for span in call.spans if span.count]
    units: float = sum(spans)
    if call.method == "recursive" and call.root < 0:
        # Recursive halving sends the same units in ceil(log2 d) messages as a ring in d - 1.
        d = len(call.ranks)
        units *= (d - 1) / d
        return units, units * units / max((d - 1).bit_length(), 1)
    each = len(call.ranks) if call.kind == "all_to_all" else 1
    return units, sum(count * count / each for count in spans)
