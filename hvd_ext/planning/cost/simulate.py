"""The time of a plan as it runs: its segments, in flight side by side, on the ports of a cluster; simulated.

What the engine does (tf_ops/engine/executor.h, transport_mpi.cc) is played with events. A rank has a window of segments
in flight. A round of a segment starts when the round before it has ended on this rank: its messages are handed over
at once, and it ends when they have left the rank and all messages for it have come and been reduced. A message travels
in parts. A part goes over each port on its way, first those up from the sender, then those down to the receiver;
each port and direction serves parts in the order of their arrival, for part * beta, and passes a part on as soon as
it has begun with it (cut-through). So messages that share a port share its time, part by part, and opposing messages do
not meet. A message has come when its last part is through, and the largest alpha on its way later.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush

import numpy as np

from hvd_ext.planning.cost.levels import Traffic, bottleneck
from hvd_ext.planning.cost.loads import Ports
from hvd_ext.planning.cost.sparse import DENSE, Sparsity, local_s_per_byte, sent_shares
from hvd_ext.planning.cost.terms import MESSAGE_NBYTES
from hvd_ext.planning.ir import LOCAL_OPCODES, OPCODE, PEER, RECV_REDUCE, ROUND, SENDS
from hvd_ext.planning.lower import rows_of
from hvd_ext.planning.model import LogicalPlan
from hvd_ext.topology.tree import Tree

WINDOW = 4  # segments in flight, as the engine's default
# More parts than these make a long message no smoother, only the simulation longer.
MOST_PARTS = 16
# So many messages are played, but at least so many windows of segments; the second half of them tells the pace of what
# is left. It settles within some twenty windows, as measured by playing on.
MOST_MESSAGES = 20_000
FULL_WINDOWS = 24


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a plan takes.

    Args:
        seconds: from the first message to the last.
        bottleneck_nbytes: over the port and direction that is busy for longest.
        bottleneck_s: how long that port is busy.
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
    """Plays a plan on a cluster.

    Of a long buffer only the first segments are played, at least 24 windows; the rest goes on at the pace of the second
    half of them. The times are those of ports and of reductions; processors are taken to keep up.

    Args:
        plan: of tree.size ranks; the rows of all of them are made, so that a few dozen ranks are much.
        tree: the cluster; its gamma_s_per_byte prices the reductions.
        nbytes: of the buffer.
        segment_nbytes: the grain of pipelining, as from planner.segment_nbytes().
        window: segments in flight.
        sparsity: of the step, for sparse plans; these run as one segment.

    Returns:
        The time, and the load of the port that is busiest.
    """
    program, busiest = _program(plan, tree, sparsity), bottleneck(plan, tree, sparsity)
    if busiest is None:
        busiest = Traffic(0, 0.0, 0.0, 0.0, 0.0)
    if not nbytes or not any(program.rounds):
        return Simulation(0.0, 0.0, 0.0)
    segments = max(-(-nbytes // segment_nbytes), 1)
    each, played = nbytes / segments, max(FULL_WINDOWS * window, MOST_MESSAGES // max(len(program.messages), 1))
    seconds = _Play(program, each, min(segments, played), window).seconds()
    if segments > played:
        half = played // 2
        pace_s = (seconds - _Play(program, each, half, window).seconds()) / (played - half)
        # While the queue before the busiest port still grows, the ranks seem faster than it is.
        seconds += (segments - played) * max(pace_s, each * busiest.busiest_s_per_byte)
    return Simulation(seconds, nbytes * busiest.bottleneck, nbytes * busiest.busiest_s_per_byte)


@dataclass(frozen=True, slots=True)
class _Message:
    """Of each segment: its share, its directed ports in order, and the round (a place in the list) that takes it."""

    share: float
    way: tuple[int, ...]
    alpha_s: float
    receiver: int
    round: int
    reduces: bool


@dataclass(frozen=True, slots=True)
class _Program:
    """The rows of all ranks. rounds[r][k]: what rank r sends in its k-th round, how many messages it waits for, and how
    long its local rows take for each byte of the buffer."""

    messages: tuple[_Message, ...]
    rounds: tuple[tuple[tuple[tuple[int, ...], int, float], ...], ...]
    beta_s_per_byte: tuple[float, ...]  # by directed port
    gamma_s_per_byte: float


@lru_cache(maxsize=64)
def _program(plan: LogicalPlan, tree: Tree, sparsity: Sparsity) -> _Program:
    ports = Ports(tree)
    tables = [rows_of(plan, rank) for rank in range(plan.size)]
    # The n-th send from one rank to another is what the n-th receive there takes.
    receives: dict[tuple[int, int], list[tuple[int, bool]]] = {}
    waits: list[list[int]] = []
    for rank, table in enumerate(tables):
        places = {number: place for place, number in enumerate(np.unique(table[:, ROUND]).tolist())}
        waits.append([0] * len(places))
        for row in table[~np.isin(table[:, OPCODE], (*SENDS, *LOCAL_OPCODES))].tolist():
            place = places[row[ROUND]]
            receives.setdefault((row[PEER], rank), []).append((place, row[OPCODE] == RECV_REDUCE))
            waits[rank][place] += 1
    messages: list[_Message] = []
    rounds = []
    for rank, table in enumerate(tables):
        places = {number: place for place, number in enumerate(np.unique(table[:, ROUND]).tolist())}
        sends: list[list[int]] = [[] for _ in places]
        shares = sent_shares(table, plan.units, sparsity)
        sending = np.isin(table[:, OPCODE], SENDS)
        for row, share in zip(table[sending].tolist(), shares[sending].tolist(), strict=True):
            way = _way(ports, rank, row[PEER])
            place, reduces = receives[rank, row[PEER]].pop(0)
            alpha_s = max(float(ports.alpha_s[port // 2]) for port in way)
            sends[places[row[ROUND]]].append(len(messages))
            messages.append(_Message(share, way, alpha_s, row[PEER], place, reduces))
        numbers = np.array([places[number] for number in table[:, ROUND].tolist()], dtype=np.int64)
        work = np.bincount(numbers, local_s_per_byte(table, plan.units, sparsity), len(places)).tolist()
        rounds.append(tuple((tuple(sent), *rest) for sent, *rest in zip(sends, waits[rank], work, strict=True)))
    betas = np.repeat(ports.beta_s_per_byte, 2).tolist()
    return _Program(tuple(messages), tuple(rounds), tuple(betas), tree.gamma_s_per_byte)


def _way(ports: Ports, sender: int, receiver: int) -> tuple[int, ...]:
    """The directed ports of a message: up from the sender's to the top, then down to the receiver's."""
    up, down = ports.ways[sender], ports.ways[receiver]
    parted = up != down
    ups = [2 * int(port) for port in up[parted & (up >= 0)]]
    downs = [2 * int(port) + 1 for port in down[parted & (down >= 0)]]
    return (*reversed(ups), *downs)


# Events: a part reaches a port; a message has come; a round has ended.
_PART, _COME, _ENDED = 0, 1, 2


class _Play:
    """One run: a heap of events in the order of time, and of their making where times are equal."""

    def __init__(self, program: _Program, segment_nbytes: float, segments: int, window: int) -> None:
        self._program = program
        self._nbytes = segment_nbytes
        self._segments = segments
        self._window = window
        ranks = range(len(program.rounds))
        self._port_free_s = [0.0] * len(program.beta_s_per_byte)
        self._rank_free_s = [0.0 for _ in ranks]  # of reductions
        self._started = [0 for _ in ranks]
        self._ended = [[False] * segments for _ in ranks]
        # Of each rank and segment: the round under way, what it still waits for, and when it ends at the earliest.
        self._round = [[-1] * segments for _ in ranks]
        self._missing = [[0] * segments for _ in ranks]
        self._ready_s = [[0.0] * segments for _ in ranks]
        self._early: dict[tuple[int, int, int], list[int]] = {}  # messages that came before their round
        self._events: list[tuple[float, int, int, int, int, int, float, float]] = []
        self._made = 0
        self._last_s = 0.0

    def seconds(self) -> float:
        """Plays to the end; returns when the last rank has ended."""
        for rank in range(len(self._started)):
            self._start_segments(rank, 0.0)
        program, events, free_s = self._program, self._events, self._port_free_s
        while events:
            now_s, _, kind, which, segment, hop, nbytes, end_s = heappop(events)
            if kind == _PART:
                message = program.messages[which]
                port = message.way[hop]
                begin_s = max(now_s, free_s[port])
                free_s[port] = begin_s + abs(nbytes) * program.beta_s_per_byte[port]
                end_s = max(end_s, free_s[port])
                if hop + 1 < len(message.way):
                    self._push(begin_s, _PART, which, segment, hop + 1, nbytes, end_s)
                elif nbytes < 0:
                    self._push(end_s + message.alpha_s, _COME, which, segment)
            elif kind == _COME:
                self._come(which, segment, now_s)
            else:
                self._next_round(which, segment, now_s)
        return self._last_s

    def _push(
        self, at_s: float, kind: int, which: int, segment: int, hop: int = 0, nbytes: float = 0.0, end_s: float = 0.0
    ) -> None:
        heappush(self._events, (at_s, self._made, kind, which, segment, hop, nbytes, end_s))
        self._made += 1

    def _start_segments(self, rank: int, now_s: float) -> None:
        ended, window = self._ended[rank], self._window
        while (segment := self._started[rank]) < self._segments and (segment < window or ended[segment - window]):
            self._started[rank] += 1
            self._next_round(rank, segment, now_s)

    def _next_round(self, rank: int, segment: int, now_s: float) -> None:
        self._round[rank][segment] += 1
        place, rounds = self._round[rank][segment], self._program.rounds[rank]
        if place == len(rounds):
            self._ended[rank][segment] = True
            self._last_s = max(self._last_s, now_s)
            self._start_segments(rank, now_s)
            return
        sends, self._missing[rank][segment], work = rounds[place]
        self._ready_s[rank][segment] = max([now_s, *(self._send(which, segment, now_s) for which in sends)])
        if work:
            busy_s = max(now_s, self._rank_free_s[rank]) + work * self._nbytes
            self._rank_free_s[rank] = self._ready_s[rank][segment] = busy_s
        if not self._missing[rank][segment]:
            self._push(self._ready_s[rank][segment], _ENDED, rank, segment)
        for which in self._early.pop((rank, segment, place), ()):
            self._take(which, segment, now_s)

    def _send(self, which: int, segment: int, now_s: float) -> float:
        """Gives a message to the first port, in parts; returns when it has left the rank."""
        message, program = self._program.messages[which], self._program
        nbytes, port = message.share * self._nbytes, message.way[0]
        parts = min(max(-int(-nbytes // MESSAGE_NBYTES), 1), MOST_PARTS)
        part = nbytes / parts
        for number in range(parts):
            begin_s = max(now_s, self._port_free_s[port])
            end_s = self._port_free_s[port] = begin_s + part * program.beta_s_per_byte[port]
            # The last part is told by its sign.
            self._push(begin_s, _PART, which, segment, 1, -part if number + 1 == parts else part, end_s)
        return end_s

    def _come(self, which: int, segment: int, now_s: float) -> None:
        message = self._program.messages[which]
        rank, place = message.receiver, message.round
        if self._round[rank][segment] == place:
            self._take(which, segment, now_s)
        else:
            self._early.setdefault((rank, segment, place), []).append(which)

    def _take(self, which: int, segment: int, now_s: float) -> None:
        """Reduces a message that has come, one after the other on each rank, and notes it."""
        message = self._program.messages[which]
        rank = message.receiver
        if message.reduces and self._program.gamma_s_per_byte:
            begin_s = max(now_s, self._rank_free_s[rank])
            now_s = begin_s + message.share * self._nbytes * self._program.gamma_s_per_byte
            self._rank_free_s[rank] = now_s
        self._ready_s[rank][segment] = max(self._ready_s[rank][segment], now_s)
        self._missing[rank][segment] -= 1
        if not self._missing[rank][segment]:
            self._push(self._ready_s[rank][segment], _ENDED, rank, segment)
