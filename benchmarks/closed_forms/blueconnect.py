"""BlueConnect's performance models (Section 2.2, 2.3 and 3.3), Eq. 1-10, with the time of the reductions added.

The paper leaves arithmetic out; gamma_s_per_byte = 0 gives its equations. A Link has alpha and 1 / w.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hvd_ext.topology.tree import Link


def ring_s(nbytes: float, size: int, link: Link, gamma_s_per_byte: float = 0.0) -> float:
    """Eq. 1: T_r, a reduce-scatter or an all-gather as a ring (FlexReduce's Eq. 2 is the same).

    Args:
        nbytes: the size of the whole buffer, n.
        size: the number of learners in the ring, p.
        link: the link of each learner.
        gamma_s_per_byte: the time of a reduction; 0 for an all-gather.

    Returns:
        (p - 1) * alpha + (p - 1) / p * n * (beta + gamma), seconds.
    """
    return (size - 1) * (link.alpha_s + nbytes / size * (link.beta_s_per_byte + gamma_s_per_byte))


def recursive_s(nbytes: float, size: int, link: Link, gamma_s_per_byte: float = 0.0) -> float:
    """Eq. 2: T_c, recursive halving or doubling, for any p: our circulant pattern does not need a power of two.

    Args:
        nbytes: the size of the whole buffer, n.
        size: learners, p.
        link: the link of each learner.
        gamma_s_per_byte: the time of a reduction; 0 for an all-gather.

    Returns:
        ceil(lg p) * alpha + (p - 1) / p * n * (beta + gamma), seconds.
    """
    steps = (size - 1).bit_length()
    return steps * link.alpha_s + (size - 1) * nbytes / size * (link.beta_s_per_byte + gamma_s_per_byte)


def is_recursive(size: int) -> bool:
    """Eq. 3's choice: True, for recursive, if the number of learners is a power of two; else False, for a ring.

    Args:
        size: the number of learners, p.
    """
    return size & (size - 1) == 0


def ring_or_recursive_s(nbytes: float, size: int, link: Link, gamma_s_per_byte: float = 0.0) -> float:
    """Eq. 3: T_r/c, recursive or a ring by the choice of `is_recursive`.

    Args:
        nbytes: the size of the whole buffer, n.
        size: learners, p.
        link: the link of each learner.
        gamma_s_per_byte: the time of a reduction; 0 for an all-gather.

    Returns:
        Seconds.
    """
    return (recursive_s if is_recursive(size) else ring_s)(nbytes, size, link, gamma_s_per_byte)


def broadcast_s(nbytes: float, size: int, link: Link, gamma_s_per_byte: float = 0.0) -> float:
    """Eq. 4: a broadcast is a scatter (T_c) and an all-gather (T_r); a reduce is the reverse.

    Args:
        nbytes: the size of the buffer.
        size: learners.
        link: the link of each learner.
        gamma_s_per_byte: the time of a reduction; 0 for a broadcast.

    Returns:
        Seconds.
    """
    return recursive_s(nbytes, size, link) + ring_s(nbytes, size, link, gamma_s_per_byte)


def one_level_s(nbytes: float, size: int, slowest: Link, gamma_s_per_byte: float = 0.0) -> float:
    """Eq. 5-6: an allreduce as one ring, limited by the slowest link.

    Args:
        nbytes: the size of the buffer.
        size: the number of learners, |P|.
        slowest: the slowest link, min W.
        gamma_s_per_byte: the time of a reduction.

    Returns:
        Seconds.
    """
    return ring_s(nbytes, size, slowest, gamma_s_per_byte) + ring_s(nbytes, size, slowest)


def two_level_s(nbytes: float, per_host: int, hosts: int, inside: Link, slowest: Link, gamma: float = 0.0) -> float:
    """Eq. 7: a reduce to a master on each node, an allreduce over the masters, and a broadcast.

    Args:
        nbytes: the size of the buffer.
        per_host: the number of learners on each node, p_0.
        hosts: the number of nodes, |P| / p_0.
        inside: the link inside the nodes, w_0.
        slowest: the slowest link, min W.
        gamma: seconds per reduced byte.

    Returns:
        Seconds.
    """
    local = broadcast_s(nbytes, per_host, inside, gamma) + broadcast_s(nbytes, per_host, inside)
    masters = ring_or_recursive_s(nbytes, hosts, slowest, gamma) + ring_or_recursive_s(nbytes, hosts, slowest)
    return local + masters


def shared(links: Sequence[Link], degrees: Sequence[int], stage: int) -> Link:
    """A learner's share of the slowest network in a stage: min over j <= i of w_j / (p_0 ... p_{j-1}).

    The paper prints j < i under the minimum of Eq. 9, but its first line, min{w_0, w_1 / p_0} in stage 1, has j <= i.

    Args:
        links: the links of the networks, from the inside.
        degrees: the number of learners per stage, p_i.
        stage: the stage, i.

    Returns:
        The largest alpha and the largest shared beta.
    """
    betas = [links[j].beta_s_per_byte * prod(degrees[:j]) for j in range(stage + 1)]
    return Link(max(link.alpha_s for link in links[: stage + 1]), max(betas))


def fat_tree_s(
    nbytes: float, degrees: Sequence[int], links: Sequence[Link], gamma_s_per_byte: float = 0.0, ring_only: bool = False
) -> float:
    """Eq. 9: BlueConnect on a tree of switches, with |P| = p_0 p_1 ... (Eq. 8).

    Args:
        nbytes: the size of the buffer, N.
        degrees: p_i, from the inside.
        links: w_i, from the inside.
        gamma_s_per_byte: the time of a reduction.
        ring_only: use T_r in every stage instead of T_r/c, which gives FlexReduce's Eq. 3 and 11.

    Returns:
        Seconds.
    """
    stage_s = ring_s if ring_only else ring_or_recursive_s
    total = 0.0
    for stage, degree in enumerate(degrees):
        part, link = nbytes / prod(degrees[:stage]), shared(links, degrees, stage)
        total += stage_s(part, degree, link, gamma_s_per_byte) + stage_s(part, degree, link)
    return total


def torus_s(nbytes: float, degrees: Sequence[int], links: Sequence[Link], gamma_s_per_byte: float = 0.0) -> float:
    """Eq. 10: BlueConnect on a torus, where each dimension between the nodes has links of its own.

    Args:
        nbytes: the size of the buffer, N.
        degrees: p_i; p_0 learners share a node.
        links: w_i.
        gamma_s_per_byte: the time of a reduction.

    Returns:
        Seconds: in stage i a learner has min{w_0, w_j / p_0}, 1 <= j <= i.
    """
    total = 0.0
    for stage, degree in enumerate(degrees):
        betas = [links[0].beta_s_per_byte, *(link.beta_s_per_byte * degrees[0] for link in links[1 : stage + 1])]
        link = Link(max(link.alpha_s for link in links[: stage + 1]), max(betas))
        part = nbytes / prod(degrees[:stage])
        total += ring_or_recursive_s(part, degree, link, gamma_s_per_byte) + ring_or_recursive_s(part, degree, link)
    return total
