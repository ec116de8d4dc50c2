"""What is expected of a sparse sum: bytes between hosts, the least time, the planner's price; rows of prices alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from benchmarks.studies.hitopk.names import WIRES, Name
from hvd_ext.bench.expected import Cluster
from hvd_ext.cluster.spec import MTU, payload_share
from hvd_ext.planning import planner, registry
from hvd_ext.planning.cost.simulate import simulate
from hvd_ext.planning.cost.sparse import Sparsity
from hvd_ext.planning.sparse_planner import sparse_plan
from hvd_ext.planning.tensors import DTYPES
from hvd_ext.topology.tree import SHARED_MEMORY

ELEMENT_NBYTES = 4
# The size of a delta-coded index in prices of what was not measured: a gap below 128 takes one byte, one below 16,384
# takes two.
INDEX_NBYTES = 1.5
# The level of hitopk's plan that goes between hosts; the others stay inside of them.
BETWEEN = "all-gather of the selected"


def value_nbytes(name: Name) -> int:
    """Give the size of a value on the wire."""
    dtype = WIRES[name.wire]
    return ELEMENT_NBYTES if dtype is None else DTYPES[dtype].nbytes


def picked(density: float, elements: int) -> int:
    """Give the number of elements that are selected from the whole gradient, K."""
    return int(density * elements + 0.5)


def host_bytes(cluster: Cluster, name: Name, elements: int, entry_nbytes: float | None = None) -> float | None:
    """Give the bytes that the busiest host must send to others, without frames, by the closed forms.

    With m hosts of p ranks, P in all, and K entries, hitopk sends (m - 1) K, and naive_allgather p (P - p) K, because
    each rank sends to each. A dense sum sends 2 (m - 1) / m of the gradient.

    Args:
        cluster: the hosts.
        name: of the contestant.
        elements: of the gradient.
        entry_nbytes: of an entry; None for an estimate.

    Returns:
        Bytes, 0 on one host; None if there is no closed form.
    """
    counts = cluster.ranks_per_host
    hosts, ranks = len(counts), sum(counts)
    if name.density is None:
        closed = ("torus2d", "flexreduce", "blueconnect", "two_level")
        dense = 2 * (hosts - 1) / hosts * elements * value_nbytes(name)
        return dense if name.algorithm in closed or hosts == 1 else None
    entries = picked(name.density, elements)
    sent = {
        "hitopk": (hosts - 1) * entries,
        "naive_allgather": max(count * (ranks - count) for count in counts) * entries,
    }
    if name.algorithm not in sent:
        return None
    return sent[name.algorithm] * (entry_nbytes or value_nbytes(name) + INDEX_NBYTES)


def inside_seconds(levels: Mapping[str, float]) -> float | None:
    """Add up the steps inside the hosts; None if there is no step between them."""
    return sum(time_s for name, time_s in levels.items() if name != BETWEEN) if BETWEEN in levels else None


def floor_seconds(
    cluster: Cluster, name: Name, elements: int, entry_nbytes: float | None, inside_s: float | None
) -> float | None:
    """Give the time with which that of a sum is compared.

    Args:
        cluster: the hosts and their links.
        name: of the contestant.
        elements: of the gradient.
        entry_nbytes: of an entry, as measured.
        inside_s: of the steps of the same run that stay inside the hosts, as measured.

    Returns:
        For a dense sum, its bytes over the link's rate; for hitopk the same and the steps inside; None if no rate is
        known or nothing was measured.
    """
    if name.density is None:
        if name.algorithm not in registry.names() and name.algorithm not in ("mpi", "horovod"):
            return None
        return cluster.bound_seconds(name.algorithm, elements * value_nbytes(name))
    sent, rate = host_bytes(cluster, name, elements, entry_nbytes), link_rate(cluster)
    return sent / rate + inside_s if sent and rate and inside_s is not None else None


def link_rate(cluster: Cluster) -> float | None:
    """Give the rate of a host's link on the wire, bytes per second; None if it is not known or has no limit."""
    if cluster.rate is not None:
        return cluster.rate
    beta = cluster.tree.root.link.beta_s_per_byte
    if not cluster.given or len(cluster.ranks_per_host) == 1 or beta <= SHARED_MEMORY.beta_s_per_byte:
        return None
    # the rates of a topology are those of the payload
    return 1 / (beta * payload_share(MTU))


def expected(cluster: Cluster, name: Name, elements: int, entry_nbytes: float | None = None) -> dict[str, Any]:
    """Give what the planner and the closed forms expect.

    Args:
        cluster: the hosts and their links.
        name: of the contestant.
        elements: of the gradient.
        entry_nbytes: of an entry; None for an estimate.

    Returns:
        host_bytes (see the function), and predicted_seconds (None for MPI and Horovod).
    """
    entry = entry_nbytes or value_nbytes(name) + INDEX_NBYTES
    seconds = None
    if name.density is not None:
        seconds = sum(step_prices(cluster, name, elements, entry).values())
    elif name.algorithm in registry.names():
        seconds = planner.price(cluster.tree, name.algorithm, elements * value_nbytes(name)).seconds
    return {"host_bytes": host_bytes(cluster, name, elements, entry_nbytes), "predicted_seconds": seconds}


def step_prices(cluster: Cluster, name: Name, elements: int, entry_nbytes: float) -> dict[str, float]:
    """Give the planner's price of a sparse plan by levels: what each adds to the levels before it.

    Args:
        cluster: the hosts and their links.
        name: of a sparse contestant.
        elements: of the gradient.
        entry_nbytes: of an entry.

    Returns:
        Seconds by the level's name.
    """
    assert name.density is not None
    nbytes = max(elements, 1) * ELEMENT_NBYTES
    plan = sparse_plan(cluster.tree, name.algorithm, nbytes, name.density, entry_nbytes).plan
    sparsity = Sparsity(name.density, entry_nbytes)
    prices: dict[str, float] = {}
    before = 0.0
    for count, level in enumerate(plan.levels, 1):
        part = dataclasses.replace(plan, levels=plan.levels[:count])
        now = simulate(part, cluster.tree, nbytes, nbytes, sparsity=sparsity).seconds
        prices[level.name] = prices.get(level.name, 0.0) + now - before
        before = now
    return prices


def simulated(cluster: Cluster, name: Name, elements: int) -> dict[str, Any] | None:
    """Make a row from the planner's price alone.

    Args:
        cluster: the hosts and their links.
        name: of the contestant.
        elements: of the gradient.

    Returns:
        A row as `jobs.row_of` makes them, marked as simulated; None if the contestant has no plan for this cluster.
    """
    known = registry.names() if name.density is None else registry.sparse_names()
    module: Any = registry.get if name.density is None else registry.sparse
    if name.algorithm not in known or registry.supports(module(name.algorithm), cluster.tree):
        return None
    found = expected(cluster, name, elements)
    entry = None if name.density is None else value_nbytes(name) + INDEX_NBYTES
    return {
        "name": name.text,
        "algorithm": name.algorithm,
        "plan": name.algorithm,
        "density": name.density,
        "wire": name.wire or "fp32",
        "how": "planner",
        "simulated": True,
        "ranks": cluster.ranks,
        "hosts": len(cluster.ranks_per_host),
        "ranks_per_host": cluster.ranks_per_host,
        "elements": elements,
        "bytes": elements * ELEMENT_NBYTES,
        "seconds_median": found["predicted_seconds"],
        "seconds_min": found["predicted_seconds"],
        "wire_bytes": None,
        "entry_bytes": entry,
        "levels_seconds": {} if entry is None else step_prices(cluster, name, elements, entry),
        "inside_seconds": None,
        "floor_seconds": None,
        **found,
        "dense_above": None,
        "segment_bytes": None,
        "correct": None,
        "samples": [],
    }
