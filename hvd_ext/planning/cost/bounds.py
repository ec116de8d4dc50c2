"""The time that no dense allreduce on a cluster can beat, from the rates of its links alone.

Derivation. Cut the tree into M parties, each a set of ranks with one port to the others: the children of the root, all
hosts, or all ranks. Consider one element. Each party has a summand, and all parties need the sum. So each summand must
reach all other parties, as in gossip by one-way messages, which takes at least 2 (M - 1) messages between parties
(Harary and Schwenk 1974: M - 1 to collect the sum and M - 1 to distribute it). For n bytes, the parties therefore send
at least 2 (M - 1) n bytes in all. In a time T, a party whose port has the rate w sends at most T w bytes, and the sum
over the parties gives

    T >= 2 (M - 1) n / (w_1 + ... + w_M),    for M equal ports  2 (M - 1) / M * n / w.

A message crosses the sender's port upwards and the receiver's port downwards, so the same bound holds for received
bytes. Each party also sends at least its summand, n bytes, so that T >= n / w_i, which can be the larger bound if ports
differ. Every cut gives a bound, and the largest bound holds. A message through several ports only loads more ports, so
the bound assumes nothing about its way. With racks of hosts, the cut into racks gives 2 (R - 1) / R * n / w_rack, and
the cut into hosts gives 2 (m - 1) / m * n / w_host. Latency and arithmetic are left out.
"""

from __future__ import annotations

from hvd_ext.topology.tree import Link, Tree


def allreduce_bound_s(tree: Tree, nbytes: float) -> float:
    """The least time of a dense allreduce by any algorithm: the largest bound of the cuts; 0 for one rank.

    The bound uses the rates of the tree: it counts framing as a loss if these are the rates of the wire, and does not
    if they are the rates of the payload.
    """
    return nbytes * max((_cut_s_per_byte(betas) for betas in _cuts(tree)), default=0.0)


def ring_bound_s(tree: Tree, nbytes: float) -> float:
    """The least time of a flat ring, which sends 2 (P - 1) / P * n over the slowest link (Patarasuk and Yuan 2009)."""
    return 2 * (tree.size - 1) / tree.size * nbytes * slowest(tree).beta_s_per_byte


def bound_s(tree: Tree, nbytes: float, algorithm: str = "") -> float:
    """The bound with which an algorithm is compared: "ring" has its own, all others that of any allreduce."""
    return (ring_bound_s if algorithm == "ring" else allreduce_bound_s)(tree, nbytes)


def slowest(tree: Tree) -> Link:
    """The link that limits a ring over the whole tree (the min W of BlueConnect Eq. 6).

    It has the largest alpha and the largest beta among the branches with more than one child; without any it is a zero
    link.
    """
    nodes = (node for level in tree.levels() for node in level)
    links = [node.slowest for node in nodes if len(node.children) > 1]
    alpha_s = max((link.alpha_s for link in links), default=0.0)
    return Link(alpha_s, max((link.beta_s_per_byte for link in links), default=0.0))


def _cuts(tree: Tree) -> list[list[float]]:
    """For each depth, the seconds per byte of the ports of the nodes at this depth and of the leaves above it."""
    cuts = []
    parties = [(tree.root, 0.0)]
    while any(node.children for node, _ in parties):
        parties = [
            party
            for node, beta in parties
            for party in (
                [(child, port.beta_s_per_byte) for child, port in zip(node.children, node.ports, strict=True)]
                or [(node, beta)]
            )
        ]
        cuts.append([beta for _, beta in parties])
    return [betas for betas in cuts if len(betas) > 1]


def _cut_s_per_byte(betas: list[float]) -> float:
    if not all(betas):
        # A port that takes no time can send the bytes of all; only the bound of each other port is left.
        return max(betas)
    return max(2 * (len(betas) - 1) / sum(1 / beta for beta in betas), *betas)
