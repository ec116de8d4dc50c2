"""What is expected of an allreduce on the cluster of a job: the physical bound, and the planner's price."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from hvd_ext.cluster.spec import MTU, payload_share
from hvd_ext.planning import planner, registry
from hvd_ext.planning.cost.bounds import bound_s
from hvd_ext.planning.cost.loads import copy_s_per_byte
from hvd_ext.topology.read import parse
from hvd_ext.topology.tree import SHARED_MEMORY, Tree, from_hosts

UNCOPIED_NBYTES = 1 << 20  # from which on an op hands a result over in the memory of its bucket (kKeptNbytes in C++)


@dataclass(frozen=True)
class Cluster:
    """The hosts and the links of a job.

    Args:
        given: whether the user has named a topology; otherwise its links are assumed.
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

    @property
    def place(self) -> dict[str, Any]:
        """What each row has of the cluster: ranks, hosts, ranks_per_host."""
        return {"ranks": self.ranks, "hosts": len(self.ranks_per_host), "ranks_per_host": self.ranks_per_host}

    def refusal(self, algorithm: str) -> str | None:
        """Say why an algorithm or a yardstick does not apply to this cluster; None if it does."""
        hosts = len(self.ranks_per_host)
        if algorithm == "memory" and hosts > 1:
            return "it measures the memory of one host"
        if algorithm == "tcp" and hosts == 1:
            return "it measures the links between hosts, and there is one host"
        if algorithm == "tcp" and any(child.height > 1 for child in self.tree.root.children):
            return "its ring of hosts would load the links between racks more than an allreduce must"
        return registry.supports(registry.get(algorithm), self.tree) if algorithm in registry.names() else None

    def bound_seconds(self, algorithm: str, nbytes: int) -> float | None:
        """Give the least time of an allreduce of n bytes: that of its payload on the wire.

        On m hosts with a rate it is 2(m - 1)/m * n / rate, and 2(P - 1)/P * n / rate for a flat ring of P ranks
        (Patarasuk and Yuan 2009). Without a rate the topology's links count (hvd_ext/planning/cost/bounds.py).

        Returns:
            Seconds; None if no rate is known, as on one host, without a topology, or if its hosts have no limit.
        """
        hosts = len(self.ranks_per_host)
        if self.rate is not None:
            # on one host the user means the rate of a rank
            members = self.ranks if algorithm == "ring" or hosts == 1 else hosts
            return 2 * (members - 1) / members * nbytes / self.rate
        if not self.given or hosts == 1 or self.tree.root.link.beta_s_per_byte <= SHARED_MEMORY.beta_s_per_byte:
            return None
        # the rates of a topology are those of the payload, for an MTU of 1500
        return bound_s(self.tree, nbytes, algorithm) * payload_share(MTU)

    def predicted(self, algorithm: str, nbytes: int, how: str = "engine") -> tuple[float | None, float | None]:
        """Give the planner's price of an allreduce, with the copies that a way to call it makes on a CPU.

        Args:
            algorithm: one of the planner's, or another contestant.
            nbytes: the size of the buffer.
            how: "engine" and "eager" copy the buffer in and the result out; "graph" copies no long result.

        Returns:
            Seconds, and the bytes over the port and direction that is busy for longest; twice None for MPI and Horovod,
            which have no plan.
        """
        if algorithm not in registry.names():
            return None, None
        price = planner.price(self.tree, algorithm, nbytes)
        uncopied = nbytes if how == "graph" and nbytes >= UNCOPIED_NBYTES else 0
        copied_s = uncopied * copy_s_per_byte(self.tree.at(nbytes))
        return max(price.seconds - copied_s, 0.0), price.bottleneck_nbytes


def cluster_of(hello: dict[str, Any], rate: float | None) -> Cluster:
    """Make the cluster from what a job says when it is ready: its hosts, by rank, and the YAML text of its topology.

    Raises:
        TopologyError: the topology is wrong or has another number of ranks.
    """
    hosts, text = tuple(hello["hosts"]), hello["topology"]
    tree = parse(text, size=len(hosts)) if text else from_hosts(hosts)
    return Cluster(hosts, tree, bool(text), rate)
