"""The closed form of each schedule on a cluster, seconds; `cost` and `sparse_cost` find it by the schedule's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from benchmarks.closed_forms import blueconnect, commlib, flexreduce, mgwfbp
from hvd_ext.planning.cost.bounds import slowest
from hvd_ext.planning.cost.loads import Ports
from hvd_ext.planning.cost.simulate import MESSAGE_NBYTES
from hvd_ext.planning.cost.sparse import ELEMENT_NBYTES, ENTRY_NBYTES, SELECT_S_PER_ELEMENT
from hvd_ext.planning.schedules.halving_doubling import order_of
from hvd_ext.planning.schedules.recursive_doubling import rounds_of
from hvd_ext.planning.schedules.tree import hosts_of
from hvd_ext.planning.stages import stages_of
from hvd_ext.topology.tree import Link, Node, Tree

_Ints = NDArray[np.int64]


def cost(name: str, tree: Tree, nbytes: int) -> float:
    """The price of a dense schedule by the closed form of its source, without pipelining, seconds."""
    return _DENSE[name](tree, nbytes)


def sparse_cost(name: str, tree: Tree, nbytes: int, density: float) -> float:
    """The price of a sparse schedule by the closed form of its source, with the bytes of whole entries, seconds."""
    return _SPARSE[name](tree, nbytes, density)


def chain_s(nbytes: float, size: int, link: Link, gamma_s_per_byte: float = 0.0) -> float:
    """A reduce or a broadcast along a chain of neighbours, pipelined in many segments: each port has the buffer once.

    Args:
        nbytes: the size of the whole buffer.
        size: the number of ranks in the chain, d.
        link: the link of each rank.
        gamma_s_per_byte: the time of a reduction; 0 for a broadcast.

    Returns:
        (d - 1) * alpha + n * (beta + gamma) for d > 1, seconds.
    """
    return (size - 1) * link.alpha_s + (nbytes * (link.beta_s_per_byte + gamma_s_per_byte) if size > 1 else 0.0)


def _ring(tree: Tree, nbytes: int) -> float:
    """2 T_r(P, n, min W), BlueConnect Eq. 6."""
    return blueconnect.one_level_s(nbytes, tree.size, slowest(tree), tree.gamma_s_per_byte)


def _blueconnect(tree: Tree, nbytes: int) -> float:
    """BlueConnect Eq. 9, or Eq. 6 if the schedule falls back to a ring."""
    stages = stages_of(tree)
    if any(not stage.follows for stage in stages):
        return _ring(tree, nbytes)
    degrees, links = [stage.degree for stage in stages], [stage.link for stage in stages]
    return blueconnect.fat_tree_s(nbytes, degrees, links, tree.gamma_s_per_byte)


def _torus2d(tree: Tree, nbytes: int) -> float:
    """BlueConnect Eq. 9 with rings only. If each dimension has links of its own, Eq. 10 holds (`torus_s`)."""
    stages = stages_of(tree)
    degrees, links = [stage.degree for stage in stages], [stage.link for stage in stages]
    return blueconnect.fat_tree_s(nbytes, degrees, links, tree.gamma_s_per_byte, ring_only=True)


def _two_level(tree: Tree, nbytes: int) -> float:
    """BlueConnect Eq. 7, but with reduce and broadcast as pipelined chains, as the engine runs them."""
    hosts = [node for level in tree.levels() for node in level if not any(child.children for child in node.children)]
    gamma = tree.gamma_s_per_byte
    up = max((chain_s(nbytes, len(host.children), host.slowest, gamma) for host in hosts), default=0.0)
    down = max((chain_s(nbytes, len(host.children), host.slowest) for host in hosts), default=0.0)
    return up + blueconnect.one_level_s(nbytes, len(tree.hosts()), slowest(tree), gamma) + down


def _binary_tree(tree: Tree, nbytes: int) -> float:
    """MG-WFBP Table II, row 1, added up over the levels of the tree, with the slowest branch of each level.

    A message between hosts also crosses ports inside the hosts; the slowest of its links counts.
    """

    def line(node: Node) -> mgwfbp.Line:
        return mgwfbp.binary_tree(len(node.children), node.slowest, tree.gamma_s_per_byte)

    return sum(max(line(node).seconds(nbytes) for node in nodes) for nodes in tree.levels())


def _recursive_doubling(tree: Tree, nbytes: int) -> float:
    """MG-WFBP Table II, row 2, but with ports between hosts that several pairs share."""
    ports = Ports(tree)
    folded, rounds = rounds_of(tree)
    total = (len(rounds) + bool(folded)) * nbytes * tree.gamma_s_per_byte
    for pairs in rounds:
        left, right = np.array(pairs, dtype=np.int64).T
        total += _round_s(ports, np.concatenate((left, right)), np.concatenate((right, left)), nbytes)
    if folded:
        givers, takers = np.array(folded, dtype=np.int64).T
        total += _round_s(ports, givers, takers, nbytes) + _round_s(ports, takers, givers, nbytes)
    return total


def _halving_doubling(tree: Tree, nbytes: int) -> float:
    """MG-WFBP Table II, row 3, but with ports between hosts that several messages share."""
    size, ports = tree.size, Ports(tree)
    order = np.array(order_of(tree), dtype=np.int64)
    total = nbytes * (size - 1) / size * tree.gamma_s_per_byte
    for step in range((size - 1).bit_length()):
        half = 1 << step
        part = nbytes * (min(2 * half, size) - half) / size
        behind = np.roll(order, half)
        total += _round_s(ports, order, behind, part) + _round_s(ports, behind, order, part)
    return total


def _round_s(ports: Ports, senders: _Ints, receivers: _Ints, nbytes: float) -> float:
    """A round of messages of equal size: the largest latency plus the time of the busiest port, seconds."""
    _, crossed = ports.crossed(senders, receivers)
    if not len(crossed):
        return 0.0
    busy = np.bincount(crossed) * np.repeat(ports.beta_s_per_byte, 2)[: crossed.max() + 1]
    return float(ports.alpha_s[crossed // 2].max() + nbytes * busy.max())


def _tree(tree: Tree, nbytes: int) -> float:
    """Chains in the hosts, and two trees over the hosts, in segments of two messages; each port carries 2 n bytes."""
    hosts, link, gamma = hosts_of(tree), slowest(tree), tree.gamma_s_per_byte
    longest = max(len(host) for host in hosts)
    segment = min(nbytes, 2 * MESSAGE_NBYTES)
    rate = max(2 * link.beta_s_per_byte, gamma) if tree.size > 1 else 0.0
    chain = 0.0
    if longest > 1:
        nodes = [node for level in tree.levels() for node in level]
        links = [node.slowest for node in nodes if not any(child.children for child in node.children)]
        inside = max(links, key=lambda link: link.beta_s_per_byte)
        chain = chain_s(segment, longest, inside, gamma) + chain_s(segment, longest, inside)
        if chain:  # a master's port also carries the messages of its host's chain
            rate = max(rate, 2.5 * inside.beta_s_per_byte, 1.5 * gamma)
    rounds = 2 * (len(hosts).bit_length() - 1)
    first_s = rounds * (link.alpha_s + segment * link.beta_s_per_byte)
    return chain + first_s + (nbytes - segment) * rate  # the other segments follow at the rate of the busiest port


def _hitopk(tree: Tree, nbytes: int, density: float) -> float:
    """CommLib Eq. 7-10, with values and indices, and with the cheaper way to gather in the last step."""
    elements = nbytes / ELEMENT_NBYTES
    return min(sum(commlib.hitopk_s(tree, elements, density, dense_gather=dense)) for dense in (False, True))


def _naive_allgather(tree: Tree, nbytes: int, density: float) -> float:
    """CommLib Eq. 3 with values and indices, and the time of the selection."""
    return commlib.naive_s(tree, nbytes / ELEMENT_NBYTES, density)


def _gtopk(tree: Tree, nbytes: int, density: float) -> float:
    """2 ceil(log2 P) (alpha + k entry beta) over the slowest link, plus the selection."""
    elements, link = nbytes / ELEMENT_NBYTES, slowest(tree)
    message_s = link.alpha_s + density * elements * ENTRY_NBYTES * link.beta_s_per_byte
    return elements * SELECT_S_PER_ELEMENT + 2 * (tree.size - 1).bit_length() * message_s


_DENSE: Mapping[str, Callable[[Tree, int], float]] = {
    "binary_tree": _binary_tree,
    "blueconnect": _blueconnect,
    "flexreduce": flexreduce.tree_s,
    "halving_doubling": _halving_doubling,
    "recursive_doubling": _recursive_doubling,
    "ring": _ring,
    "torus2d": _torus2d,
    "tree": _tree,
    "two_level": _two_level,
}
_SPARSE: Mapping[str, Callable[[Tree, int, float], float]] = {
    "gtopk": _gtopk,
    "hitopk": _hitopk,
    "naive_allgather": _naive_allgather,
}
