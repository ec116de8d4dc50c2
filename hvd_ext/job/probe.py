"""The network probe: latencies, rates and costs of a job's links, measured by its ranks with the payload's own path.

The probe runs small plans (planning/patterns.py) on an engine of its own, in the form in which buckets travel: channels
over NumPy arrays, in segments, over shared memory and whatever the job has between its hosts. All ranks of all hosts
take part in every measurement, because a host's ranks share its processors and its network card.

    nothing            an empty plan                         what a rank needs to hand a buffer over and to get it back
    rings in hosts     many rounds of 4 bytes                the latency of a message, the processor's time for it
                       buffers that are sent, and added      the rate in hosts, and the cost of an addition
    selections         a plan that selects, all ranks        the cost of a selection
    pairs of hosts     many rounds of 4 bytes                the same as in hosts
                       buffers each way                      the rate of each host's own port

Hosts meet in the order of a round-robin tournament, and a host has the rate of its fastest meeting: the slower one of
two hosts decides how long they take. One step follows the other, so that what a link sends faster after a pause (a
token bucket) is used up in the first step, which does not count. The sizes follow from a first look at the rate, such
that the time limit holds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from hvd_ext.engine import engine as engines
from hvd_ext.job import consensus
from hvd_ext.planning import lower, patterns
from hvd_ext.planning.grain import message_nbytes
from hvd_ext.planning.layout import BucketLayout, Layout, Selection
from hvd_ext.planning.tensors import Tensor
from hvd_ext.topology.fit import Curve, knee, levelled, line, middle, rounded, slopes, typical
from hvd_ext.topology.tree import SHARED_MEMORY, Link, Node, Tree, leaf

if TYPE_CHECKING:
    from hvd_ext.options import Options
    from hvd_ext.planning.model import LogicalPlan

TINY_NBYTES = 4
SMALL = "at a time"  # what the names of the series of small messages end with
ROUNDS = 8  # of small messages, one after the other
MANY = 8  # messages of a rank in a round
REPEATS = 5
# Buffers that fit into caches and, on one host, buffers that do not: so many bytes in all. Between hosts the links are
# slower than memory.
HOST_SIZES = (64 << 10, 512 << 10, 2 << 20, 4 << 20, 16 << 20)
HOST_NBYTES = 64 << 20
HOST_SEGMENT_NBYTES = 512 << 10  # of each rank's messages, as grain.py has it for one host
SELECTED_NBYTES = 1 << 20
DENSITY = 0.01
# Between hosts: the first look, and the time that the meetings of all rounds may take together.
LOOK_NBYTES = 64 << 10
MEETINGS_S = 0.5
MOST_MEETINGS = 8
MEETING_S = 0.03  # of the larger size; a shorter one would be disturbed too easily
PARTS = (4, 1)  # smaller sizes are for the curve
LEAST_SAMPLES, MOST_SAMPLES, STEPS = 2, 8, 2
MEETING_NBYTES = 128 << 10, 8 << 20
Times = dict[str, list[float]]  # the samples of each series

# The ranks of a job that has begun are there. Who is not heard of for so long ends the probe, and not the job.
PATIENCE_S = 20.0


@dataclass(frozen=True)
class Measured:
    """What the ranks have measured; curves are times over the size, in and between hosts, with the fitted lines."""

    tree: Tree
    curves: tuple[Curve, ...]
    seconds: float


@dataclass
class Stand:
    """Where plans are timed, alike on all ranks; `times` has this rank's samples by the name of the series."""

    engine: engines.Engine
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
        dense: LogicalPlan | None = None,
    ) -> None:
        """Time the steps of a plan, after a first one that is not counted.

        Args:
            steps: the number of steps of a sample, one after the other; the sample is their mean.
            dense: the companion of a plan that selects; None for a dense plan.
        """
        tensor = Tensor("probe", (max(nbytes // 4, 1),), "float32")
        selection = None if dense is None else Selection()
        bucket = BucketLayout("float32", (0,), 0, plan, segment_nbytes, selection=selection, dense=dense)
        handles: list[int] = []

        def handle_of(logical: LogicalPlan) -> int:
            handles.append(self.engine.add_plan(lower.rows_of(logical, self.engine.rank), logical.units))
            return handles[-1]

        channel = self.engine.open_channel("probe", Layout((tensor,), (bucket,)), handle_of)
        buffer = np.ones(tensor.elements, np.float32)
        reduce = self.engine.prepare(channel, [buffer], [np.empty_like(buffer)])

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
            begin = time.perf_counter()
            for _ in range(steps):
                step()
            series.append((time.perf_counter() - begin) / steps)
        step()  # no rank leaves while another one still measures
        self.engine.close_channel(channel)
        for handle in handles:
            self.engine.remove_plan(handle)
        self.times[name] = series

    def gathered(self) -> list[Times]:
        """Give what each rank has measured, the same on all ranks; new series may follow."""
        times = {name: [rounded(second) for second in seconds] for name, seconds in self.times.items()}
        return consensus.exchange(self.engine, "probe", lambda: times)


def _of(seen: Sequence[Times], name: str) -> float:
    """What a series takes these ranks, of which the slowest counts in each sample."""
    slowest = [max(values) for values in zip(*(times[name] for times in seen), strict=True)]
    # A disturbance is longer than a round of small messages, or a selection, so that the least disturbed sample counts.
    return min(slowest) if name.endswith((SMALL, "selection")) else typical(slowest)


def measure(job: engines.Engine, hosts: Sequence[str], options: Options) -> Measured:
    """Measure a job's links; all ranks call it and get the same answer or `HvdExtError`. The job's engine stays."""
    begin = time.perf_counter()
    # What carries the job's data between hosts carries the probe's; nothing is looked for again.
    options = options.replace(transport="tcp" if job.inter_host_transport == "TCP" else "mpi", stall_fatal_s=PATIENCE_S)
    engine = engines.start_set(job, range(job.size), 0, options)
    complete = False
    try:
        names: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            names.setdefault(host, []).append(rank)
        stand = Stand(engine)
        links = _measured(stand, tuple(names), tuple(map(tuple, names.values())))
        complete = True
    finally:
        engine.stop(together=complete)
    return Measured(*links, time.perf_counter() - begin)


def _measured(stand: Stand, names: Sequence[str], hosts: Sequence[tuple[int, ...]]) -> tuple[Tree, tuple[Curve, ...]]:
    _time_hosts(stand, hosts)
    meetings = patterns.pairs_of(len(hosts), MOST_MEETINGS) if len(hosts) > 1 else []
    if meetings:
        _look_between(stand, hosts, meetings[0])
    seen = stand.gathered()
    if meetings:
        _time_meetings(stand, hosts, meetings, _of(seen, "look"))
        seen = stand.gathered()
    sizes = host_sizes(hosts)
    handed = [(nbytes, _of(seen, f"nothing {nbytes}")) for nbytes in (TINY_NBYTES, *sizes)]
    handover = Link(handed[0][1], 0.0)
    most = max(len(ranks) for ranks in hosts)
    # Of the smallest size most of the time is latency.
    times = [(TINY_NBYTES, handover.alpha_s), *((nbytes, _whole_s(seen, nbytes)) for nbytes in sizes[1:])]
    cached, factor = knee(slopes(times)) if len(sizes) > 1 else (0, 1.0)
    cached += 1
    cache_nbytes = float(np.sqrt(sizes[cached - 1] * sizes[cached])) if cached < len(sizes) else 0.0
    sizes = sizes[:cached]
    handover = Link(handover.alpha_s, middle(slopes(handed[: 1 + cached])))
    inside = [_inside([seen[rank] for rank in ranks], sizes, len(ranks), most, handover) for ranks in hosts]
    timed = [host for host in inside if host is not None]
    alpha_s = float(np.median([host.link.alpha_s for host in timed])) if timed else 0.0
    shared = iter(Link(alpha_s, beta) for beta in levelled([host.link.beta_s_per_byte for host in timed]))
    links = [SHARED_MEMORY if host is None else next(shared) for host in inside]
    gamma = float(np.median([host.gamma_s_per_byte for host in timed] or [0.0]))
    message_s = float(np.median([host.message_s for host in timed] or [0.0]))
    curves = []
    if timed:
        slowest = max(timed, key=lambda host: host.link.beta_s_per_byte)
        curves.append(Curve("in hosts", slowest.points, slowest.link))
    selected_s = _of(seen, "selection") - _of(seen, "no selection")
    selection = max(selected_s, 0.0) / SELECTED_NBYTES or None
    nodes = [
        Node(name, link, tuple(leaf(rank) for rank in ranks))
        for name, link, ranks in zip(names, links, hosts, strict=True)
    ]
    if not meetings:
        return Tree(nodes[0], gamma, message_s, selection, handover, cache_nbytes, factor), tuple(curves)
    between, message_s, ports, points = _between(seen, hosts, meetings, handover)
    curves.append(Curve("between hosts", points, between))
    root = Node(
        "cluster",
        between,
        tuple(
            node if beta == between.beta_s_per_byte else replace(node, port=Link(between.alpha_s, beta))
            for node, beta in zip(nodes, ports, strict=True)
        ),
    )
    return Tree(root, gamma, message_s, selection, handover, cache_nbytes, factor), tuple(curves)


def _time_hosts(stand: Stand, hosts: Sequence[tuple[int, ...]]) -> None:
    size = stand.engine.size
    sizes = host_sizes(hosts)
    for nbytes in (TINY_NBYTES, *sizes):
        samples = _samples(nbytes)
        stand.time(f"nothing {nbytes}", patterns.nothing(size), nbytes, samples=samples)
    selecting, dense = (patterns.selection(size, dense) for dense in (False, True))
    stand.time("selection", selecting, SELECTED_NBYTES, dense=dense)
    stand.time("no selection", patterns.nothing(size), SELECTED_NBYTES)
    largest = max(len(ranks) for ranks in hosts)
    if largest == 1:
        return
    for messages in (1, MANY):
        plan = patterns.rings(hosts, size, rounds=ROUNDS, messages=messages)
        stand.time(f"in hosts, {messages} {SMALL}", plan, TINY_NBYTES * plan.units)
    for nbytes in sizes:
        segment = min(nbytes, largest * HOST_SEGMENT_NBYTES)
        plans = {kind: patterns.rings(hosts, size, kind) for kind in ("all_gather", "reduce_scatter")}
        for kind, plan in (*plans.items(), ("both", patterns.both(hosts, size))):
            stand.time(f"in hosts, {kind} {nbytes}", plan, nbytes, segment, samples=_samples(nbytes))


def host_sizes(hosts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The sizes of the buffers that are timed in hosts."""
    most = HOST_NBYTES // max(len(ranks) for ranks in hosts)
    sizes = HOST_SIZES if len(hosts) == 1 else HOST_SIZES[:-2]
    return tuple(nbytes for nbytes in sizes if nbytes <= most) or sizes[:1]


def _whole_s(seen: Sequence[Times], nbytes: int) -> float:
    """The time of a ring's allreduce in hosts with its hand-over, which is all if every host has one rank."""
    own_s = _of(seen, f"nothing {nbytes}")
    name = f"in hosts, both {nbytes}"
    return max(own_s, _of(seen, name)) if name in seen[0] else own_s


def _samples(nbytes: int) -> int:
    return REPEATS if nbytes < HOST_SIZES[-1] else 3


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
        own_s = _of(seen, f"nothing {nbytes}")
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


def _look_between(stand: Stand, hosts: Sequence[tuple[int, ...]], pairs: Sequence[tuple[int, int]]) -> None:
    size = stand.engine.size
    for messages in (1, MANY):
        plan = patterns.exchanges(hosts, pairs, size, rounds=ROUNDS, messages=messages)
        stand.time(f"between, {messages} {SMALL}", plan, TINY_NBYTES * plan.units)
    stand.time("look", *_exchange(hosts, pairs, size, LOOK_NBYTES, 8000), samples=2)


def _exchange(
    hosts: Sequence[tuple[int, ...]], pairs: Sequence[tuple[int, int]], size: int, nbytes: int, message_nbytes: float
) -> tuple[LogicalPlan, int, int]:
    """The plan, the buffer and the segment of an exchange of so many bytes each way between hosts of the most ranks."""
    plan = patterns.exchanges(hosts, pairs, size)
    return plan, 2 * nbytes, int(message_nbytes) // 64 * 64 * plan.units


def _time_meetings(
    stand: Stand, hosts: Sequence[tuple[int, ...]], meetings: Sequence[Sequence[tuple[int, int]]], look_s: float
) -> None:
    beta = look_s / LOOK_NBYTES
    wanted_s = min(MEETING_S, MEETINGS_S / len(meetings) / (STEPS * LEAST_SAMPLES))
    samples = min(int(MEETINGS_S / len(meetings) / (STEPS * wanted_s)), MOST_SAMPLES)
    nbytes = int(min(max(wanted_s / beta, MEETING_NBYTES[0]), MEETING_NBYTES[1])) // 4096 * 4096
    message = message_nbytes(beta)
    for number, pairs in enumerate(meetings):
        for part in PARTS if number == 0 else PARTS[-1:]:
            what = _exchange(hosts, pairs, stand.engine.size, nbytes // part, message)
            full_size = part == 1
            name = f"meeting {number} of 1/{part}"
            stand.time(name, *what, samples=samples if full_size else LEAST_SAMPLES, steps=STEPS if full_size else 1)
    stand.times["size"] = [float(nbytes)]


def _between(
    seen: Sequence[Times],
    hosts: Sequence[tuple[int, ...]],
    meetings: Sequence[Sequence[tuple[int, int]]],
    handover: Link,
) -> tuple[Link, float, list[float], tuple[tuple[float, float], ...]]:
    """The link between hosts, the time of a message, the time per byte of each host's port, and a curve."""
    nbytes = seen[0]["size"][0]

    def of(name: str, pair: tuple[int, int]) -> float:
        return _of([seen[rank] for host in pair for rank in hosts[host]], name)

    ports = [float("inf")] * len(hosts)
    rounds: dict[int, list[float]] = {1: [], MANY: []}
    points: tuple[tuple[float, float], ...] = ()
    for number, pairs in enumerate(meetings):
        most = max(len(hosts[host]) for pair in pairs for host in pair)
        for pair in pairs:
            # A host sends as many units as the larger host of the pair has ranks.
            share = max(len(hosts[host]) for host in pair) / most
            names = [(part, f"meeting {number} of 1/{part}") for part in PARTS]
            met = [(share * nbytes / part, of(name, pair)) for part, name in names if name in seen[0]]
            beta = met[-1][1] / met[-1][0]
            if len(met) == len(PARTS):
                points = tuple(met)
            for host in pair:
                ports[host] = min(ports[host], beta)
    for pair in meetings[0]:
        for messages in rounds:
            rounds[messages].append((of(f"between, {messages} {SMALL}", pair) - handover.alpha_s) / ROUNDS)
    one_s, many_s = (float(np.median(rounds[messages])) for messages in (1, MANY))
    message_s = max(many_s - one_s, 0.0) / (2 * (MANY - 1))
    alpha_s = max(one_s - 2 * message_s, 0.0)
    ports = levelled(ports)
    common = sorted(ports)[(len(ports) - 1) // 2]
    return Link(alpha_s, common), message_s, ports, ((float(TINY_NBYTES), one_s), *points)
