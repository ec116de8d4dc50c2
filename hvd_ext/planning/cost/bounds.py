"""The time that no dense allreduce on a cluster can beat, from the rates of its links alone.

Derivation. Cut the tree into M parties, each a set of ranks with one port to the others: the children of a root, all
hosts, all ranks. Look at one element. Each party has a summand, and all need the sum; so what each party has must reach
all the others, as in gossip by one-way messages, and that takes at least 2 (M - 1) messages between parties (Harary
and Schwenk 1974; M - 1 to collect the sum, M - 1 to hand it out). So of n bytes the parties send 2 (M - 1) n in all. In
a time T a party with a port of rate w sends at most T w, and the sum over the parties gives

    T >= 2 (M - 1) n / (w_1 + ... + w_M),    for M equal ports  2 (M - 1) / M * n / w.

A message crosses the sender's port up and the receiver's port down, and the same holds for what parties receive. What
a single party sends is at least its summand, n bytes, and that can be more where ports differ: T >= n / w_i. Every cut
gives a bound, and the largest of them holds. A message through several ports only loads more of them, so
nothing is claimed about its way. For racks of hosts the cut into racks gives 2 (R - 1) / R * n / w_rack, the
cut into hosts 2 (m - 1) / m * n / w_host. Latency and arithmetic are left out.
"""

from __future__ import annotations

from hvd_ext.planning.cost.terms import slowest
from hvd_ext.topology.tree import Tree


def allreduce_bound_s(tree: Tree, nbytes: float) -> float:
    """The least time of a dense allreduce, whatever the algorithm.

    The rates are those of the tree: give it the wire's rate for a bound that counts framing as a loss, or the rate of
    payload for one that does not.

    Args:
        tree: the cluster.
        nbytes: the size of the buffer, n.

    Returns:
        The largest bound of the cuts at each depth of the tree, seconds; 0 for one rank.
    """
    return nbytes * max((_cut_s_per_byte(betas) for betas in _cuts(tree)), default=0.0)


def ring_bound_s(tree: Tree, nbytes: float) -> float:
    """The least time of one flat ring (Patarasuk and Yuan 2009): each rank sends 2 (P - 1) / P * n over the slowest
    link.

    Args:
        tree: the cluster; the ring follows its order, and so enters and leaves each host once.
        nbytes: the size of the buffer, n.

    Returns:
        2 (P - 1) / P * n * beta, seconds.
    """
    return 2 * (tree.size - 1) / tree.size * nbytes * slowest(tree).beta_s_per_byte


def bound_s(tree: Tree, nbytes: float, algorithm: str = "") -> float:
    """The bound that an algorithm is measured by.

    Args:
        tree: the cluster.
        nbytes: the size of the buffer.
        algorithm: its name; "ring" has a bound of its own, the others have that of any allreduce.

    Returns:
        Seconds.
    """
    return (ring_bound_s if algorithm == "ring" else allreduce_bound_s)(tree, nbytes)


def _cuts(tree: Tree) -> list[list[float]]:
    """For each depth the ports of the nodes there, and of leaves above it: seconds per byte."""
    cuts = []
    parties = [(tree.root, 0.0)]
    while any(node.children for node, _ in parties):
        parties = [
            party
            for node, beta in parties
            for party in ([(child, node.link.beta_s_per_byte) for child in node.children] or [(node, beta)])
        ]
        cuts.append([beta for _, beta in parties])
    return [betas for betas in cuts if len(betas) > 1]


def _cut_s_per_byte(betas: list[float]) -> float:
    if not all(betas):
        # A port that takes no time can do the work of all: only what each of the others must send is left.
        return max(betas)
    return max(2 * (len(betas) - 1) / sum(1 / beta for beta in betas), *betas)
