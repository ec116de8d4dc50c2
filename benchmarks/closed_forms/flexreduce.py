"""FlexReduce's performance models, Eq. 1-12; gamma_s_per_byte = 0 gives the paper's equations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import ceil, prod

from benchmarks.closed_forms.blueconnect import ring_s
from hvd_ext.topology.tree import Link, Node, Tree


def message_s(nbytes: float, link: Link) -> float:
    """Eq. 1: a message.

    Args:
        nbytes: the size of the message.
        link: the link of the message.

    Returns:
        alpha + n / w, seconds.
    """
    return link.alpha_s + nbytes * link.beta_s_per_byte


def level_s(nodes: Sequence[Node], nbytes: float, gamma_s_per_byte: float = 0.0) -> float:
    """T_l of Eq. 4-6: the time of a level over its nodes' own links and the links below, which share the traffic.

    Args:
        nodes: the nodes of the level.
        nbytes: the size of the buffer, n.
        gamma_s_per_byte: the time of a reduction.

    Returns:
        Seconds of the slowest link (Eq. 2 is BlueConnect's Eq. 1).
    """
    slowest = 0.0
    for top in nodes:
        below = [(top, nbytes)]
        while below:
            node, share = below.pop()
            slowest = max(slowest, ring_s(share, len(top.children), node.slowest, gamma_s_per_byte))
            below += [(child, share / len(child.children)) for child in node.children if child.children]
    return slowest


def tree_s(tree: Tree, nbytes: float) -> float:
    """Eq. 6: T_FR, on any tree.

    Args:
        tree: the cluster.
        nbytes: the size of the buffer, n.

    Returns:
        The seconds of the reduce-scatter and the all-gather.
    """
    levels, gamma = tree.levels(), tree.gamma_s_per_byte
    return sum(level_s(level, nbytes, gamma) + level_s(level, nbytes) for level in levels)


def even_s(nbytes: float, degrees: Sequence[int], links: Sequence[Link]) -> float:
    """Eq. 8: T_FR if degrees and links depend only on the level (Eq. 7); by Eq. 9-11 it equals BlueConnect's time.

    Args:
        nbytes: the size of the buffer, n.
        degrees: the degrees delta_l, from the bottom.
        links: the links omega_l, from the bottom.

    Returns:
        Seconds.
    """
    return 2 * sum(
        max(ring_s(nbytes / prod(degrees[k:level]), degree, links[k]) for k in range(level + 1))
        for level, degree in enumerate(degrees)
    )


def calls_bound(next_share: Fraction, shares_below: Iterable[Iterable[Fraction]]) -> int:
    """Eq. 12: the largest number of calls that a learner owns in a level, if no two bounds of ranges coincide.

    Args:
        next_share: the learner's share of the buffer after the level.
        shares_below: for each child of the level's node, the shares that its learners hold before the level.

    Returns:
        The sum over the children of ceil(next share / smallest share), plus one.
    """
    return sum(ceil(next_share / min(shares)) for shares in shares_below) + 1
