"""What a collective costs in the alpha-beta model: the papers' closed forms, and the price of a plan on a tree."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from hvd_ext.planning.ir import COUNT, OPCODE, PEER, ROUND, SEND
from hvd_ext.planning.lower import rows_of
from hvd_ext.planning.model import LogicalPlan
from hvd_ext.topology.tree import Link, Node, Tree

__all__ = ["Link", "Profile", "chain_s", "profile", "ring_s", "slowest"]


def ring_s(nbytes: float, size: int, link: Link) -> float:
    """T_r: a reduce-scatter or an all-gather as a ring (FlexReduce Eq. 2; BlueConnect Eq. 1).

    Args:
        nbytes: of the whole buffer.
        size: learners in the ring, d.
        link: of each learner.

    Returns:
        (d - 1) * (alpha + n / d * beta), seconds.
    """
    return (size - 1) * (link.alpha_s + nbytes / size * link.beta_s_per_byte)


def chain_s(nbytes: float, size: int, link: Link) -> float:
    """A reduce or a broadcast along a chain of neighbours, pipelined in many segments.

    Args:
        nbytes: of the whole buffer.
        size: ranks in the chain, d.
        link: of each rank.

    Returns:
        (d - 1) * alpha + n * beta for d > 1, seconds: each port carries the buffer once.
    """
    return (size - 1) * link.alpha_s + (nbytes * link.beta_s_per_byte if size > 1 else 0.0)


def slowest(tree: Tree) -> Link:
    """The link that a ring over the whole tree waits for (the min W of BlueConnect Eq. 6).

    Args:
        tree: the cluster.

    Returns:
        The largest alpha and the largest beta among the branches with more than one child; a zero link if there is
        none.
    """
    nodes = (node for level in tree.levels() for node in level)
    links = [node.link for node in nodes if len(node.children) > 1]
    alpha_s = max((link.alpha_s for link in links), default=0.0)
    return Link(alpha_s, max((link.beta_s_per_byte for link in links), default=0.0))


@dataclass(frozen=True, slots=True)
class Profile:
    """How a plan loads a cluster, for any size of buffer.

    Args:
        latency_s: the largest latency of each round, added up.
        rounds_s_per_byte: the time of each round's busiest port, added up.
        busiest_s_per_byte: the time of the port that is busiest over all rounds.
    """

    latency_s: float
    rounds_s_per_byte: float
    busiest_s_per_byte: float

    def price_s(self, nbytes: int, segment_nbytes: int | None = None) -> float:
        """The price: the first segment goes through all rounds, the others follow at the rate of the busiest port.

        Args:
            nbytes: of the buffer.
            segment_nbytes: grain of pipelining; None for none, as in the papers' closed forms.

        Returns:
            Seconds.
        """
        first = nbytes if segment_nbytes is None else min(segment_nbytes, nbytes)
        return self.latency_s + first * self.rounds_s_per_byte + (nbytes - first) * self.busiest_s_per_byte


def profile(plan: LogicalPlan, tree: Tree) -> Profile:
    """Counts what a plan sends over each port of a cluster.

    Every port (of a rank to its host, of a host to its network) carries each direction at its own rate, and the
    messages of a round share the ports on their way. It builds the rows of all ranks: for plans of at most a few
    hundred ranks.

    Args:
        plan: of tree.size ranks.
        tree: the cluster.

    Returns:
        The load.
    """
    ways = _ways(tree)
    # Seconds per byte of the buffer, per round and directed port; latency per round.
    rounds: dict[int, dict[tuple[int, bool], float]] = defaultdict(lambda: defaultdict(float))
    alpha_s: dict[int, float] = defaultdict(float)
    for rank in range(plan.size):
        for row in rows_of(plan, rank).tolist():
            if row[OPCODE] != SEND:
                continue
            up, down = ways[rank], ways[row[PEER]]
            shared = len(set(up) & set(down))
            for way, upwards in ((up, True), (down, False)):
                for port, link in way[: len(way) - shared]:
                    rounds[row[ROUND]][port, upwards] += row[COUNT] / plan.units * link.beta_s_per_byte
                    alpha_s[row[ROUND]] = max(alpha_s[row[ROUND]], link.alpha_s)
    total: dict[tuple[int, bool], float] = defaultdict(float)
    for ports in rounds.values():
        for port_and_way, seconds in ports.items():
            total[port_and_way] += seconds
    return Profile(
        latency_s=sum(alpha_s.values()),
        rounds_s_per_byte=sum(max(ports.values()) for ports in rounds.values()),
        busiest_s_per_byte=max(total.values(), default=0.0),
    )


def _ways(tree: Tree) -> dict[int, tuple[tuple[int, Link], ...]]:
    """For each rank, the ports from its leaf up to the root: (number of the port, its link)."""
    ways: dict[int, tuple[tuple[int, Link], ...]] = {}
    ports = iter(range(1 << 62))

    def visit(node: Node, way: tuple[tuple[int, Link], ...]) -> None:
        if not node.children:
            ways[node.rank] = way
            return
        for child in node.children:
            visit(child, ((next(ports), node.link), *way))

    visit(tree.root, ())
    return ways
