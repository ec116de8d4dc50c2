"""What a step costs in a graph: ops by buckets, and no edge between results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from keras.optimizers import SGD

import hvd_ext as hvd
from hvd_ext.options.gradients import GradientOptions
from hvd_ext.tensorflow.gradients.identity import Identity
from hvd_ext.tensorflow.gradients.reducer import Reducer

pytestmark = pytest.mark.ranks(2)

ELEMENTS = 3


def counted(step: Callable[..., Any], count: int) -> tuple[int, int, dict[str, int]]:
    """Trace a step of small gradients; give the operations and edges beside the arguments, and our ops by type."""
    arguments = [tf.TensorSpec((ELEMENTS,), tf.float32)] * count
    graph = tf.function(step, autograph=False).get_concrete_function(*arguments).graph
    operations = [one for one in graph.get_operations() if one.type != "Placeholder"]
    edges = sum(len(one.inputs) + len(one.control_inputs) for one in operations)
    ours = [one.type for one in operations if one.type.startswith("HvdExt>")]
    return len(operations), edges, {kind: ours.count(kind) for kind in ours}


def weights(count: int) -> list[tf.Variable]:
    return [tf.Variable(tf.zeros(ELEMENTS)) for _ in range(count)]


@pytest.mark.parametrize(("count", "buckets"), [(10, 1), (10, 5), (200, 5)])
def test_the_reduction_of_a_step_has_ops_for_its_buckets_and_edges_for_its_gradients(count: int, buckets: int) -> None:
    options = GradientOptions(bucket_nbytes=4 * ELEMENTS * count // buckets)
    reducer, variables = Reducer(Identity("many"), options), weights(count)
    steps = tf.Variable(0, dtype=tf.int64)

    def step(*gradients: tf.Tensor) -> list[tf.Tensor]:
        return reducer.begin(gradients, variables).reduce_all(after=steps)

    plain = counted(lambda *gradients: [tf.identity(gradient) for gradient in gradients], count)
    operations, edges, ours = counted(step, count)
    several = {"HvdExt>BeginStep": 1, "HvdExt>Submit": buckets, "HvdExt>Collect": buckets, "HvdExt>Together": 1}
    assert ours == (several if buckets > 1 else {"HvdExt>ReduceStep": 1})
    assert operations - plain[0] <= 2 * buckets + 10
    assert edges - plain[1] <= min(buckets, 2) * count + 4 * buckets + 20
    reducer.close()


TOPK = hvd.TopK(density=0.5, min_elements=0)
OPTIMIZERS = [
    pytest.param(lambda: hvd.DistributedOptimizer(SGD(0.5)), 8, id="whole"),
    pytest.param(lambda: hvd.DistributedOptimizer(SGD(0.5, 0.9), compression=TOPK), 40, id="momentum"),
]


@pytest.mark.parametrize(("make", "per_gradient"), OPTIMIZERS)
def test_an_optimizers_step_grows_with_the_number_of_gradients_and_not_with_its_square(
    make: Callable[[], Any], per_gradient: int
) -> None:
    def traced(count: int) -> tuple[int, int]:
        optimizer, variables = make(), weights(count)
        operations, edges, _ = counted(lambda *gradients: optimizer.apply(gradients, variables), count)
        return operations, edges

    (few, few_edges), (more, more_edges) = traced(10), traced(90)  # where each met each, there were 8000 edges more
    assert more - few <= 80 * per_gradient
    assert more_edges - few_edges <= 2 * 80 * per_gradient
