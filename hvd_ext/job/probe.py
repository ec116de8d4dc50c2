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

A pair that takes longer than the ports of both its hosts explain may share an uplink with other pairs. Then all hosts
meet again, pair by pair from a common begin, and two of these pairs alone (topology/racks.py). The number of meetings
grows with the number of hosts, and their sizes shrink, such that an attempt takes at most `RACKS_S`. Where that is too
short, and above `MOST_HOSTS` hosts, racks are not found.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hvd_ext.engine import engine as engines
from hvd_ext.job import consensus
from hvd_ext.planning import lower, patterns
from hvd_ext.planning.cost import simulate
from hvd_ext.planning.grain import message_nbytes
from hvd_ext.planning.layout import BucketLayout, Layout, Selection
from hvd_ext.planning.tensors import Tensor
from hvd_ext.topology import racks
from hvd_ext.topology.fit import Curve, levelled, line, middle, rounded, slopes, typical
from hvd_ext.topology.racks import Pair
from hvd_ext.topology.tree import SHARED_MEMORY, Link, Node, Tree, leaf

if TYPE_CHECKING:
    from hvd_ext.options import Options
    from hvd_ext.planning.model import LogicalPlan

TINY_NBYTES = 4
SMALL = "at a time"  # what the names of the series of small messages end with
ROUNDS = 8  # of small messages, one after the other
MANY = 8  # messages of a rank in a round
ATTEMPTS = 2
REPEATS = 3  # of each attempt
# Buffers that fit into caches and, on one host, buffers that do not: so many bytes in all. Between hosts the links are
# slower than memory.
HOST_SIZES = (64 << 10, 512 << 10, 2 << 20, 4 << 20, 16 << 20)
HOST_NBYTES = 64 << 20
CACHED = 3  # of the sizes, for one line through all; other sizes have factors
MOST_TIMES = 4.0  # a factor beyond it is a disturbance
HOST_SEGMENT_NBYTES = 512 << 10  # of each rank's messages, as grain.py has it for one host
SELECTED_NBYTES = 8 << 20  # so many that what a selection takes beside its bytes is little
SELECTED_ON_GPU_NBYTES = 32 << 20
# Buffers on GPUs: a kernel takes as long as a few hundred kilobytes. Between groups of GPUs, each way.
GPU_SIZES = (1 << 20, 4 << 20, 16 << 20, 64 << 20)
JOIN_SIZES = (1 << 20, 8 << 20)
DENSITY = 0.01
# Between hosts: the first look, and the time that the meetings of all rounds may take together.
LOOK_NBYTES = 64 << 10
MEETINGS_S = 0.4  # of each attempt
MOST_MEETINGS = 8
MEETING_S = 0.03  # of the larger size; a shorter one would be disturbed too easily
PARTS = (4, 1)  # smaller sizes are for the curve
LEAST_SAMPLES, MOST_SAMPLES, STEPS = 3, 8, 2
MEETING_NBYTES = 128 << 10, 8 << 20
# Racks: all pairs of so many hosts meet in about this time, with at least so many bytes.
RACKS_S = 2.0  # of each attempt; the second one is made where the first one leaves a doubt
MOST_HOSTS, LEAST_NBYTES = 16, 16 << 10
ALONE = 2
Times = dict[str, list[list[float]]]  # the samples of each series in each attempt

# The ranks of a job that has begun are there. Who is not heard of for so long ends the probe, and not the job.
PATIENCE_S = 20.0


@dataclass(frozen=True)
class Measured:
    """What the ranks have measured.

    Args:
        curves: times over the size, in and between hosts, with the fitted lines.
        doubt: why it cannot be told whether hosts are in racks; empty if it can.
    """

    tree: Tree
    curves: tuple[Curve, ...]
    doubt: str
    seconds: float


@dataclass
class Stand:
    """Where plans are timed, alike on all ranks.

    Args:
        sharing: by how many ranks a core of this rank's host is shared.
        on_gpu: whether buckets lie on GPUs, and arrays with them.
        times: this rank's samples by the name of the series.
    """

    engine: engines.Engine
    sharing: float = 1.0
    on_gpu: bool = False
    times: Times = field(default_factory=dict)

    def time(
        self,
        name: str,
        plan: LogicalPlan,
        nbytes: int,
        segment_nbytes: int = 1 << 30,
        *,
        samples: int = REPEATS,
        steps: int = 1,
        together: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        dense: LogicalPlan | None = None,
    ) -> None:
        """Time the steps of a plan, after a first one that is not counted.

        Args:
            steps: the number of steps of a sample, one after the other; the sample is their mean.
            together: whether no rank begins a sample before all others have ended the last one.
            dense: the companion of a plan that selects; None for a dense plan.
        """
        tensor = Tensor("probe", (max(nbytes // 4, 1),), "float32")
        selection = None if dense is None else Selection()
        bucket = BucketLayout("float32", (0,), 0, plan, segment_nbytes, selection=selection, dense=dense)
        handles: list[int] = []

        def handle_of(logical: LogicalPlan) -> int:
            handles.append(self.engine.add_plan(lower.rows_of(logical, self.engine.rank), logical.units))
            return handles[-1]

        channel = self.engine.open_channel("probe", Layout((tensor,), (bucket,)), handle_of, on_device=self.on_gpu)
        with self._prepared(channel, tensor) as reduce:

            def step() -> None:
                if dense is not None:
                    self.engine.begin_topk_step(channel, DENSITY)
                reduce()
                if dense is not None:
                    self.engine.end_step(channel, True)

            self.engine.exchange("probe", b"")
            step()
            series = []
            for _ in range(samples):
                if together:
                    self.engine.exchange("probe", b"")
                begin = clock()
                for _ in range(steps):
                    step()
                series.append((clock() - begin) / steps)
            step()  # no rank leaves while another one still measures
            self.engine.close_channel(channel)
        for handle in handles:
            self.engine.remove_plan(handle)
        self.times.setdefault(name, []).append(series)

    @contextlib.contextmanager
    def _prepared(self, channel: int, tensor: Tensor) -> Iterator[Callable[[], None]]:
        if self.on_gpu:
            with self.engine.prepared_on_device(channel, [4 * tensor.elements]) as reduce:
                yield reduce
        else:
            buffer = np.ones(tensor.elements, np.float32)
            yield self.engine.prepare(channel, [buffer], [np.empty_like(buffer)])

    def work_clock(self) -> float:
        """A clock for work in which ranks do not wait for each other.

        Where they share cores, some of them begin and end late, by more than short work takes. So it is the clock of
        the processor, and as many times as fast as there are ranks that share a core. A GPU works beside it.
        """
        return time.process_time() * self.sharing if self.sharing > 1 and not self.on_gpu else time.perf_counter()

    def selection_clock(self) -> float:
        """A clock for a selection, whose time prices multiply by `sharing`."""
        return time.perf_counter() / self.sharing if self.on_gpu else time.process_time()

    def gathered(self) -> list[Times]:
        """Give what each rank has measured, the same on all ranks; new series may follow."""
        times = {
            name: [[rounded(second) for second in seconds] for seconds in attempts]
            for name, attempts in self.times.items()
        }
        return consensus.exchange(self.engine, "probe", lambda: times)

    def agreed(self, value: Any) -> Any:
        """Give rank 0's value on all ranks: computers may round differently, and all must run the same plans."""
        return consensus.exchange(self.engine, "probe", lambda: value)[0]


def _of(seen: Sequence[Times], name: str, kind: Callable[[list[float]], float] = typical) -> float:
    """What a series takes these ranks in the better attempt; the slowest rank counts in each sample."""
    attempts = zip(*(times[name] for times in seen), strict=True)
    slowest = [[max(values) for values in zip(*ranks, strict=True)] for ranks in attempts]
    # A disturbance is longer than a round of small messages, or a selection, so that the least disturbed sample counts.
    return min(map(min if name.endswith((SMALL, "selection")) else kind, slowest))


def measure(job: engines.Engine, assumed: Tree, options: Options, cores: Mapping[str, float]) -> Measured:
    """Measure a job's links; all ranks call it and get the same answer or `HvdExtError`. The job's engine stays.

    Args:
        assumed: the hosts, with the groups of their GPUs; its links do not count.
        cores: the processor cores of each host.
    """
    begin = time.perf_counter()
    # What carries the job's data between hosts carries the probe's; nothing is looked for again.
    options = options.replace(transport="tcp" if job.inter_host_transport == "TCP" else "mpi", stall_fatal_s=PATIENCE_S)
    engine = engines.start_set(job, range(job.size), 0, options)
    complete = False
    try:
        hosts = assumed.host_nodes
        (host,) = (node for node in hosts if job.rank in node.ranks)
        stand = Stand(engine, max(len(host.ranks) / cores[host.name], 1.0), options.gpu_buckets)
        links = _measured(stand, hosts)
        complete = True
    finally:
        engine.stop(together=complete)
    return Measured(*links, time.perf_counter() - begin)


def _measured(stand: Stand, skeletons: Sequence[Node]) -> tuple[Tree, tuple[Curve, ...], str]:
    names, hosts = [node.name for node in skeletons], [node.ranks for node in skeletons]
    rings, joins = _parts(skeletons)
    meetings = patterns.pairs_of(len(hosts), MOST_MEETINGS) if len(hosts) > 1 else []
    size = None
    for _ in range(ATTEMPTS):
        _time_hosts(stand, hosts, [ring.ranks for ring in rings])
        _time_joins(stand, joins)
        if meetings:
            _look_between(stand, hosts, meetings[0])
            size = size or _Size(*stand.agreed(_size_of(_of(stand.gathered(), "look"), len(meetings))))
            _time_meetings(stand, hosts, meetings, size)
    seen = stand.gathered()
    sizes = host_sizes(hosts, on_gpu=stand.on_gpu)
    handed = [(nbytes, _of(seen, f"nothing {nbytes}")) for nbytes in (TINY_NBYTES, *sizes)]
    most = max(len(ring.ranks) for ring in rings)
    # Of the smallest size most of the time is latency.
    beta = middle(slopes([handed[0], *(handed[2 : 1 + CACHED] or handed[1:2])]))
    handover = Link(_of(seen, f"nothing {SMALL}"), beta)
    timed = {
        ring: found
        for ring in rings
        if (found := _inside([seen[rank] for rank in ring.ranks], sizes[:CACHED], len(ring.ranks), most, handover))
    }
    alphas_s = {
        medium: float(np.median([found.link.alpha_s for ring, found in timed.items() if ring.medium == medium]))
        for medium in {ring.medium for ring in timed}
    }
    betas = levelled([found.link.beta_s_per_byte for found in timed.values()])
    links = {ring.ranks: Link(alphas_s[ring.medium], beta) for ring, beta in zip(timed, betas, strict=True)}
    gamma = float(np.median([found.gamma_s_per_byte for found in timed.values()] or [0.0]))
    message_s = float(np.median([found.message_s for found in timed.values()] or [0.0]))
    joined, curves = _joined(seen, joins, handover, message_s)
    nodes = [_with_links(node, links | joined) for node in skeletons]
    if timed:
        slowest = max(timed.values(), key=lambda found: found.link.beta_s_per_byte)
        curves.insert(0, Curve("in hosts", slowest.points, slowest.link))
    selected_s = _of(seen, "selection") - _of(seen, "no selection")
    selection = max(selected_s, 0.0) / selected_nbytes(on_gpu=stand.on_gpu) or None
    # With several hosts the messages inside them have their time in the latency.
    largest = max(rings, key=lambda ring: (len(ring.ranks), links.get(ring.ranks, SHARED_MEMORY).beta_s_per_byte))
    inner = Node(largest.name, links.get(largest.ranks, SHARED_MEMORY), tuple(map(leaf, range(most))))
    factors = _factors(seen, Tree(inner, gamma, 0.0 if meetings else message_s, handover=handover), sizes)
    if not meetings:
        return Tree(nodes[0], gamma, message_s, selection, handover, factors), tuple(curves), ""
    assert size is not None
    met = [_met(seen, hosts, pairs, f"meeting {number} of 1/1", size.nbytes) for number, pairs in enumerate(meetings)]
    ports = fastest(met, len(hosts))
    found, rounds = _racks(stand, names, hosts, ports, size)
    if rounds:  # their common begins make them the more exact ones
        ports = fastest(rounds, len(hosts))
    ports = levelled(ports)
    alpha_s, message_s, points = _between(seen, hosts, meetings[0], handover, size.nbytes)
    between = Link(alpha_s, sorted(ports)[(len(ports) - 1) // 2])
    curves.append(Curve("between hosts", points, between))
    root = _cluster(nodes, between, ports, found)
    return Tree(root, gamma, message_s, selection, handover, factors), tuple(curves), found.doubt


def _cluster(nodes: Sequence[Node], between: Link, ports: Sequence[float], found: racks.Racks) -> Node:
    """The tree of hosts, with a branch for each rack of several hosts; a node has a port if it is an exception."""

    def branch(name: str, link: Link, parts: Sequence[tuple[Node, float]]) -> Node:
        children = [
            node if beta == link.beta_s_per_byte else replace(node, port=Link(link.alpha_s, beta))
            for node, beta in parts
        ]
        return Node(name, link, tuple(children))

    groups = [[(nodes[host], ports[host]) for host in group] for group in found.groups]
    if len(groups) == 1:
        return branch("cluster", between, groups[0])
    uplinks = sorted(uplink for uplink, group in zip(found.uplinks, groups, strict=True) if len(group) > 1)
    parts = [
        (branch(f"rack{number}", between, group), uplink) if len(group) > 1 else group[0]
        for number, (group, uplink) in enumerate(zip(groups, found.uplinks, strict=True), 1)
    ]
    return branch("cluster", Link(between.alpha_s, uplinks[(len(uplinks) - 1) // 2]), parts)


def _parts(hosts: Sequence[Node]) -> tuple[list[Node], dict[str, list[Node]]]:
    """The nodes of hosts without further nodes below, and by medium those that join such nodes.

    A rank beside nodes is a node for itself.
    """
    rings: list[Node] = []
    joins: dict[str, list[Node]] = {}
    for node in hosts:
        if all(not child.children for child in node.children):
            rings.append(node)
            continue
        joins.setdefault(node.medium, []).append(node)
        below, deeper = _parts(
            [child if child.children else replace(node, children=(child,)) for child in node.children]
        )
        rings += below
        for medium, nodes in deeper.items():
            joins.setdefault(medium, []).extend(nodes)
    return rings, joins


def _with_links(node: Node, links: Mapping[tuple[int, ...], Link]) -> Node:
    """A host with the links that were measured, by the ranks of its nodes."""
    children = tuple(_with_links(child, links) if child.children else child for child in node.children)
    return replace(node, link=links.get(node.ranks, node.link), children=children)


def _pairs_of(nodes: Sequence[Node]) -> tuple[list[tuple[int, ...]], list[list[Pair]]]:
    """The ranks of all parts of nodes that join them, and for each node pairs of its parts, each in one at most."""
    parts: list[tuple[int, ...]] = []
    pairs = []
    for node in nodes:
        first = len(parts)
        parts += [child.ranks for child in node.children]
        pairs.append([(first + low, first + high) for low, high in patterns.pairs_of(len(node.children), 1)[0]])
    return parts, pairs


def _time_joins(stand: Stand, joins: Mapping[str, Sequence[Node]]) -> None:
    for medium, nodes in joins.items():
        parts, of_nodes = _pairs_of(nodes)
        pairs = [pair for of_node in of_nodes for pair in of_node]
        plan = patterns.exchanges(parts, pairs, stand.engine.size, rounds=ROUNDS)
        stand.time(f"{medium}, 1 {SMALL}", plan, TINY_NBYTES * plan.units)
        for nbytes in JOIN_SIZES:
            what = _exchange(parts, pairs, stand.engine.size, nbytes, HOST_SEGMENT_NBYTES)
            stand.time(f"{medium} {nbytes}", *what)


def _joined(
    seen: Sequence[Times], joins: Mapping[str, Sequence[Node]], handover: Link, message_s: float
) -> tuple[dict[tuple[int, ...], Link], list[Curve]]:
    """The links of nodes that join groups of GPUs, by their ranks, and a curve for each medium."""
    links, curves = {}, []
    for medium, nodes in joins.items():
        parts, of_nodes = _pairs_of(nodes)
        everyone = [pair for of_node in of_nodes for pair in of_node]
        small = [_of(_ranks_of(seen, parts, pair), f"{medium}, 1 {SMALL}") for pair in everyone]
        alpha_s = max((float(np.median(small)) - handover.alpha_s) / ROUNDS - 2 * message_s, 0.0)
        shown = Curve(f"in hosts, {medium}", (), Link(alpha_s, 0.0))
        for node, pairs in zip(nodes, of_nodes, strict=True):
            slowest = Link(alpha_s, 0.0)
            for pair in pairs:
                points = []
                for nbytes in JOIN_SIZES:
                    whole_s = _of(_ranks_of(seen, parts, pair), f"{medium} {nbytes}")
                    own_s = handover.alpha_s + 2 * nbytes * handover.beta_s_per_byte
                    points.append((_share(parts, everyone, pair) * nbytes, max(whole_s - own_s, whole_s / 4)))
                found = Link(alpha_s, line(points).beta_s_per_byte)
                slowest = max(slowest, found, key=lambda one: one.beta_s_per_byte)
                if found.beta_s_per_byte >= shown.link.beta_s_per_byte:
                    shown = replace(shown, points=tuple(points), link=found)
            links[node.ranks] = slowest
        curves.append(shown)
    return links, curves


def _time_hosts(stand: Stand, hosts: Sequence[tuple[int, ...]], rings: Sequence[tuple[int, ...]]) -> None:
    size = stand.engine.size
    sizes = host_sizes(hosts, on_gpu=stand.on_gpu)
    stand.time(f"nothing {SMALL}", patterns.nothing(size), TINY_NBYTES)
    for nbytes in (TINY_NBYTES, *sizes):
        stand.time(f"nothing {nbytes}", patterns.nothing(size), nbytes, clock=stand.work_clock)
    selecting, dense = (patterns.selection(size, dense) for dense in (False, True))
    selected = selected_nbytes(on_gpu=stand.on_gpu)
    stand.time("selection", selecting, selected, clock=stand.selection_clock, dense=dense)
    stand.time("no selection", patterns.nothing(size), selected, clock=stand.selection_clock)
    largest = max(len(ranks) for ranks in rings)
    if largest == 1:
        return
    for messages in (1, MANY):
        plan = patterns.rings(rings, size, rounds=ROUNDS, messages=messages)
        stand.time(f"in hosts, {messages} {SMALL}", plan, TINY_NBYTES * plan.units)
    for nbytes in sizes:
        segment = min(nbytes, largest * HOST_SEGMENT_NBYTES)
        plans = {kind: patterns.rings(rings, size, kind) for kind in ("all_gather", "reduce_scatter")}
        for kind, plan in (*plans.items(), ("both", patterns.both(rings, size))):
            stand.time(f"in hosts, {kind} {nbytes}", plan, nbytes, segment)


def selected_nbytes(*, on_gpu: bool = False) -> int:
    """The size of the buffer from which is selected."""
    return SELECTED_ON_GPU_NBYTES if on_gpu else SELECTED_NBYTES


def host_sizes(hosts: Sequence[Sequence[int]], *, on_gpu: bool = False) -> tuple[int, ...]:
    """The sizes of the buffers that are timed in hosts."""
    all_sizes = GPU_SIZES if on_gpu else HOST_SIZES
    sizes = all_sizes if len(hosts) == 1 else all_sizes[:CACHED]
    if on_gpu:
        return sizes
    most = HOST_NBYTES // max(len(ranks) for ranks in hosts)
    return tuple(nbytes for nbytes in sizes if nbytes <= most) or sizes[:1]


def _factors(seen: Sequence[Times], host: Tree, sizes: Sequence[int]) -> tuple[tuple[float, float], ...]:
    """How many times as long the bytes of each size take as by one line, such that prices are the measured times.

    Args:
        host: the largest host alone.
    """
    plan, factors = patterns.both([host.ranks], host.size), []
    for number, nbytes in enumerate(sizes):
        name = f"in hosts, both {nbytes}" if host.size > 1 else f"nothing {nbytes}"

        def price_s(tree: Tree, nbytes: int = nbytes) -> float:
            segment = min(nbytes, host.size * HOST_SEGMENT_NBYTES)
            handover_s = tree.handover.alpha_s + nbytes * tree.handover.beta_s_per_byte
            return simulate(plan, tree, nbytes, segment).seconds or handover_s  # which a price of messages has in it

        latency_s = price_s(host.slowed(0.0))
        factor = (_of(seen, name) - latency_s) / max(price_s(host) - latency_s, 1e-12)
        limit = float(np.sqrt(nbytes * sizes[number + 1])) if number + 1 < len(sizes) else float(nbytes)
        factors.append((limit, min(max(factor, 1 / MOST_TIMES), MOST_TIMES)))
    return tuple(factors)


@dataclass(frozen=True)
class _Inside:
    link: Link
    message_s: float
    gamma_s_per_byte: float
    points: tuple[tuple[float, float], ...]


def _inside(seen: Sequence[Times], sizes: Sequence[int], size: int, most: int, handover: Link) -> _Inside | None:
    """The link in a host from what its ranks have seen; None for a host of one rank.

    Args:
        most: the number of ranks of the largest host.
        handover: what a step takes without messages.
    """
    if size == 1:
        return None
    # A ring of fewer ranks than the largest one has fewer rounds.
    rounds = -(-ROUNDS // (most - 1)) * (size - 1)
    one_s, many_s = ((_of(seen, f"in hosts, {messages} {SMALL}") - handover.alpha_s) / rounds for messages in (1, MANY))
    message_s = max(many_s - one_s, 0.0) / (2 * (MANY - 1))
    alpha_s = max(one_s - 2 * message_s, 0.0)
    sent: list[tuple[float, float]] = []
    added: list[tuple[float, float]] = []
    both: list[tuple[float, float]] = []
    for nbytes in sizes:
        own_s = handover.alpha_s + nbytes * handover.beta_s_per_byte
        for kind, points, times in (("all_gather", sent, 1), ("reduce_scatter", added, 1), ("both", both, 2)):
            whole_s = _of(seen, f"in hosts, {kind} {nbytes}")
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
    return _Inside(Link(alpha_s, beta), message_s, gamma, ((float(TINY_NBYTES), one_s), *both))


def _look_between(stand: Stand, hosts: Sequence[tuple[int, ...]], pairs: Sequence[Pair]) -> None:
    size = stand.engine.size
    for messages in (1, MANY):
        plan = patterns.exchanges(hosts, pairs, size, rounds=ROUNDS, messages=messages)
        stand.time(f"between, {messages} {SMALL}", plan, TINY_NBYTES * plan.units)
    stand.time("look", *_exchange(hosts, pairs, size, LOOK_NBYTES, 8000), samples=2)


def _exchange(
    hosts: Sequence[tuple[int, ...]], pairs: Sequence[Pair], size: int, nbytes: int, message_nbytes: float
) -> tuple[LogicalPlan, int, int]:
    """The plan, the buffer and the segment of an exchange of so many bytes each way between hosts of the most ranks."""
    plan = patterns.exchanges(hosts, pairs, size)
    return plan, 2 * nbytes, int(message_nbytes) // 64 * 64 * plan.units


class _Size(NamedTuple):
    """The size of a meeting: the bytes each way, the number of samples, and the bytes of a message."""

    nbytes: int
    samples: int
    message_nbytes: float


def _size_of(look_s: float, meetings: int) -> _Size:
    beta = look_s / LOOK_NBYTES
    wanted_s = min(MEETING_S, MEETINGS_S / meetings / (STEPS * LEAST_SAMPLES))
    samples = min(int(MEETINGS_S / meetings / (STEPS * wanted_s)), MOST_SAMPLES)
    nbytes = int(min(max(wanted_s / beta, MEETING_NBYTES[0]), MEETING_NBYTES[1])) // 4096 * 4096
    return _Size(nbytes, samples, message_nbytes(beta))


def _time_meetings(
    stand: Stand, hosts: Sequence[tuple[int, ...]], meetings: Sequence[Sequence[Pair]], size: _Size
) -> None:
    for number, pairs in enumerate(meetings):
        for part in PARTS if number == 0 else PARTS[-1:]:
            what = _exchange(hosts, pairs, stand.engine.size, size.nbytes // part, size.message_nbytes)
            samples, steps = (size.samples, STEPS) if part == 1 else (LEAST_SAMPLES, 1)
            stand.time(f"meeting {number} of 1/{part}", *what, samples=samples, steps=steps)


def _share(hosts: Sequence[tuple[int, ...]], pairs: Sequence[Pair], pair: Pair) -> float:
    """What a pair of a meeting sends, of what the largest does: a unit for each rank of its larger host."""
    return max(len(hosts[host]) for host in pair) / max(len(hosts[host]) for pair in pairs for host in pair)


def _ranks_of(seen: Sequence[Times], hosts: Sequence[tuple[int, ...]], pair: Pair) -> list[Times]:
    return [seen[rank] for host in pair for rank in hosts[host]]


def _met(
    seen: Sequence[Times],
    hosts: Sequence[tuple[int, ...]],
    pairs: Sequence[Pair],
    name: str,
    nbytes: float,
    kind: Callable[[list[float]], float] = typical,
) -> dict[Pair, float]:
    """The seconds per byte of the pairs of a meeting."""
    return {
        pair: _of(_ranks_of(seen, hosts, pair), name, kind) / (_share(hosts, pairs, pair) * nbytes) for pair in pairs
    }


def fastest(rounds: Sequence[racks.Round], hosts: int) -> list[float]:
    """The seconds per byte of each host's port: those of its fastest meeting."""
    return [min(beta for met in rounds for pair, beta in met.items() if host in pair) for host in range(hosts)]


def _racks(
    stand: Stand,
    names: Sequence[str],
    hosts: Sequence[tuple[int, ...]],
    ports: Sequence[float],
    size: _Size,
) -> tuple[racks.Racks, list[dict[Pair, float]]]:
    """Find racks if some pairs are slower than their ports: all hosts meet again, and two of these pairs alone.

    Returns:
        The racks, and the seconds per byte of the pairs of each round; no rounds if nothing more was measured.
    """
    seen = stand.gathered()
    meetings = enumerate(patterns.pairs_of(len(hosts), MOST_MEETINGS))
    # The mean, because a pair that ends first leaves the link to the others, which are slow for a part of the time.
    met = [_met(seen, hosts, pairs, f"meeting {number} of 1/1", size.nbytes, fmean) for number, pairs in meetings]
    slow = racks.suspects(ports, met) if len(hosts) > 2 else []
    paired = patterns.pairs_of(len(hosts), len(hosts))
    step_s = RACKS_S / (len(paired) + ALONE) / (1 + LEAST_SAMPLES * STEPS)
    betas = [max(pairs.values()) for pairs in met]
    betas += [max(betas)] * (len(paired) - len(betas))  # of the rounds that were left out
    wanted = [(step_s / beta, pairs) for beta, pairs in zip(betas, paired, strict=True)]
    # A pair that was slow beside others may be as many times as fast alone.
    wanted += [(step_s / max(betas) * len(paired[0]), [pair]) for pair in slow[:ALONE]]
    rounds = [(min(int(nbytes), MEETING_NBYTES[1]) // 4096 * 4096, pairs) for nbytes, pairs in wanted]
    slow, rounds = stand.agreed((slow, rounds))
    none = racks.Racks((tuple(range(len(hosts))),), (0.0,))
    if not slow:
        return none, []
    if len(hosts) > MOST_HOSTS or min(nbytes for nbytes, _ in rounds) < LEAST_NBYTES:
        first, second = (names[host] for host in slow[0])
        doubt = f"{first} and {second} are slower than their ports, and {len(hosts)} hosts have too many pairs to time"
        return replace(none, doubt=doubt), []
    fewest = min(map(len, hosts))
    alike = [ranks[:fewest] for ranks in hosts]  # so that all pairs send as much
    rounds = [(nbytes, [(low, high) for low, high in pairs]) for nbytes, pairs in rounds]
    for _ in range(ATTEMPTS):
        for number, (nbytes, pairs) in enumerate(rounds):
            what = _exchange(alike, pairs, stand.engine.size, nbytes, size.message_nbytes)
            stand.time(f"round {number}", *what, samples=LEAST_SAMPLES, steps=STEPS, together=True)
        seen = stand.gathered()
        met = [_met(seen, alike, pairs, f"round {number}", nbytes) for number, (nbytes, pairs) in enumerate(rounds)]
        found = racks.find(fastest(met, len(hosts)), met, names)
        if not stand.agreed(found.doubt):
            break
    return found, met


def _between(
    seen: Sequence[Times],
    hosts: Sequence[tuple[int, ...]],
    pairs: Sequence[Pair],
    handover: Link,
    nbytes: float,
) -> tuple[float, float, tuple[tuple[float, float], ...]]:
    """The latency between hosts, the time of a message, and a curve, from the first meeting."""
    rounds: dict[int, list[float]] = {1: [], MANY: []}
    for pair in pairs:
        for messages in rounds:
            whole_s = _of(_ranks_of(seen, hosts, pair), f"between, {messages} {SMALL}")
            rounds[messages].append((whole_s - handover.alpha_s) / ROUNDS)
    one_s, many_s = (float(np.median(rounds[messages])) for messages in (1, MANY))
    message_s = max(many_s - one_s, 0.0) / (2 * (MANY - 1))
    sizes = [(part, _share(hosts, pairs, pairs[0]) * nbytes / part) for part in PARTS]
    points = [(sent, _of(_ranks_of(seen, hosts, pairs[0]), f"meeting 0 of 1/{part}")) for part, sent in sizes]
    return max(one_s - 2 * message_s, 0.0), message_s, ((float(TINY_NBYTES), one_s), *points)
