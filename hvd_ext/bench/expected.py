"""What is expected of an allreduce on the cluster of a job: the physical bound, and the planner's price."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from hvd_ext.cluster.spec import MTU, payload_share
from hvd_ext.planning import planner, registry
from hvd_ext.planning.cost.bounds import bound_s
from hvd_ext.topology.read import parse
from hvd_ext.topology.tree import SHARED_MEMORY, Tree, from_hosts


@dataclass(frozen=True)
class Cluster:
    """Where the ranks of a job are.

    Args:
        hosts: the host name of each rank.
        tree: the topology, as the ranks have it.
        given: whether somebody has told the topology; if not, its links are assumed.
        rate: bytes per second on the wire of each host, each way, as the user has said; None to take the topology's.
    """

    hosts: tuple[str, ...]
    tree: Tree
    given: bool = False
    rate: float | None = None

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.hosts)

    @property
    def ranks_per_host(self) -> list[int]:
        """The number of ranks on each host, in the order of their lowest ranks."""
        return list(Counter(self.hosts).values())

    def refusal(self, algorithm: str) -> str | None:
        """Say why an algorithm does not apply here; None where it does."""
        return registry.supports(registry.get(algorithm), self.tree) if algorithm in registry.names() else None

    def bound_seconds(self, algorithm: str, nbytes: int) -> float | None:
        """The time that an algorithm is measured by: that of the bytes on the wire, framing not counted.

        With m hosts and a rate, 2(m - 1)/m * n / rate, and 2(P - 1)/P * n / rate for a flat ring (Patarasuk and Yuan
        2009). Without a rate the topology's links count (hvd_ext/planning/cost/bounds.py).

        Args:
            algorithm: "ring", or any other.
            nbytes: of the buffer, n.

        Returns:
            Seconds; None where no rate is known: on one host, where nobody has told the topology, and where its hosts
            have no limit.
        """
        hosts = len(self.ranks_per_host)
        if self.rate is not None:
            # on one host it is the rate of a rank
            members = self.ranks if algorithm == "ring" or hosts == 1 else hosts
            return 2 * (members - 1) / members * nbytes / self.rate
        if not self.given or hosts == 1 or self.tree.root.link.beta_s_per_byte <= SHARED_MEMORY.beta_s_per_byte:
            return None
        # a topology tells the rates of the payload, for an MTU of 1500
        return bound_s(self.tree, nbytes, algorithm) * payload_share(MTU)

    def predicted(self, algorithm: str, nbytes: int) -> tuple[float | None, float | None]:
        """What the planner expects.

        Args:
            algorithm: the schedule that runs.
            nbytes: of the buffer.

        Returns:
            Seconds, and bytes over the port and direction that is busy for longest; None, None for what is no plan.
        """
        if algorithm not in registry.names():
            return None, None
        price = planner.price(self.tree, algorithm, nbytes)
        return price.seconds, price.bottleneck_nbytes


def cluster_of(hello: dict[str, Any], rate: float | None) -> Cluster:
    """Make the cluster from what a job says when it is ready.

    Args:
        hello: with hosts, by rank, and the YAML text of the topology.
        rate: what the user has said, bytes per second; None to take the topology's.

    Returns:
        The cluster.

    Raises:
        TopologyError: the topology is wrong or has another number of ranks.
    """
    hosts, text = tuple(hello["hosts"]), hello["topology"]
    tree = parse(text, size=len(hosts)) if text else from_hosts(hosts)
    return Cluster(hosts, tree, bool(text), rate)
