"""Exchanges between parts of a job, pair by pair: hosts, or groups of GPUs in a host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvd_ext.job.probe.stand import Times
from hvd_ext.planning import patterns
from hvd_ext.topology.racks import Pair

if TYPE_CHECKING:
    from hvd_ext.planning.model import LogicalPlan


def exchange(
    hosts: Sequence[tuple[int, ...]], pairs: Sequence[Pair], size: int, nbytes: int, message_nbytes: float
) -> tuple[LogicalPlan, int, int]:
    """The plan, the buffer and the segment of an exchange of so many bytes each way between parts of the most ranks."""
    plan = patterns.exchanges(hosts, pairs, size)
    return plan, 2 * nbytes, int(message_nbytes) // 64 * 64 * plan.units


def share(hosts: Sequence[tuple[int, ...]], pairs: Sequence[Pair], pair: Pair) -> float:
    """What a pair of a meeting sends, of what the largest does: a unit for each rank of its larger host."""
    return max(len(hosts[host]) for host in pair) / max(len(hosts[host]) for pair in pairs for host in pair)


def ranks_of(seen: Sequence[Times], hosts: Sequence[tuple[int, ...]], pair: Pair) -> list[Times]:
    """What the ranks of a pair have measured."""
    return [seen[rank] for host in pair for rank in hosts[host]]
