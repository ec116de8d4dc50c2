"""What a rank needs alone, and the links in hosts: rings of ranks that all hosts run at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hvd_ext.job.probe.stand import MANY, ROUNDS, SMALL, TINY_NBYTES, Stand, Times, of, steps_of
from hvd_ext.planning import patterns
from hvd_ext.planning.cost import simulate
from hvd_ext.planning.grain import HOST_MESSAGE_NBYTES
from hvd_ext.topology.fit import line
from hvd_ext.topology.tree import Link, Tree

# Sizes of buffers, of which the first CACHED fit into caches: one line goes through their times; all have factors.
HOST_SIZES = (64 << 10, 512 << 10, 2 << 20, 4 << 20, 16 << 20)
CACHED = 3
HOST_NBYTES = 64 << 20  # the most of all ranks of a host together
MOST_TIMES = 4.0  # a factor beyond it is a disturbance
SELECTED_NBYTES = 8 << 20  # so many that what a selection takes beside its bytes is little
# Buffers on GPUs, where a kernel takes as long as a few hundred kilobytes.
GPU_SIZES = (1 << 20, 4 << 20, 16 << 20, 64 << 20)
SELECTED_ON_GPU_NBYTES = 32 << 20
Kind = Literal["all_gather", "reduce_scatter", "both"]


def time_hosts(stand: Stand, hosts: Sequence[tuple[int, ...]], rings: Sequence[tuple[int, ...]]) -> None:
    """Time what ranks do alone, and rings of ranks."""
    size = stand.engine.size
    sizes = host_sizes(hosts, on_gpu=stand.on_gpu)
    stand.time(f"nothing {SMALL}", patterns.nothing(size), TINY_NBYTES, steps=steps_of(TINY_NBYTES))
    for nbytes in (TINY_NBYTES, *sizes):
        nothing, steps = patterns.nothing(size), steps_of(nbytes)
        stand.time(f"nothing {nbytes}", nothing, nbytes, steps=steps, clock=stand.work_clock)
    selecting, dense = (patterns.selection(size, dense) for dense in (False, True))
    selected = selected_nbytes(on_gpu=stand.on_gpu)
    stand.time("selection", selecting, selected, clock=stand.selection_clock, dense=dense)
    stand.time("no selection", patterns.nothing(size), selected, clock=stand.selection_clock)
    if max(len(ranks) for ranks in rings) == 1:
        return
    for messages in (1, MANY):
        _time_small(stand, rings, messages)
    for number, nbytes in enumerate(sizes):
        kinds: tuple[Kind, ...] = ("all_gather", "reduce_scatter", "both") if number < CACHED else ("both",)
        _time_size(stand, rings, nbytes, kinds)


def look(stand: Stand, hosts: Sequence[tuple[int, ...]], rings: Sequence[tuple[int, ...]]) -> list[str]:
    """Time two of the series of `time_hosts` once more; gives their names."""
    if max(len(ranks) for ranks in rings) == 1:
        return []
    nbytes = host_sizes(hosts, on_gpu=stand.on_gpu)[:2][-1]
    return [_time_small(stand, rings, 1), *_time_size(stand, rings, nbytes, ("both",))]


def _time_small(stand: Stand, rings: Sequence[tuple[int, ...]], messages: int) -> str:
    name = f"in hosts, {messages} {SMALL}"
    plan = patterns.rings(rings, stand.engine.size, rounds=ROUNDS, messages=messages)
    stand.time(name, plan, TINY_NBYTES * plan.units, steps=steps_of(TINY_NBYTES))
    return name


def _time_size(stand: Stand, rings: Sequence[tuple[int, ...]], nbytes: int, kinds: Sequence[Kind]) -> list[str]:
    size = stand.engine.size
    segment = min(nbytes, max(len(ranks) for ranks in rings) * HOST_MESSAGE_NBYTES)
    names = []
    for kind in kinds:
        plan = patterns.both(rings, size) if kind == "both" else patterns.rings(rings, size, kind)
        names.append(f"in hosts, {kind} {nbytes}")
        stand.time(names[-1], plan, nbytes, segment, steps=steps_of(nbytes))
    return names


def selected_nbytes(*, on_gpu: bool = False) -> int:
    """The size of the buffer from which is selected."""
    return SELECTED_ON_GPU_NBYTES if on_gpu else SELECTED_NBYTES


def host_sizes(hosts: Sequence[Sequence[int]], *, on_gpu: bool = False) -> tuple[int, ...]:
    """The sizes of the buffers that are timed in hosts."""
    if on_gpu:
        return GPU_SIZES if len(hosts) == 1 else GPU_SIZES[:CACHED]
    most = HOST_NBYTES // max(len(ranks) for ranks in hosts)
    return tuple(nbytes for nbytes in HOST_SIZES if nbytes <= most) or HOST_SIZES[:1]


def size_factors(seen: Sequence[Times], host: Tree, sizes: Sequence[int]) -> tuple[tuple[float, float], ...]:
    """How many times as long the bytes of each size take as by one line, such that prices are the measured times.

    Args:
        host: the largest host alone.
    """
    plan, factors = patterns.both([host.ranks], host.size), []
    for number, nbytes in enumerate(sizes):
        name = f"in hosts, both {nbytes}" if host.size > 1 else f"nothing {nbytes}"

        def price_s(tree: Tree, nbytes: int = nbytes) -> float:
            segment = min(nbytes, host.size * HOST_MESSAGE_NBYTES)
            handover_s = tree.handover.alpha_s + nbytes * tree.handover.beta_s_per_byte
            return simulate(plan, tree, nbytes, segment).seconds or handover_s  # which a price of messages has in it

        latency_s = price_s(host.slowed(0.0))
        factor = (of(seen, name) - latency_s) / max(price_s(host) - latency_s, 1e-12)
        limit = float(np.sqrt(nbytes * sizes[number + 1])) if number + 1 < len(sizes) else float(nbytes)
        factors.append((limit, min(max(factor, 1 / MOST_TIMES), MOST_TIMES)))
    return tuple(factors)


@dataclass(frozen=True)
class Inside:
    """What was found of the link of a ring of ranks in a host."""

    link: Link
    message_s: float
    gamma_s_per_byte: float
    points: tuple[tuple[float, float], ...]


def inside(seen: Sequence[Times], sizes: Sequence[int], most: int, handover: Link) -> Inside | None:
    """The link in a host from what the ranks of its ring have seen; None for a rank alone.

    Args:
        most: the number of ranks of the largest ring.
        handover: what a step takes without messages.
    """
    size = len(seen)
    if size == 1:
        return None
    # A ring of fewer ranks than the largest one has fewer rounds.
    rounds = -(-ROUNDS // (most - 1)) * (size - 1)
    one_s, many_s = ((of(seen, f"in hosts, {messages} {SMALL}") - handover.alpha_s) / rounds for messages in (1, MANY))
    message_s = max(many_s - one_s, 0.0) / (2 * (MANY - 1))
    alpha_s = max(one_s - 2 * message_s, 0.0)
    sent: list[tuple[float, float]] = []
    added: list[tuple[float, float]] = []
    both: list[tuple[float, float]] = []
    for nbytes in sizes:
        own_s = handover.alpha_s + nbytes * handover.beta_s_per_byte
        for kind, points, times in (("all_gather", sent, 1), ("reduce_scatter", added, 1), ("both", both, 2)):
            whole_s = of(seen, f"in hosts, {kind} {nbytes}")
            # What is left of noisy times is at least a part.
            points.append((nbytes / most, max(whole_s - own_s, whole_s / 4) / (times * (size - 1))))
    # A round in which many bytes move may begin later than one of a few bytes, where ranks share processors.
    # What one rank has added or received the next one must fetch from another cache, so that both together count.
    mean = line(both)
    alpha_s = max(alpha_s, mean.alpha_s - 2 * message_s)
    # Noise may hide the bytes of small sizes, but not most of those of the largest.
    per_byte = max(mean.beta_s_per_byte, both[-1][1] / both[-1][0] / 2)
    gamma = min(max(line(added).beta_s_per_byte - line(sent).beta_s_per_byte, 0.0), per_byte)
    beta = per_byte - gamma / 2
    return Inside(Link(alpha_s, beta), message_s, gamma, ((float(TINY_NBYTES), one_s), *both))
