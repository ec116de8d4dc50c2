"""Parts of closed forms that have no equation number in a paper."""

from __future__ import annotations

from hvd_ext.topology.tree import Link, Tree

# The best size of a message: Open MPI's TCP transport serialises opposing messages above its eager limit of 64 KiB.
MESSAGE_NBYTES = 60_000


def chain_s(nbytes: float, size: int, link: Link, gamma_s_per_byte: float = 0.0) -> float:
    """A reduce or a broadcast along a chain of neighbours, pipelined in many segments.

    Args:
        nbytes: the size of the whole buffer.
        size: the number of ranks in the chain, d.
        link: the link of each rank.
        gamma_s_per_byte: the time of a reduction; 0 for a broadcast.

    Returns:
        (d - 1) * alpha + n * (beta + gamma) for d > 1, seconds: each port carries the buffer once.
    """
    return (size - 1) * link.alpha_s + (nbytes * (link.beta_s_per_byte + gamma_s_per_byte) if size > 1 else 0.0)


def pipelined_s(nbytes: float, rounds: int, link: Link, busiest_s_per_byte: float, segment_nbytes: float) -> float:
    """The time of segments that follow one another through rounds, each of which sends a whole segment over some port.

    Args:
        nbytes: the size of the buffer.
        rounds: the number of rounds of a segment.
        link: the link of each rank.
        busiest_s_per_byte: the time of the busiest port over all rounds.
        segment_nbytes: the grain of pipelining.

    Returns:
        The time of the first segment through all rounds, plus the others at the rate of the busiest port, seconds.
    """
    first = min(nbytes, segment_nbytes)
    way_s = rounds * (link.alpha_s + first * link.beta_s_per_byte)
    return way_s + (nbytes - first) * busiest_s_per_byte


def slowest(tree: Tree) -> Link:
    """The link that limits a ring over the whole tree (the min W of BlueConnect Eq. 6).

    Args:
        tree: the cluster.

    Returns:
        The largest alpha and the largest beta among the branches with more than one child; a zero link if there is
        none.
    """
    nodes = (node for level in tree.levels() for node in level)
    links = [node.slowest for node in nodes if len(node.children) > 1]
    alpha_s = max((link.alpha_s for link in links), default=0.0)
    return Link(alpha_s, max((link.beta_s_per_byte for link in links), default=0.0))
