"""The simulated time of a plan whose segments are in flight at the same time on the ports of a cluster.

The engine (tf_ops/engine/executor.h, transport_mpi.cc) is simulated with the events of `hvd_ext.simulation`. A message
crosses the ports upwards from its sender and then downwards to its receiver. A port has two directions, so that
opposing messages do not share it. The latency of a message is the largest alpha on its way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hvd_ext.planning.cost.levels import bottleneck
from hvd_ext.planning.cost.loads import Ports, added_s_per_byte, messages_s
from hvd_ext.planning.cost.sparse import DENSE, Sparsity, local_s_per_byte, sent_shares
from hvd_ext.planning.ir import LOCAL_OPCODES, OPCODE, PEER, ROUND, SENDS
from hvd_ext.planning.lower import rows_of
from hvd_ext.planning.model import LogicalPlan
from hvd_ext.simulation.events import Message, Play, Program, Run
from hvd_ext.topology.tree import Tree

# The best size of a message: Open MPI's TCP transport serialises opposing messages above its eager limit of 64 KiB.
MESSAGE_NBYTES = 60_000
WINDOW = 4  # segments in flight, the engine's default
# The largest number of messages that are simulated, but at least the number of windows below. The pace of the second
# half of them is taken for the rest of the buffer; longer simulations showed that it settles within about 20 windows.
MOST_MESSAGES = 20_000
FULL_WINDOWS = 24


@dataclass(frozen=True, slots=True)
class Simulation:
    """The time of a plan, and the load of its busiest port.

    Args:
        bottleneck_nbytes: the bytes over the port and direction that is busy for longest.
    """

    seconds: float
    bottleneck_nbytes: float
    bottleneck_s: float


def simulate(
    plan: LogicalPlan,
    tree: Tree,
    nbytes: int,
    segment_nbytes: int,
    window: int = WINDOW,
    sparsity: Sparsity = DENSE,
) -> Simulation:
    """Simulates a plan on a cluster.

    Of a long buffer only the first segments are simulated, at least 24 windows; the rest is assumed to continue at the
    pace of their second half. Ports, reductions, messages and the hand-over take time; processors keep up with
    everything else.

    Args:
        plan: a plan for tree.size ranks, a few dozen at most, because the rows of all ranks are made.
        sparsity: the sparsity of the step, for sparse plans, which run as one segment.
    """
    tree = tree.at(nbytes)
    program, busiest = program_of(plan, tree, sparsity), bottleneck(plan, tree, sparsity)
    if not nbytes or not any(program.rounds):
        return Simulation(0.0, 0.0, 0.0)
    segments = max(-(-nbytes // segment_nbytes), 1)
    each, played = nbytes / segments, max(FULL_WINDOWS * window, MOST_MESSAGES // max(len(program.messages), 1))
    seconds = Segments(program, each, each * busiest.busiest_s_per_byte, window, played).first_s(segments)
    seconds += tree.handover.alpha_s + nbytes * tree.handover.beta_s_per_byte
    return Simulation(seconds, nbytes * busiest.bottleneck, nbytes * busiest.busiest_s_per_byte)


class Segments:
    """The time of the first segments of an endless row of equal ones, in a lane of their own.

    Args:
        each: the bytes of a segment.
        least_s: the time for which a segment keeps the busiest port busy.
        most: the largest number of segments that are played; the others follow at the pace of the second half of them.
    """

    def __init__(self, program: Program, each: float, least_s: float, window: int, most: int) -> None:
        self._program, self._each, self._least_s, self._window, self._most = program, each, least_s, window, most
        self._played: dict[int, float] = {}

    def first_s(self, count: int) -> float:
        """The time of the first `count` segments, seconds."""
        most = self._most
        if count > most:
            pace_s = (self.first_s(most) - self.first_s(most // 2)) / (most - most // 2)
            # While the queue before the busiest port still grows, the ranks seem faster than this port.
            return self.first_s(most) + (count - most) * max(pace_s, self._least_s)
        if count not in self._played:
            _, (self._played[count],) = Play([Run(self._program, self._each, count)], self._window).seconds()
        return self._played[count]


@lru_cache(maxsize=128)
def program_of(plan: LogicalPlan, tree: Tree, sparsity: Sparsity = DENSE) -> Program:
    """Makes the program of a plan, which the events of `hvd_ext.simulation` play."""
    ports = Ports(tree)
    tables = [rows_of(plan, rank) for rank in range(plan.size)]
    # The n-th send from one rank to another matches the n-th receive there.
    receives: dict[tuple[int, int], list[tuple[int, float]]] = {}
    places = [{number: place for place, number in enumerate(np.unique(table[:, ROUND]).tolist())} for table in tables]
    waits = [[0] * len(of_rank) for of_rank in places]
    for rank, table in enumerate(tables):
        received = ~np.isin(table[:, OPCODE], (*SENDS, *LOCAL_OPCODES))
        added_s = added_s_per_byte(table, rank, tree, ports)[received]
        for row, add_s in zip(table[received].tolist(), added_s.tolist(), strict=True):
            place = places[rank][row[ROUND]]
            receives.setdefault((row[PEER], rank), []).append((place, add_s))
            waits[rank][place] += 1
    messages: list[Message] = []
    rounds = []
    for rank, table in enumerate(tables):
        sends: list[list[int]] = [[] for _ in places[rank]]
        shares = sent_shares(table, plan.units, sparsity)
        sending = np.isin(table[:, OPCODE], SENDS)
        busy_s = messages_s(tree, np.full(plan.size, rank), np.arange(plan.size))  # by the receiver
        for row, share in zip(table[sending].tolist(), shares[sending].tolist(), strict=True):
            way = _way(ports, rank, row[PEER])
            place, add_s = receives[rank, row[PEER]].pop(0)
            alpha_s = max(float(ports.alpha_s[port // 2]) for port in way)
            sends[places[rank][row[ROUND]]].append(len(messages))
            messages.append(Message(share, way, alpha_s, row[PEER], place, add_s, float(busy_s[row[PEER]])))
        numbers = np.array([places[rank][number] for number in table[:, ROUND].tolist()], dtype=np.int64)
        local_s = local_s_per_byte(table, plan.units, sparsity) * tree.sharing[rank]
        work = np.bincount(numbers, local_s, len(sends)).tolist()
        rounds.append(tuple((tuple(sent), *rest) for sent, *rest in zip(sends, waits[rank], work, strict=True)))
    betas = np.repeat(ports.beta_s_per_byte, 2).tolist()
    return Program(tuple(messages), tuple(rounds), tuple(betas), MESSAGE_NBYTES)


def _way(ports: Ports, sender: int, receiver: int) -> tuple[int, ...]:
    """The directed ports of a message: upwards from the sender's port, then downwards to the receiver's."""
    up, down = ports.ways[sender], ports.ways[receiver]
    parted = up != down
    ups = [2 * int(port) for port in up[parted & (up >= 0)]]
    downs = [2 * int(port) + 1 for port in down[parted & (down >= 0)]]
    return (*reversed(ups), *downs)
