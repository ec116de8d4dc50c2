"""The network probe: latencies, rates and costs of a job's links, measured by its ranks with the payload's own path.

The probe runs small plans (planning/patterns.py) on an engine of its own, in the form in which buckets travel: channels
over arrays in host memory, or on GPUs if buckets lie there, in segments, over shared memory and whatever the job has
between its hosts. So the links between hosts have the copies between GPU and host in them. All ranks of all hosts take
part in every measurement, because a host's ranks share its processors and its network card.

    nothing            an empty plan                         what a rank needs to hand a buffer over and to get it back
    rings in hosts     many rounds of 4 bytes                the latency of a message, the processor's time for it
                       buffers that are sent, and added      the rate in hosts, and the cost of an addition
    groups of GPUs     the same as in hosts, in groups       the rates in groups
                       exchanges between two groups          the rate of each group's port to the others of its host
    selections         a plan that selects, all ranks        the cost of a selection
    pairs of hosts     many rounds of 4 bytes                the same as in hosts
                       buffers each way                      the rate of each host's own port
                       the same from a common begin          racks, if some pairs are slower than their ports

Hosts meet in the order of a round-robin tournament, and a host has the rate of its fastest meeting: the slower one of
two hosts decides how long they take. One step follows the other, so that what a link sends faster after a pause (a
token bucket) is used up in the first step, which does not count. The sizes follow from a first look at the rate, such
that the time limit holds. Everything is measured twice, and of two attempts the faster one counts: what is left of
another job, or begins just now, is in one of them only.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hvd_ext.engine import engine as engines
from hvd_ext.job.probe import groups, meetings, rings
from hvd_ext.job.probe.stand import ATTEMPTS, SMALL, TINY_NBYTES, Stand, of
from hvd_ext.planning import patterns
from hvd_ext.topology import racks
from hvd_ext.topology.fit import Curve, levelled, middle, slopes
from hvd_ext.topology.tree import SHARED_MEMORY, Link, Node, Tree, leaf

if TYPE_CHECKING:
    from hvd_ext.options import Options

# The ranks of a job that has begun are there. Who is not heard of for so long ends the probe, and not the job.
PATIENCE_S = 20.0


@dataclass(frozen=True)
class Measured:
    """What the ranks have measured.

    Args:
        curves: times over the size, in and between hosts, with the fitted lines.
        doubt: why it cannot be told whether hosts are in racks; empty if it can.
        looked: the seconds of the series that `look` repeats, by their names.
    """

    tree: Tree
    curves: tuple[Curve, ...]
    doubt: str
    looked: dict[str, float]
    seconds: float = 0.0


def measure(job: engines.Engine, assumed: Tree, options: Options, cores: Mapping[str, float]) -> Measured:
    """Measure a job's links; all ranks call it and get the same answer or `HvdExtError`. The job's engine stays.

    Args:
        assumed: the hosts, with the groups of their GPUs; its links do not count.
        cores: the processor cores of each host.
    """
    begin = time.perf_counter()
    with _stand(job, assumed, options, cores) as stand:
        found = measured(stand, assumed.host_nodes)
    return replace(found, seconds=time.perf_counter() - begin)


def look(job: engines.Engine, assumed: Tree, options: Options, cores: Mapping[str, float]) -> dict[str, float]:
    """Time a few series of `measure` once, in some milliseconds and a few round trips; as `Measured.looked`."""
    with _stand(job, assumed, options, cores) as stand:
        names = _look(stand, assumed.host_nodes)
        seen = stand.gathered()
        return {name: of(seen, name) for name in names}


@contextlib.contextmanager
def _stand(job: engines.Engine, assumed: Tree, options: Options, cores: Mapping[str, float]) -> Iterator[Stand]:
    # What carries the job's data between hosts carries the probe's; nothing is looked for again.
    options = options.replace(transport="tcp" if job.inter_host_transport == "TCP" else "mpi", stall_fatal_s=PATIENCE_S)
    engine = engines.start_set(job, range(job.size), 0, options)
    complete = False
    try:
        (host,) = (node for node in assumed.host_nodes if job.rank in node.ranks)
        yield Stand(engine, max(len(host.ranks) / cores[host.name], 1.0), options.gpu_buckets)
        complete = True
    finally:
        engine.stop(together=complete)


def _look(stand: Stand, skeletons: Sequence[Node]) -> list[str]:
    hosts, (inner, _) = [node.ranks for node in skeletons], groups.parts(skeletons)
    names = rings.look(stand, hosts, [ring.ranks for ring in inner])
    return names + (meetings.look(stand, hosts, patterns.pairs_of(len(hosts), 1)[0]) if len(hosts) > 1 else [])


def measured(stand: Stand, skeletons: Sequence[Node]) -> Measured:
    """Time everything, and make the tree; the same on all ranks.

    Args:
        skeletons: the hosts, as for `measure`.
    """
    names, hosts = [node.name for node in skeletons], [node.ranks for node in skeletons]
    inner, joins = groups.parts(skeletons)
    paired = patterns.pairs_of(len(hosts), meetings.MOST_MEETINGS) if len(hosts) > 1 else []
    size = None
    for _ in range(ATTEMPTS):
        rings.time_hosts(stand, hosts, [ring.ranks for ring in inner])
        groups.time_joins(stand, joins)
        if paired:
            meetings.look(stand, hosts, paired[0])
            looked_s = of(stand.gathered(), "look")
            size = size or meetings.Size(*stand.agreed(meetings.size_of(looked_s, len(paired))))
            meetings.time_meetings(stand, hosts, paired, size)
    looked = _look(stand, skeletons)  # their third attempt, as a later job makes it
    seen = stand.gathered()
    seconds_of = {name: of(seen, name) for name in looked}
    sizes = rings.host_sizes(hosts, on_gpu=stand.on_gpu)
    handed = [(nbytes, of(seen, f"nothing {nbytes}")) for nbytes in (TINY_NBYTES, *sizes)]
    most = max(len(ring.ranks) for ring in inner)
    # Of the smallest size most of the time is latency.
    beta = middle(slopes([handed[0], *(handed[2 : 1 + rings.CACHED] or handed[1:2])]))
    handover = Link(of(seen, f"nothing {SMALL}"), beta)
    timed = {
        ring: found
        for ring in inner
        if (found := rings.inside([seen[rank] for rank in ring.ranks], sizes[: rings.CACHED], most, handover))
    }
    alphas_s = {
        medium: float(np.median([found.link.alpha_s for ring, found in timed.items() if ring.medium == medium]))
        for medium in {ring.medium for ring in timed}
    }
    betas = levelled([found.link.beta_s_per_byte for found in timed.values()])
    links = {ring.ranks: Link(alphas_s[ring.medium], beta) for ring, beta in zip(timed, betas, strict=True)}
    gamma = float(np.median([found.gamma_s_per_byte for found in timed.values()] or [0.0]))
    message_s = float(np.median([found.message_s for found in timed.values()] or [0.0]))
    joined, curves = groups.join_links(seen, joins, handover, message_s)
    nodes = [groups.with_links(node, links | joined) for node in skeletons]
    if timed:
        slowest = max(timed.values(), key=lambda found: found.link.beta_s_per_byte)
        curves.insert(0, Curve("in hosts", slowest.points, slowest.link))
    selected_s = of(seen, "selection") - of(seen, "no selection")
    selection = max(selected_s, 0.0) / rings.selected_nbytes(on_gpu=stand.on_gpu) or None
    # With several hosts the messages inside them have their time in the latency.
    largest = max(inner, key=lambda ring: (len(ring.ranks), links.get(ring.ranks, SHARED_MEMORY).beta_s_per_byte))
    ring = Node(largest.name, links.get(largest.ranks, SHARED_MEMORY), tuple(map(leaf, range(most))))
    factors = rings.size_factors(seen, Tree(ring, gamma, 0.0 if paired else message_s, handover=handover), sizes)
    if not paired:
        tree = Tree(nodes[0], gamma, message_s, selection, handover, factors)
        return Measured(tree, tuple(curves), "", seconds_of)
    assert size is not None
    met = [
        meetings.pair_betas(seen, hosts, pairs, f"meeting {number} of 1/1", size.nbytes)
        for number, pairs in enumerate(paired)
    ]
    ports = meetings.fastest(met, len(hosts))
    in_racks, rounds = meetings.find_racks(stand, names, hosts, ports, size)
    if rounds:  # their common begins make them the more exact ones
        ports = meetings.fastest(rounds, len(hosts))
    ports = levelled(ports)
    alpha_s, message_s, points = meetings.latency(seen, hosts, paired[0], handover, size.nbytes)
    between = Link(alpha_s, sorted(ports)[(len(ports) - 1) // 2])
    curves.append(Curve("between hosts", points, between))
    root = _cluster(nodes, between, ports, in_racks)
    tree = Tree(root, gamma, message_s, selection, handover, factors)
    return Measured(tree, tuple(curves), in_racks.doubt, seconds_of)


def _cluster(nodes: Sequence[Node], between: Link, ports: Sequence[float], found: racks.Racks) -> Node:
    """The tree of hosts, with a branch for each rack of several hosts; a node has a port if it is an exception."""

    def branch(name: str, link: Link, parts: Sequence[tuple[Node, float]]) -> Node:
        children = [
            node if beta == link.beta_s_per_byte else replace(node, port=Link(link.alpha_s, beta))
            for node, beta in parts
        ]
        return Node(name, link, tuple(children))

    members = [[(nodes[host], ports[host]) for host in group] for group in found.groups]
    if len(members) == 1:
        return branch("cluster", between, members[0])
    uplinks = sorted(uplink for uplink, group in zip(found.uplinks, members, strict=True) if len(group) > 1)
    parts = [
        (branch(f"rack{number}", between, group), uplink) if len(group) > 1 else group[0]
        for number, (group, uplink) in enumerate(zip(members, found.uplinks, strict=True), 1)
    ]
    return branch("cluster", Link(between.alpha_s, uplinks[(len(uplinks) - 1) // 2]), parts)
