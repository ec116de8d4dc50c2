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
from tests.unit.planning.clusters import even_tree, one_host, random_tree, uneven_hosts
from tests.unit.planning.interpreter import events_of, inputs, run

DTYPES = ("float16", "float32", "float64", "int32", "int64")


def supported(algorithm: str, tree: Tree) -> bool:
    return registry.supports(registry.get(algorithm), tree) is None


@pytest.mark.parametrize("size", range(1, 17))
@pytest.mark.parametrize("algorithm", registry.names())
def test_all_ranks_end_with_the_same_sum(algorithm: str, size: int) -> None:
    hosts = max(count for count in range(1, size + 1) if size % count == 0 and count * count <= size)
    trees = [one_host(size), uneven_hosts(size), even_tree(hosts, size // hosts)]
    trees = [tree for tree in trees if supported(algorithm, tree)]
    for tree in trees:
        plan = allreduce_plan(tree, algorithm).plan
        events = events_of([rows_of(plan, rank) for rank in range(size)])
        for elements in sorted({0, 1, size - 1, size, size + 1, 97}):
            for dtype in DTYPES:
                data = inputs(size, elements, dtype)
                wanted = data.astype("int64").sum(axis=0)
                run(events, data, plan.units)
                for rank in range(size):
                    assert np.array_equal(data[rank], wanted), f"{elements} {dtype}, rank {rank}"


@pytest.mark.parametrize("algorithm", registry.names())
def test_results_do_not_depend_on_the_order_in_which_ranks_run(algorithm: str) -> None:
    tree = uneven_hosts(11) if supported(algorithm, uneven_hosts(11)) else even_tree(3, 4)
    plan = allreduce_plan(tree, algorithm).plan
    rows = [rows_of(plan, rank) for rank in range(tree.size)]
    original = np.random.default_rng(3).standard_normal((tree.size, 53)).astype("float32")
    results = []
    for seed in range(4):
        data = original.copy()
        run(events_of(rows, seed), data, plan.units)
        assert all(np.array_equal(data[0], other) for other in data), "ranks differ in bits"
        results.append(data[0])
    assert all(np.array_equal(results[0], other) for other in results), "runs differ in bits"


def even(seed: int, most_leaves: int) -> Tree:
    """A random even tree of two to four levels, for schedules that need one."""
    rng = random.Random(seed)
    degrees = [rng.randint(2, 5) for _ in range(rng.randint(2, 4))]
    while prod(degrees) > most_leaves:
        degrees.pop()
    return even_tree(*degrees)


def proven_and_run(algorithm: str, trees: list[Tree]) -> int:
    """Proves the schedule on the trees, and sums buffers of all awkward sizes; says on how many trees it applied."""
    applied = 0
    for tree in trees:
        if not supported(algorithm, tree):
            continue
        applied += 1
        plan, size = registry.get(algorithm).build(tree), tree.size
        verify(plan)
        events = events_of([rows_of(plan, rank) for rank in range(size)], seed=applied)
        for elements in sorted({0, 1, size - 1, size, size + 1, 101}):
            data = inputs(size, elements, "int64")
            wanted = data.sum(axis=0)
            run(events, data, plan.units)
            assert np.array_equal(data, np.broadcast_to(wanted, data.shape)), f"{elements} on {tree.describe()}"
    return applied


@pytest.mark.parametrize("algorithm", registry.names())
def test_every_schedule_is_right_on_random_trees(algorithm: str) -> None:
    trees = [random_tree(seed, most_leaves=14) for seed in range(8)] + [even(seed, 24) for seed in range(3)]
    assert proven_and_run(algorithm, trees) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("algorithm", registry.names())
def test_every_schedule_is_right_on_large_random_trees(algorithm: str, seed: int) -> None:
    trees = [random_tree(1000 + seed, most_leaves=64, most_depth=4), even(seed, 64)]
    assert proven_and_run(algorithm, trees) >= 1
