"""The engine runs every sparse schedule's plans as the NumPy interpreter of the unit tests does, residuals included."""

from __future__ import annotations

import numpy as np
import pytest

import hvd_ext as hvd
from hvd_ext.job import runtime
from hvd_ext.planning import registry
from hvd_ext.planning.layout import BucketLayout, Layout, Selection
from hvd_ext.planning.lower import rows_of
from hvd_ext.planning.model import LogicalPlan
from hvd_ext.planning.tensors import Tensor
from hvd_ext.topology.tree import Tree, from_hosts
from tests.unit.planning.interpreter import Floats, Ranks
from tests.unit.planning.test_sparse_plans import data_of

ELEMENTS = 1013
DENSITIES = (0.05, 0.3, 1.0, 0.02)  # the third step takes the dense plan


def clusters(size: int) -> list[Tree]:
    """Two uneven hosts, and three with their ranks dealt out; of few ranks also one host, and a rank a host."""
    names = ["a" + "b" * (size - 1), "abcbcacb"[:size]]
    names += ["a" * size, "abcd"[:size]] if size <= 4 else []
    return [from_hosts(list(hosts)) for hosts in dict.fromkeys(names)]


def wanted(plans: list[LogicalPlan], data: Floats) -> list[Ranks]:
    """The interpreter's ranks after each step; their residuals go on."""
    steps: list[Ranks] = []
    for step, density in enumerate(DENSITIES):
        plan = plans[density == 1.0]
        ranks = Ranks([rows_of(plan, rank) for rank in range(plan.size)], plan.units, data * (step + 1), density)
        if steps:
            ranks.residuals = steps[-1].residuals.copy()
        ranks.run(step)
        steps.append(ranks)
    return steps


@pytest.mark.parametrize("name", registry.sparse_names())
def test_results_and_residuals_are_those_of_the_rows(name: str, rank: int, size: int) -> None:
    schedule, job = registry.sparse(name), runtime.current()
    for tree in clusters(size):
        data = data_of(size, ELEMENTS)
        for plan in schedule.variants(tree):
            dense = schedule.dense(tree)
            selection = Selection(dense_above=0.9)
            bucket = BucketLayout("float32", (0,), hvd.Sum, plan, 4 * ELEMENTS, selection=selection, dense=dense)
            channel = job.open(f"{name} {plan.note}", Layout((Tensor("x", (ELEMENTS,), "float32"),), (bucket,)))
            for step, ranks in enumerate(wanted([plan, dense], data)):
                x = (data[rank] * (step + 1)).astype(np.float32)
                job.engine.begin_topk_step(channel, DENSITIES[step])
                job.engine.reduce(channel, [x], [x])
                job.engine.end_step(channel, commit=True)
                np.testing.assert_array_equal(x, ranks.data[rank])
                kept = job.engine.state(channel, 0)
                mine = ranks.residuals[rank, kept.begin : kept.begin + kept.elements]
                np.testing.assert_array_equal(job.engine.read_state(channel, 0), mine)
                assert np.count_nonzero(ranks.residuals[rank]) == np.count_nonzero(mine)
            job.engine.close_channel(channel)
