"""Every schedule sums every buffer on every number of ranks; nothing here names an algorithm."""

from __future__ import annotations

import random
from math import prod

import numpy as np
import pytest

from hvd_ext.planning import registry
from hvd_ext.planning.lower import rows_of
from hvd_ext.planning.planner import allreduce_plan
from hvd_ext.planning.verify import verify
from hvd_ext.topology.tree import Tree
from tests.unit.planning.clusters import even_tree, one_host, random_tree, supported, uneven_hosts
from tests.unit.planning.interpreter import Ranks, events_of, inputs

DTYPES = ("float16", "float32", "float64", "int32", "int64")


def assert_sums(algorithm: str, tree: Tree, dtypes: tuple[str, ...], sizes: set[int], seed: int = 0) -> None:
    """Proves the schedule on a tree, and sums a buffer of each size, of one dtype after the other."""
    plan = registry.get(algorithm).build(tree)
    verify(plan)
    rows = [rows_of(plan, rank) for rank in range(tree.size)]
    events = events_of(rows, seed)
    for place, elements in enumerate(sorted(sizes), tree.size):
        data = inputs(tree.size, elements, dtypes[place % len(dtypes)])
        ranks = Ranks(rows, plan.units, data)
        ranks.play(events)
        total = data.astype("int64").sum(axis=0)
        assert np.array_equal(ranks.data, np.broadcast_to(total, data.shape)), f"{elements} on {tree.describe()}"


@pytest.mark.parametrize("size", range(1, 17))
@pytest.mark.parametrize("algorithm", registry.names())
def test_all_ranks_end_with_the_same_sum(algorithm: str, size: int) -> None:
    hosts = max(count for count in range(1, size + 1) if size % count == 0 and count * count <= size)
    for tree in (one_host(size), uneven_hosts(size), even_tree(hosts, size // hosts)):
        if supported(algorithm, tree):
            assert_sums(algorithm, tree, DTYPES, {0, 1, size - 1, size, size + 1, 97})


@pytest.mark.parametrize("algorithm", registry.names())
def test_results_do_not_depend_on_the_order_in_which_ranks_run(algorithm: str) -> None:
    tree = uneven_hosts(11) if supported(algorithm, uneven_hosts(11)) else even_tree(3, 4)
    plan = allreduce_plan(tree, algorithm).plan
    rows = [rows_of(plan, rank) for rank in range(tree.size)]
    # sums of floats of different magnitudes in different orders differ
    rng = np.random.default_rng(3)
    original = (rng.standard_normal((tree.size, 53)) * 10.0 ** rng.integers(-6, 6, (tree.size, 53))).astype("float32")
    results = []
    for seed in range(4):
        ranks = Ranks(rows, plan.units, original)
        ranks.run(seed)
        assert all(np.array_equal(ranks.data[0], other) for other in ranks.data), "ranks differ in bits"
        results.append(ranks.data[0])
    assert all(np.array_equal(results[0], other) for other in results), "runs differ in bits"


def even(seed: int, most_leaves: int) -> Tree:
    """A random even tree of two to four levels, for schedules that need one."""
    rng = random.Random(seed)
    degrees = [rng.randint(2, 5) for _ in range(rng.randint(2, 4))]
    while prod(degrees) > most_leaves:
        degrees.pop()
    return even_tree(*degrees)


SMALL = [random_tree(seed, most_leaves=14) for seed in range(8)] + [even(seed, 24) for seed in range(3)]
LARGE = [random_tree(1000 + seed, most_leaves=64) for seed in range(4)] + [even(seed, 64) for seed in range(3)]


@pytest.mark.parametrize("trees", [SMALL, pytest.param(LARGE, marks=pytest.mark.slow)], ids=["small", "large"])
@pytest.mark.parametrize("algorithm", registry.names())
def test_every_schedule_is_right_on_random_trees(algorithm: str, trees: list[Tree]) -> None:
    applied = [tree for tree in trees if supported(algorithm, tree)]
    assert len(applied) >= 3
    for seed, tree in enumerate(applied):
        assert_sums(algorithm, tree, ("int64",), {1, tree.size - 1, 97}, seed)
