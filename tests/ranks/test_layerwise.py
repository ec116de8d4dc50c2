"""LARS, LAMB and `pto` on several ranks: the same bits with the norms divided among the ranks and without.

test_pairs.py has LARS and LAMB with every other feature, eagerly.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import config

import hvd_ext as hvd
from hvd_ext.errors import InvalidError, MismatchError
from hvd_ext.job import runtime
from hvd_ext.tensorflow import norms, sharing
from tests.ranks.compare import assert_equal
from tests.ranks.training import assert_same_bits_on_all_ranks, assert_trained_alike, data, joined, model, values

pytestmark = pytest.mark.ranks(2)

KINDS = {
    "lars": lambda **more: hvd.optimizers.LARS(0.5, weight_decay=0.01, trust_coefficient=0.1, **more),
    "lamb": lambda **more: hvd.optimizers.LAMB(0.05, weight_decay=0.01, **more),
}


# the elements of tensors of several blocks, and of a few elements
SIZES = {"kernel": 150_000, "embeddings": 70_000, "bias": 3}


def trained(optimizer: Any, steps: int, *, traced: bool = False) -> list[np.ndarray]:
    """Train variables with gradients that depend on the rank; give them and those of the optimizer."""
    variables = [keras.Variable(np.linspace(-1, 1, size), name=name) for name, size in SIZES.items()]
    optimizer.build(variables)

    def step(number: tf.Tensor) -> None:
        parts = [tf.cos(tf.range(size, dtype=tf.float32) * 0.1 + number + hvd.rank()) for size in SIZES.values()]
        optimizer.apply(parts, variables)

    run = tf.function(step, autograph=False) if traced else step
    for number in range(steps):
        run(tf.constant(float(number)))
    assert_same_bits_on_all_ranks(variables)
    return values([*variables, *optimizer.variables])


@pytest.mark.parametrize(("kind", "traced"), [("lars", False), ("lars", True), ("lamb", True)])
def test_weights_and_slots_have_the_same_bits_however_the_norms_are_computed(kind: str, traced: bool) -> None:
    optimizers = [hvd.DistributedOptimizer(KINDS[kind](parallel=parallel)) for parallel in (False, True, "auto")]
    steps = 12 if traced else 3  # both ways have been tried after 10
    alone, divided, auto = (trained(optimizer, steps, traced=traced) for optimizer in optimizers)
    assert_equal(alone, divided)
    assert_equal(alone, auto)
    if traced and hvd.size() > 1:
        assert set(hvd.allgather_object(int(optimizers[2]._hvd_ext.trial.chosen))) in ({0}, {1})


def test_ranks_that_compute_norms_in_another_way_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if hvd.size() == 1:
        return
    if hvd.rank() == hvd.size() - 1:  # as where the build found no nvcc, and variables are on GPUs
        monkeypatch.setattr(norms, "_is_there", lambda: False)
    for kind in KINDS.values():
        with pytest.raises(MismatchError, match=r"norms .*(ops on the host|Keras' operations)"):
            trained(hvd.DistributedOptimizer(kind()), 1)


def test_auto_tries_both_ways_first_and_none_where_operations_must_be_deterministic() -> None:
    optimizer = hvd.DistributedOptimizer(KINDS["lars"]())
    trained(optimizer, 9)
    if hvd.size() == 1:
        assert optimizer._hvd_ext.trial is None
        return
    assert int(optimizer._hvd_ext.trial.chosen) == -1
    tf.config.experimental.enable_op_determinism()  # it refuses clocks, so nothing can be timed
    try:
        optimizer = hvd.DistributedOptimizer(KINDS["lars"]())
        trained(optimizer, 2, traced=True)
        assert int(optimizer._hvd_ext.trial.chosen) == -1
    finally:
        config.disable_op_determinism()


@pytest.mark.parametrize(
    ("alone", "together", "chosen"),
    [
        ([1, 1], [2, 2], 0),
        ([2, 2], [1, 1], 1),
        ([1, 3], [2, 2], 1),  # alone, a step waits for its slowest rank
        ([2, 2], [1, 3], 1),  # together, a rank that began early has waited for the last
    ],
)
def test_all_ranks_agree_on_the_way_that_took_less_time(alone: list[int], together: list[int], chosen: int) -> None:
    if hvd.size() != 2:
        pytest.skip("the times are those of two ranks")
    times = tf.constant([9.0, 1.0, *[alone[hvd.rank()], together[hvd.rank()]] * 4], tf.float64)  # the first is cold
    worst = lambda own: sharing.maximum(runtime.current(), "times of a test", own)  # noqa: E731
    assert int(sharing._faster(times, worst)) == chosen


def test_the_maximum_is_that_of_each_place_over_the_ranks() -> None:
    own = tf.constant([float(hvd.rank()), -float(hvd.rank())], tf.float64)
    found = sharing.maximum(runtime.current(), "a maximum of a test", own)
    np.testing.assert_array_equal(found, [hvd.size() - 1, 0])


def calls_of(step: Any) -> int:
    """Count the collectives of a step."""
    before = runtime.current().engine.statistics().calls
    step()
    return runtime.current().engine.statistics().calls - before


@pytest.mark.parametrize("kind", KINDS)
def test_norms_travel_on_update_steps_only(kind: str) -> None:
    counts = []
    for parallel in (False, True):
        variables = [keras.Variable(np.linspace(-1, 1, 70000), name="kernel")]
        optimizer = hvd.DistributedOptimizer(KINDS[kind](parallel=parallel), backward_passes_per_step=2)
        optimizer.build(variables)
        step = tf.function(lambda own: optimizer.apply([own], variables), autograph=False)  # noqa: B023
        passes = [calls_of(lambda: step(tf.ones([70000]))) for _ in range(6)]  # noqa: B023
        counts.append(passes[2:])  # the channel is opened before
    once = calls_of(lambda: hvd.allgather(tf.ones([3]))) if hvd.size() > 1 else 0
    assert np.subtract(counts[1], counts[0]).tolist() == [0, once, 0, once]


def test_variables_that_are_local_stay_out_of_it() -> None:
    found = []
    for parallel in (False, True):
        # several of both in turn, each with norms unlike the others'
        variables = [keras.Variable(np.linspace(-i, 1, 30000), name=f"v{i}") for i in range(1, 6)]
        optimizer = hvd.DistributedOptimizer(KINDS["lars"](parallel=parallel))
        for variable in variables[::2]:
            optimizer.register_local_var(variable)
        for step in range(3):
            gradient = tf.cos(tf.range(30000, dtype=tf.float32) + step)
            factors = [i * (1 + hvd.rank() * (1 - i % 2)) for i in range(len(variables))]
            optimizer.apply([gradient * (1 + factor) for factor in factors], variables)
        assert_same_bits_on_all_ranks(variables[1::2])
        found.append(values(variables))
    assert_equal(*found)


def test_a_process_set_divides_among_its_ranks(evens: hvd.ProcessSet) -> None:
    weights = []
    for parallel in (False, True):
        variable = keras.Variable(np.linspace(-1, 1, 140000), name="kernel")
        optimizer = hvd.DistributedOptimizer(KINDS["lars"](parallel=parallel), process_set=evens)
        for step in range(2):
            optimizer.apply([tf.cos(tf.range(140000, dtype=tf.float32) + step + hvd.rank())], [variable])
        weights.append(variable.numpy())
    np.testing.assert_array_equal(*weights)


def test_fit_equals_training_on_the_joined_batch() -> None:
    rows, batch = 8, 4
    ours, plain = model(), model()
    ours.compile(hvd.DistributedOptimizer(KINDS["lars"](parallel=True)), "mse")
    plain.compile(KINDS["lars"](), "mse", run_eagerly=True)
    ours.fit(*data(hvd.rank(), rows), batch_size=batch, epochs=2, shuffle=False, verbose=0)
    plain.fit(*joined(rows, batch), batch_size=batch * hvd.size(), epochs=2, shuffle=False, verbose=0)
    assert_trained_alike(ours, plain)


def test_divided_norms_are_those_of_one_rank_for_mixed_dtypes() -> None:
    random = np.random.default_rng(5)
    sizes = [3, 65536, 65537, 200000, 0, 1, 65536 * 3]
    dtypes = [tf.float32, tf.bfloat16, tf.float32, tf.float64, tf.float32, tf.float16, tf.float32]
    tensors = [tf.cast(random.standard_normal(size), dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
    alone = norms.squares(tensors).numpy()
    divided = norms.divided_squares(tensors, runtime.current(), "norms of a test").numpy()
    np.testing.assert_array_equal(alone, divided)
    wanted = [np.sum(np.square(one.numpy().astype(np.float64))) for one in tensors]
    np.testing.assert_allclose(alone, wanted, rtol=1e-12)


def test_parallel_norms_are_refused_where_steps_do_not_wait_for_all_ranks() -> None:
    with pytest.raises(InvalidError, match=r"parallel \(True\): .* sync='majority'.* use parallel='auto' or False"):
        hvd.DistributedOptimizer(KINDS["lars"](parallel=True), sync="majority")
    hvd.DistributedOptimizer(KINDS["lars"](), sync="majority")


def test_patterns_and_schedules_that_differ_between_ranks_are_refused() -> None:
    if hvd.size() == 1:
        pytest.skip("needs two ranks")
    schedules = keras.optimizers.schedules
    for more, words in (
        ({"exclude_from_trust": ["kernel"] if hvd.rank() else ["bias"]}, "exclude_from_trust"),
        ({"momentum": schedules.PolynomialDecay(0.9, 10 + hvd.rank(), 0.5)}, "momentum"),
    ):
        optimizer = hvd.DistributedOptimizer(hvd.optimizers.LARS(0.5, **more))
        with pytest.raises(MismatchError, match=words):
            optimizer.apply([tf.ones([3])], [keras.Variable(np.ones(3), name="kernel")])


def test_pto_gives_all_ranks_all_results_in_one_collective() -> None:
    tensors = [tf.range(size, dtype=tf.float32) - 3 for size in (5, 1, 9, 0, 30)]
    wanted = [np.square(one.numpy()) for one in tensors]
    assert_equal(hvd.pto(tf.square, tensors), wanted)

    @tf.function
    def traced() -> list[tf.Tensor]:
        return hvd.pto(lambda one: tf.reduce_sum(tf.cast(one, tf.float64)), tensors, cost=lambda one: one.shape[0] ** 2)

    assert [float(one) for one in traced()] == [one.numpy().sum() for one in tensors]
    assert hvd.pto(tf.square, []) == []
    once = calls_of(lambda: hvd.allgather(tf.ones([3])))
    assert once == 1
    assert calls_of(lambda: hvd.pto(tf.square, tensors)) == once


def test_pto_takes_every_dtype() -> None:
    for dtype in ("bool", "int8", "uint8", "int32", "int64", "float16", "bfloat16", "float64"):
        tensors = [tf.cast(tf.reshape(tf.range(6) % 3, [2, 3]), dtype), tf.zeros([2], dtype)]
        results = hvd.pto(tf.identity, tensors)
        assert [result.dtype for result in results] == [dtype] * 2
        assert_equal(results, tensors)


def test_pto_calls_the_function_on_the_ranks_of_its_shares_alone() -> None:
    tensors = [tf.fill([1000], float(i)) for i in range(4 * hvd.size())]
    calls: list[int] = []

    def work(one: tf.Tensor) -> tf.Tensor:
        return tf.numpy_function(lambda value: calls.append(1) or value[:1], [one], tf.float32)

    found = hvd.pto(lambda one: tf.ensure_shape(work(one), [1]), tensors)
    assert [float(one[0]) for one in found] == [float(i) for i in range(len(tensors))]
    assert len(calls) == 4


def test_pto_works_in_a_process_set(evens: hvd.ProcessSet) -> None:
    if evens.included():
        [found] = hvd.pto(tf.reduce_sum, [tf.range(4)], process_set=evens)
        assert int(found) == 6


def test_pto_refuses_wrong_arguments() -> None:
    one = [tf.ones([2])]
    for arguments, words in (
        ((3, one), "function .* must be a function"),
        ((tf.square, tf.ones([2])), "tensors .* must be a list"),
        ((tf.square, ["text"]), r"pto \(string\): the dtype"),
        ((tf.square, one, [1, 2]), r"cost \(2 numbers\): must be one for each tensor"),
        ((tf.square, one, [-1]), r"cost of tensor 0 \(-1\): must be a number, at least 0"),
        ((lambda x: tf.boolean_mask(x, x > 0), one), r"result \(shape .*\): its shape must follow"),
        ((lambda x: tf.cast(x, tf.complex64), one), r"result \(complex64\): its dtype"),
    ):
        with pytest.raises(InvalidError, match=words):
            hvd.pto(*arguments)
    with tf.GradientTape() as tape:
        x = tf.ones([2])
        tape.watch(x)
        [y] = hvd.pto(tf.square, [x])
    with pytest.raises(InvalidError, match="its results have no gradient"):
        tape.gradient(y, x)


def test_lists_that_differ_between_ranks_are_refused_on_all_of_them() -> None:
    if hvd.size() == 1:
        pytest.skip("needs two ranks")
    with pytest.raises(MismatchError, match="tensor 0"):
        hvd.pto(tf.square, [tf.ones([2 + hvd.rank()])])
    # each rank would compute the same tensor: costs count with all their digits
    with pytest.raises(MismatchError, match=r"cost 100000[12]\.0"):
        hvd.pto(tf.square, [tf.ones([2]), tf.zeros([2])], cost=[1000001 + hvd.rank(), 1000002 - hvd.rank()])
    [found] = hvd.pto(tf.square, [tf.fill([2], 3.0)])
    np.testing.assert_array_equal(found, [9, 9])
