"""Ranks that are not in the order of hosts, as mpirun --map-by node places them: every algorithm, every collective."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.job import runtime
from hvd_ext.planning import registry
from hvd_ext.topology import read, tree
from tests.ranks.numbers import total, values

pytestmark = pytest.mark.ranks(1, 2, 3, 8)


def dealt_by_name(size: int, folder: Path) -> tree.Tree:
    """Hosts as MPI names them: rank r is on host r % 2."""
    return tree.from_hosts([f"host{rank % 2}" for rank in range(size)])


def dealt_in_a_file(size: int, folder: Path) -> tree.Tree:
    """The same in YAML, the last host first."""
    lines = ["name: cluster", "link: {alpha_s: 30.0e-6, gbit_per_s: 10}", "children:"]
    for host in (1, 0):
        ranks = list(range(host, size, 2))
        lines += [f"  - name: host{host}", "    link: {alpha_s: 5.0e-6, gbit_per_s: 40}", f"    ranks: {ranks}"]
    path = folder / "cluster.yaml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return read.read(path)


def dealt_unevenly(size: int, folder: Path) -> tree.Tree:
    """The first and the last rank on one host, the others by turns on two."""
    return tree.from_hosts([f"host{0 if rank in (0, size - 1) else 1 + rank % 2}" for rank in range(size)])


@pytest.fixture(params=[dealt_by_name, dealt_in_a_file, dealt_unevenly])
def placed(request: pytest.FixtureRequest, size: int, tmp_path: Path) -> Iterator[tree.Tree]:
    """The running job with its ranks on other hosts."""
    if size == 1:
        pytest.skip("one rank has one place")
    before = runtime.current()
    cluster = request.param(size, tmp_path)
    hosts = tuple("unknown" for _ in range(size))
    runtime.set_current(runtime.Runtime(before.engine, cluster, before.options, hosts))
    yield cluster
    runtime.set_current(before)


def test_ranks_are_indeed_out_of_order_and_every_algorithm_is_right(placed: tree.Tree, rank: int, size: int) -> None:
    assert size < 3 or list(placed.ranks) != list(range(size))
    tried = [name for name in registry.names() if registry.supports(registry.get(name), placed) is None]
    assert {"ring", "two_level", "flexreduce", "blueconnect"} <= set(tried)
    for elements in (1, size + 1, 20_011):
        for algorithm in tried:
            x = tf.constant(values(rank, (elements,), elements), tf.float32)
            result = hvd.allreduce(x, op=hvd.Sum, algorithm=algorithm)
            np.testing.assert_array_equal(result, total(size, (elements,), elements), err_msg=algorithm)


def test_parts_belong_to_ranks_and_not_to_places(placed: tree.Tree, rank: int, size: int) -> None:
    rows = [2 * other + 1 for other in range(size)]
    joined = hvd.allgather(values(rank, (rows[rank], 3)))
    np.testing.assert_array_equal(joined, np.concatenate([values(r, (n, 3)) for r, n in enumerate(rows)]))
    for root in range(size):
        np.testing.assert_array_equal(hvd.broadcast(values(rank, (50,)), root), values(root, (50,)))
    part = hvd.reducescatter(values(rank, (2 * size,)), op=hvd.Sum)
    np.testing.assert_array_equal(part, total(size, (2 * size,))[2 * rank : 2 * rank + 2])
    exchanged = hvd.alltoall(values(rank, (size,)))
    np.testing.assert_array_equal(exchanged, [values(other, (size,))[rank] for other in range(size)])
