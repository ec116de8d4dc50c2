"""What the benchmark of allreduce expects of a cluster: bounds, prices, and what does not apply."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hvd_ext
from hvd_ext.bench.expected import UNCOPIED_NBYTES, Cluster, cluster_of
from hvd_ext.cluster.spec import Spec, topology
from hvd_ext.errors import TopologyError
from hvd_ext.topology.tree import Link, from_hosts

RATE = 12.5e6
RACKS = Spec((1, 1, 1, 1), rate="100mbit", racks=(2, 2), rack_rate="20mbit")


def cluster(*hosts: int, rate: float | None = RATE) -> Cluster:
    names = tuple(f"h{number}" for number, count in enumerate(hosts) for _ in range(count))
    return Cluster(names, from_hosts(names), False, rate)


def described(spec: Spec, rate: float | None = None) -> Cluster:
    """Give the cluster that a job tells in its hello."""
    hosts = [f"h{number}" for number, count in enumerate(spec.hosts) for _ in range(count)]
    return cluster_of({"hosts": hosts, "topology": topology(spec)}, rate)


@pytest.mark.parametrize(
    ("hosts", "algorithm", "share"),
    [
        ((4, 4), "flexreduce", 1.0),
        ((4, 4), "horovod", 1.0),
        ((4, 4), "ring", 2 * 7 / 8),
        ((4, 3, 3), "torus2d", 4 / 3),
        ((4, 3, 3), "ring", 2 * 9 / 10),
        ((4,), "mpi", 2 * 3 / 4),
    ],
)
def test_the_bound_counts_hosts_and_that_of_the_ring_ranks(hosts: Any, algorithm: str, share: float) -> None:
    assert cluster(*hosts).bound_seconds(algorithm, 16_000_000) == pytest.approx(share * 16_000_000 / RATE)


def test_the_rate_on_the_wire_comes_from_the_topology_unless_it_is_given() -> None:
    spec = Spec((3, 2), rate="100mbit")
    seen = described(spec)
    for algorithm in ("flexreduce", "ring"):
        known = cluster(3, 2).bound_seconds(algorithm, 1_000_000)
        assert seen.bound_seconds(algorithm, 1_000_000) == pytest.approx(known)
    assert seen.ranks_per_host == [3, 2]
    assert described(spec, 2 * RATE).bound_seconds("mpi", 1_000_000) == pytest.approx(0.5 * 1_000_000 / RATE)
    # of racks the slowest link bounds
    assert described(RACKS).bound_seconds("blueconnect", 1_000_000) == pytest.approx(1_000_000 / 2.5e6)
    assert described(Spec((2,))).bound_seconds("ring", 4) is cluster(2, 2, rate=None).bound_seconds("ring", 4) is None


def test_what_does_not_apply_is_known_with_its_reason() -> None:
    assert cluster(3, 2).refusal("torus2d")
    for applies in ("auto", "mpi", "tcp"):
        assert cluster(3, 2).refusal(applies) is None
    assert cluster(2, 2).refusal("torus2d") is cluster(4).refusal("memory") is None
    for place, yardstick, words in (
        (cluster(4), "tcp", "there is one host"),
        (cluster(3, 2), "memory", "one host"),
        (described(RACKS), "tcp", "racks"),
    ):
        assert words in (place.refusal(yardstick) or "")


def test_only_plans_have_a_price() -> None:
    seconds, nbytes = cluster(2, 2).predicted("flexreduce", 1_000_000)
    assert seconds is not None and seconds > 0
    assert nbytes == pytest.approx(1_000_000)  # over each link between two hosts
    assert cluster(2, 2).predicted("mpi", 1_000_000) == (None, None)


def test_in_a_graph_the_price_of_a_long_result_has_one_copy_less() -> None:
    handover = Link(3e-6, 6e-11)
    place = Cluster(("a", "a"), replace(from_hosts(["a", "a"]), handover=handover))
    for nbytes, copies in ((4096, 0), ((1 << 20) - 4, 0), (1 << 20, 1), (16_000_000, 1)):
        prices = {how: place.predicted("ring", nbytes, how)[0] for how in ("graph", "engine", "eager")}
        assert prices["graph"] is not None and prices["engine"] is not None
        assert prices["eager"] == prices["engine"]
        copied_s = copies * nbytes * handover.beta_s_per_byte / 2
        assert prices["engine"] - prices["graph"] == pytest.approx(copied_s)
    alone = Cluster(("a",), replace(from_hosts(["a"]), handover=handover))
    assert alone.predicted("ring", 16_000_000, "graph")[0] == 0


def test_results_are_not_copied_from_the_same_size_on_as_in_the_op() -> None:
    source = (Path(hvd_ext.__file__).parents[1] / "tf_ops" / "ops" / "gradient.cc").read_text(encoding="utf-8")
    assert f"kKeptNbytes = 1 << {UNCOPIED_NBYTES.bit_length() - 1};" in source


def test_a_topology_of_another_job_is_refused() -> None:
    with pytest.raises(TopologyError, match="3"):
        cluster_of({"hosts": ["h1", "h2"], "topology": topology(Spec((2, 1)))}, None)
