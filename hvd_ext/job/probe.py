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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hvd_ext.engine import engine as engines
from hvd_ext.job import consensus
from hvd_ext.planning import patterns
from hvd_ext.topology.fit import Curve, levelled, line, typical
from hvd_ext.topology.tree import ETHERNET, SHARED_MEMORY, Link, Node, Tree, leaf

if TYPE_CHECKING:
    from hvd_ext.options import Options
    from hvd_ext.planning.model import LogicalPlan

TINY_NBYTES = 4
ROUNDS = 16  # of small messages, one after the other
MANY = 8  # messages of a rank in a round
REPEATS = 5
HOST_SIZES = (64 << 10, 512 << 10, 2 << 20)
TURNS = 4  # so often a buffer goes around a host in one step, so that handing it over matters less
HOST_SEGMENT_NBYTES = 512 << 10  # of each rank's messages, as grain.py has it for one host
SELECTED_ELEMENTS = 256 << 10
DENSITY = 0.01
# Between hosts: the first look, and the time that the meetings of all rounds may take together.
LOOK_NBYTES = 64 << 10
MEETINGS_S = 0.8
MOST_MEETINGS = 8
MEETING_S = 0.03  # of the larger size; a shorter one would be disturbed too easily
PARTS = (4, 1)  # smaller sizes are for the curve
MEETING_NBYTES = 128 << 10, 8 << 20
# The ranks of a job that has begun are there. Who is not heard of for so long ends the probe, and not the job.
PATIENCE_S = 20.0


@dataclass(frozen=True)
class Measured:
    """What the ranks have measured.

    Args:
        tree: the cluster with its links and costs.
        curves: times over the size, in hosts and between hosts, with the fitted lines.
        seconds: how long it took.
    """

    tree: Tree
    curves: tuple[Curve, ...]
    seconds: float


@dataclass
class Stand:
    """Where plans are timed; all ranks use it alike.

    Args:
        engine: the engine of all ranks.
        times: what this rank has measured, by the name of the series.
    """

    engine: engines.Engine
    times: dict[str, list[float]] = field(default_factory=dict)

    def time(
        self, name: str, plan: LogicalPlan, nbytes: int, segment_nbytes: int = 1 << 30, repeats: int = REPEATS
    ) -> None:
        """Time the steps of a plan, after a first one that is not counted.

        Args:
            name: of the series.
            plan: the plan of all ranks.
            nbytes: the size of the buffer.
            segment_nbytes: the grain of pipelining.
            repeats: the number of steps.
        """
        from hvd_ext.planning import lower
        from hvd_ext.planning.layout import BucketLayout, Layout
        from hvd_ext.planning.tensors import Tensor

        rows = lower.rows_of(plan, self.engine.rank)
        handle = self.engine.add_plan(rows, plan.units)
        elements = max(nbytes // 4, 1)
        bucket = BucketLayout("float32", (0,), 0, plan, segment_nbytes)
        channel = self.engine.open_channel(
            "probe", Layout((Tensor("probe", (elements,), "float32"),), (bucket,)), lambda _: handle
        )
        buffer = np.zeros(elements, np.float32)
        step = self.engine.prepare(channel, [buffer], [buffer])
        self.engine.exchange("probe", b"")
        step()
        found = []
        for _ in range(repeats):
            begin = time.perf_counter()
            step()
            found.append(time.perf_counter() - begin)
        self.engine.close_channel(channel)
        self.engine.remove_plan(handle)
        self.times[name] = found

    def gathered(self) -> list[dict[str, float]]:
        """Give for each rank what is typical of each of its series, the same on all ranks; new series may follow."""
        mine = {name: typical(seconds) for name, seconds in self.times.items()}
        return consensus.exchange(self.engine, "probe", lambda: mine)


def measure(job: engines.Engine, hosts: Sequence[str], options: Options) -> Measured:
    """Measure the links of a job; all ranks call this function, and get the same answer.

    Args:
        job: the job's running engine.
        hosts: the host name of each rank.
        options: the options of the job.

    Returns:
        The cluster with its links.

    Raises:
        HvdExtError: it failed on some rank; the job's engine goes on.
    """
    begin = time.perf_counter()
    # What carries the job's data between hosts carries the probe's; nothing is looked for again.
    options = options.replace(transport="tcp" if job.between == "TCP" else "mpi", stall_fatal_s=PATIENCE_S)
    engine = engines.start_set(job, range(job.size), 0, options)
    whole = False
    try:
        names: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            names.setdefault(host, []).append(rank)
        stand = Stand(engine)
        found = _measured(stand, tuple(names), tuple(map(tuple, names.values())))
        whole = True
    finally:
        engine.stop(together=whole)
    return Measured(*found, time.perf_counter() - begin)


def _measured(stand: Stand, names: Sequence[str], hosts: Sequence[tuple[int, ...]]) -> tuple[Tree, tuple[Curve, ...]]:
    size = stand.engine.size
    _time_hosts(stand, hosts)
    meetings = patterns.pairs_of(len(hosts), MOST_MEETINGS) if len(hosts) > 1 else []
    if meetings:
        _look_between(stand, hosts, meetings[0])
    seen = stand.gathered()
    if meetings:
        _time_meetings(stand, hosts, meetings, max(times["look"] for times in seen))
        seen = stand.gathered()
    handover = line([(nbytes, max(times[f"nothing {nbytes}"] for times in seen)) for nbytes in (4, *HOST_SIZES)])
    most = max(len(ranks) for ranks in hosts)
    inside = [_inside([seen[rank] for rank in ranks], len(ranks), most, handover) for ranks in hosts]
    links = [one.link for one in inside if one is not None]
    betas = levelled([link.beta_s_per_byte for link in links])
    curves = []
    shared = iter(
        Link(float(np.median([link.alpha_s for link in links])), beta) for beta in betas
    )
    found = [SHARED_MEMORY if one is None else next(shared) for one in inside]
    gamma = float(np.median([one.gamma_s_per_byte for one in inside if one is not None] or [0.0]))
    message_s = float(np.median([one.message_s for one in inside if one is not None] or [0.0]))
    if links:
        slowest = max((one for one in inside if one is not None), key=lambda one: one.link.beta_s_per_byte)
        curves.append(Curve("in hosts", slowest.points, slowest.link))
    selection = max(times["selection"] for times in seen) if "selection" in seen[0] else None
    nodes = [
        Node(name, link, tuple(leaf(rank) for rank in ranks))
        for name, link, ranks in zip(names, found, hosts, strict=True)
    ]
    if not meetings:
        return Tree(nodes[0], gamma, message_s, selection, handover), tuple(curves)
    between, message_s, ports, points = _between(seen, hosts, meetings, handover)
    curves.append(Curve("between hosts", points, between))
    root = Node(
        "cluster",
        between,
        tuple(
            node if beta == between.beta_s_per_byte else _with_port(node, Link(between.alpha_s, beta))
            for node, beta in zip(nodes, ports, strict=True)
        ),
    )
    return Tree(root, gamma, message_s, selection, handover), tuple(curves)


def _with_port(node: Node, port: Link) -> Node:
    return Node(node.name, node.link, node.children, port=port)


def _time_hosts(stand: Stand, hosts: Sequence[tuple[int, ...]]) -> None:
    size = stand.engine.size
    for nbytes in (TINY_NBYTES, *HOST_SIZES):
        stand.time(f"nothing {nbytes}", patterns.nothing(size), nbytes)
    largest = max(len(ranks) for ranks in hosts)
    if largest == 1:
        return
    for messages in (1, MANY):
        plan = patterns.rings(hosts, size, rounds=ROUNDS, messages=messages)
        stand.time(f"in hosts, {messages}", plan, TINY_NBYTES * plan.units, repeats=2 * REPEATS)
    for nbytes in HOST_SIZES:
        for kind in ("all_gather", "reduce_scatter"):
            plan = patterns.rings(hosts, size, kind, rounds=TURNS * (largest - 1))
            stand.time(f"in hosts, {kind} {nbytes}", plan, nbytes, min(nbytes, largest * HOST_SEGMENT_NBYTES))


@dataclass(frozen=True)
class _Inside:
    link: Link
    message_s: float
    gamma_s_per_byte: float
    points: tuple[tuple[float, float], ...]


def _inside(seen: Sequence[dict[str, float]], size: int, most: int, handover: Link) -> _Inside | None:
    """The link in a host from what its ranks have seen; None for a host of one rank.

    Args:
        seen: what each of its ranks has measured.
        size: the number of its ranks.
        most: the number of ranks of the largest host.
        handover: what a step takes without messages.
    """
    if size == 1:
        return None

    def of(name: str) -> float:
        return max(times[name] for times in seen)

    # A ring of fewer ranks than the largest one has fewer rounds.
    rounds, turned = (-(-wanted // (most - 1)) * (size - 1) for wanted in (ROUNDS, TURNS * (most - 1)))
    one_s, many_s = ((of(f"in hosts, {messages}") - handover.alpha_s) / rounds for messages in (1, MANY))
    message_s = max(many_s - one_s, 0.0) / (2 * (MANY - 1))
    alpha_s = max(one_s - 2 * message_s, 0.0)
    sent, added = [], []
    for nbytes in HOST_SIZES:
        own_s = of(f"nothing {nbytes}")
        for kind, points in (("all_gather", sent), ("reduce_scatter", added)):
            whole_s = of(f"in hosts, {kind} {nbytes}")
            points.append((nbytes / most, max(whole_s - own_s, whole_s / 2) / turned))
    beta = line([*sent, (TINY_NBYTES, one_s)]).beta_s_per_byte
    gamma = max(line([*added, (TINY_NBYTES, one_s)]).beta_s_per_byte - beta, 0.0)
    return _Inside(Link(alpha_s, beta), message_s, gamma, ((float(TINY_NBYTES), one_s), *sent))


def _look_between(stand: Stand, hosts: Sequence[tuple[int, ...]], pairs: Sequence[tuple[int, int]]) -> None:
    size = stand.engine.size
    for messages in (1, MANY):
        plan = patterns.exchanges(hosts, pairs, size, rounds=ROUNDS, messages=messages)
        stand.time(f"between, {messages}", plan, TINY_NBYTES * plan.units)
    stand.time("look", *_exchange(hosts, pairs, size, LOOK_NBYTES, 8000), repeats=2)


def _exchange(
    hosts: Sequence[tuple[int, ...]], pairs: Sequence[tuple[int, int]], size: int, nbytes: int, message_nbytes: float
) -> tuple[LogicalPlan, int, int]:
    """The plan, the buffer and the segment of an exchange of so many bytes each way between hosts of the most ranks."""
    plan = patterns.exchanges(hosts, pairs, size)
    return plan, 2 * nbytes, int(message_nbytes) // 64 * 64 * plan.units


def _time_meetings(
    stand: Stand, hosts: Sequence[tuple[int, ...]], meetings: Sequence[Sequence[tuple[int, int]]], look_s: float
) -> None:
    from hvd_ext.planning.grain import message_nbytes

    beta = look_s / LOOK_NBYTES
    wanted_s = min(MEETING_S, MEETINGS_S / len(meetings) / (1 + REPEATS))
    nbytes = int(min(max(wanted_s / beta, MEETING_NBYTES[0]), MEETING_NBYTES[1])) // 4096 * 4096
    message = message_nbytes(beta)
    for number, pairs in enumerate(meetings):
        for part in PARTS:
            plan = _exchange(hosts, pairs, stand.engine.size, nbytes // part, message)
            stand.time(f"meeting {number} of 1/{part}", *plan, repeats=REPEATS if part == 1 else 2)
    stand.times["size"] = [float(nbytes)]


def _between(
    seen: Sequence[dict[str, float]],
    hosts: Sequence[tuple[int, ...]],
    meetings: Sequence[Sequence[tuple[int, int]]],
    handover: Link,
) -> tuple[Link, float, list[float], tuple[tuple[float, float], ...]]:
    """The link between hosts, the time of a message, the time per byte of each host's port, and a curve."""
    nbytes = seen[0]["size"]
    most = max(len(ranks) for ranks in hosts)

    def of(name: str, pair: tuple[int, int]) -> float:
        return max(seen[rank][name] for host in pair for rank in hosts[host])

    ports = [float("inf")] * len(hosts)
    rounds = {1: [], MANY: []}
    points: tuple[tuple[float, float], ...] = ()
    for number, pairs in enumerate(meetings):
        for pair in pairs:
            # A host sends as many units as the larger host of the pair has ranks.
            share = max(len(hosts[host]) for host in pair) / most
            met = [(share * nbytes / part, of(f"meeting {number} of 1/{part}", pair)) for part in PARTS]
            beta = met[-1][1] / met[-1][0]
            if beta < min(ports):
                points = tuple(met)
            for host in pair:
                ports[host] = min(ports[host], beta)
    for pair in meetings[0]:
        for messages in rounds:
            rounds[messages].append((of(f"between, {messages}", pair) - handover.alpha_s) / ROUNDS)
    one_s, many_s = (float(np.median(rounds[messages])) for messages in (1, MANY))
    message_s = max(many_s - one_s, 0.0) / (2 * (MANY - 1))
    alpha_s = max(one_s - 2 * message_s, 0.0)
    ports = levelled(ports)
    common = sorted(ports)[(len(ports) - 1) // 2]
    return Link(alpha_s, common), message_s, ports, ((float(TINY_NBYTES), one_s), *points)
