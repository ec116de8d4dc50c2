"""The price of a plan from the traffic of its rows over each port of a cluster, round by round.

Every port (of a rank to its host, of a host to its network) carries both directions at the same time, and the messages
of a round share the ports on their way.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from hvd_ext.planning.cost.sparse import DENSE, Sparsity, local_s_per_byte, sent_shares
from hvd_ext.planning.ir import BEGIN, COUNT, LOCAL_OPCODES, OPCODE, PEER, RECV_REDUCE, ROUND, SEND, SENDS, Rows
from hvd_ext.planning.lower import rounds_of, rows_of
from hvd_ext.planning.model import LogicalPlan
from hvd_ext.topology.tree import Node, Tree

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


class Ports:
    """The ports of a cluster: one for each child of a branch, to that branch."""

    def __init__(self, tree: Tree) -> None:
        ways: dict[int, list[int]] = {}
        alphas: list[float] = []
        betas: list[float] = []
        depths: list[int] = []
        numbers = count()
        open_nodes: list[tuple[Node, list[int]]] = [(tree.root, [])]
        while open_nodes:
            node, way = open_nodes.pop()
            if not node.children:
                ways[node.rank] = way
            for child, port in zip(node.children, node.ports, strict=True):
                open_nodes.append((child, [*way, next(numbers)]))
                alphas.append(port.alpha_s)
                betas.append(port.beta_s_per_byte)
                depths.append(len(way))
        # The ports from the root down to each rank; -1 below a leaf. Two ways differ at every depth after they part.
        self.ways: _Ints = np.full((tree.size, max(tree.depth, 1)), -1, dtype=np.int64)
        for rank, way in ways.items():
            self.ways[rank, : len(way)] = way
        self.alpha_s: _Floats = np.array(alphas or [0.0])
        self.beta_s_per_byte: _Floats = np.array(betas or [0.0])
        self.depths: _Ints = np.array(depths or [0], dtype=np.int64)

    def crossed(self, senders: _Ints, receivers: _Ints) -> tuple[_Ints, _Ints]:
        """Finds the ports that messages cross.

        Args:
            senders, receivers: of each message [n].

        Returns:
            For each crossing, the number of the message and that of the directed port: 2 * port, plus 1 for the way
            down.
        """
        parted = self.ways[senders] != self.ways[receivers]
        messages, ports = [], []
        for ranks, down in ((senders, 0), (receivers, 1)):
            chosen = parted & (self.ways[ranks] >= 0)
            messages.append(np.nonzero(chosen)[0])
            ports.append(2 * self.ways[ranks][chosen] + down)
        return np.concatenate(messages), np.concatenate(ports)

    def slowest_s_per_byte(self, senders: _Ints, receivers: _Ints) -> _Floats:
        """The time per byte of the slowest port that each message crosses, seconds [n]."""
        messages, crossed = self.crossed(senders, receivers)
        slowest = np.zeros(len(senders))
        np.maximum.at(slowest, messages, self.beta_s_per_byte[crossed // 2])
        return slowest


def messages_s(tree: Tree, senders: _Ints, receivers: _Ints) -> _Floats:
    """The time that each message takes a processor of its sender, and one of its receiver, seconds [n].

    With several hosts, only messages between them cost the tree's message_s.
    """
    if len(tree.hosts()) == 1 or not tree.message_s:
        return np.full(len(senders), tree.message_s)
    hosts = host_of(tree)
    return np.where(hosts[senders] == hosts[receivers], 0.0, tree.message_s)


def host_of(tree: Tree) -> _Ints:
    """The number of each rank's host, int64 [ranks]."""
    numbers = np.empty(tree.size, dtype=np.int64)
    for number, ranks in enumerate(tree.hosts()):
        numbers[list(ranks)] = number
    return numbers


def copy_s_per_byte(tree: Tree) -> float:
    """The time of a copy of a buffer: the hand-over makes two, into the engine's memory and out of it."""
    return tree.handover.beta_s_per_byte / 2


def exchanged_s_per_byte(tree: Tree, ports: Ports, senders: _Ints, receivers: _Ints) -> _Floats:
    """The time that a message of an exchange takes in a host beyond its transfer and addition, seconds per byte [n].

    In an exchange a rank adds a message to elements that it sends itself in the same round. In shared memory the
    receiver of other messages adds them where they lie. The message of an exchange is copied first, because the peer
    still reads the receiver's elements; then these elements are in the peer's cache, and return over the same ports.
    Prices have this for every form of numbers, though only plain ones need it, and for hosts whose ranks do not share
    memory. It is 0 between hosts, and in a tree whose hand-over, and so the time of a copy, is not known.
    """
    hosts, copied_s = host_of(tree), copy_s_per_byte(tree)
    near = (hosts[senders] == hosts[receivers]) & (copied_s > 0)
    return np.where(near, copied_s + ports.slowest_s_per_byte(senders, receivers), 0.0)


def added_s_per_byte(rows: Rows, rank: int, tree: Tree, ports: Ports) -> _Floats:
    """The time in which a rank adds the message of each row, for each byte of the message, seconds [n]."""
    adds = rows[:, OPCODE] == RECV_REDUCE
    seconds = np.where(adds, tree.gamma_s_per_byte, 0.0)
    if not copy_s_per_byte(tree):
        return seconds
    sent: dict[int, list[tuple[int, int]]] = {}
    for row in rows[rows[:, OPCODE] == SEND].tolist():
        sent.setdefault(row[ROUND], []).append((row[BEGIN], row[BEGIN] + row[COUNT]))
    exchanges = []
    for number in np.nonzero(adds)[0].tolist():
        begin, end = int(rows[number, BEGIN]), int(rows[number, BEGIN] + rows[number, COUNT])
        if any(first < end and begin < last for first, last in sent.get(int(rows[number, ROUND]), ())):
            exchanges.append(number)
    if exchanges:
        peers = rows[exchanges, PEER]
        seconds[exchanges] += exchanged_s_per_byte(tree, ports, peers, np.full_like(peers, rank))
    return seconds


@dataclass(frozen=True, slots=True)
class Profile:
    """The load of a plan on a cluster, for any size of buffer.

    Args:
        latency_s: the sum over the rounds of the largest latency and of the processor time of messages.
        rounds_s_per_byte: the sum over the rounds of the time of the busiest port and of the longest work on a rank.
        busiest_s_per_byte: the time of the port or the rank that is busiest over all rounds.
        messages_s: the processor time of all messages of a segment on the rank that has the most.
        handover_s_per_byte: the time in which a rank hands the buffer over and gets it back.
    """

    latency_s: float
    rounds_s_per_byte: float
    busiest_s_per_byte: float
    messages_s: float = 0.0
    handover_s_per_byte: float = 0.0

    def price_s(self, nbytes: int, segment_nbytes: int | None = None) -> float:
        """The price: the first segment goes through all rounds, the others follow at the rate of the busiest port.

        Without segments nothing is pipelined, as in the papers' closed forms.
        """
        first = nbytes if segment_nbytes is None else min(segment_nbytes, nbytes)
        paced_s = (nbytes - first) * self.pace_s_per_byte(first)
        return self.latency_s + first * self.rounds_s_per_byte + paced_s + nbytes * self.handover_s_per_byte

    def pace_s_per_byte(self, segment_nbytes: float) -> float:
        """The pace of a long buffer: that of the busiest port, or of the rank with the most messages."""
        return max(self.busiest_s_per_byte, self.messages_s / max(segment_nbytes, 1))


def profile(plan: LogicalPlan, tree: Tree, sparsity: Sparsity = DENSE) -> Profile:
    """Counts the bytes that a plan sends over each port of a cluster.

    It makes the rows of all ranks, and is meant for plans of at most a few hundred ranks.
    """
    ports, rounds = Ports(tree), rounds_of(plan)
    rows = [rows_of(plan, rank) for rank in range(plan.size)]
    table = np.concatenate(rows)
    ranks = np.repeat(np.arange(plan.size), [len(of_rank) for of_rank in rows])
    sends, reduces = np.isin(table[:, OPCODE], SENDS), table[:, OPCODE] == RECV_REDUCE
    shares = np.concatenate([sent_shares(of_rank, plan.units, sparsity) for of_rank in rows])[sends]
    sent_in, senders, receivers = table[sends, ROUND], ranks[sends], table[sends, PEER]
    messages, crossed = ports.crossed(senders, receivers)
    alpha_s = np.zeros(rounds + 1)
    np.maximum.at(alpha_s, sent_in[messages], ports.alpha_s[crossed // 2])
    seconds = shares[messages] * ports.beta_s_per_byte[crossed // 2]
    loads = _table(sent_in[messages], crossed, seconds, (rounds + 1, 2 * len(ports.alpha_s)))
    local_s = np.concatenate([local_s_per_byte(of_rank, plan.units, sparsity) for of_rank in rows])
    local_s *= np.array(tree.sharing)[ranks]
    added_s = np.concatenate([added_s_per_byte(of_rank, rank, tree, ports) for rank, of_rank in enumerate(rows)])
    work_s = local_s + table[:, COUNT] / plan.units * added_s
    works = reduces | np.isin(table[:, OPCODE], LOCAL_OPCODES)
    work = _table(table[works, ROUND], ranks[works], work_s[works], (rounds + 1, plan.size))
    each_s = messages_s(tree, senders, receivers)
    busy = _table(sent_in, senders, each_s, work.shape) + _table(sent_in, receivers, each_s, work.shape)
    return Profile(
        latency_s=float(alpha_s.sum() + busy.max(axis=1).sum()) + tree.handover.alpha_s,
        rounds_s_per_byte=float(loads.max(axis=1).sum() + work.max(axis=1).sum()),
        busiest_s_per_byte=float(max(loads.sum(axis=0).max(), work.sum(axis=0).max())),
        messages_s=float(busy.sum(axis=0).max()),
        handover_s_per_byte=tree.handover.beta_s_per_byte,
    )


def _table(rows: _Ints, columns: _Ints, values: _Floats, shape: tuple[int, int]) -> _Floats:
    """Adds values up by row and column."""
    summed = np.bincount(rows * shape[1] + columns, values, shape[0] * shape[1])
    return summed.astype(np.float64).reshape(shape)
