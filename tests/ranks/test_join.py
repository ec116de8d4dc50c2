"""Ranks without more data: `hvd.join()` gives zeros to the steps of the others, until all ranks have joined."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.optimizers import SGD

import hvd_ext as hvd
from hvd_ext.errors import InvalidError
from hvd_ext.job import runtime
from hvd_ext.keras.optimizers.optimizer import channels
from tests.ranks.topk_jobs import as_launched, hosts_of, restart
from tests.ranks.training import assert_same_bits_on_all_ranks, compiled, data, values

pytestmark = pytest.mark.ranks(1, 2, 4)

SHAPE = (6, 7)


def gradient(rank: int, step: int, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    """Sixteenths, so that sums are exact and halves hold them."""
    count = int(np.prod(shape))
    return ((np.arange(count) * 7 + rank * 11 + step * 5) % 31 - 15).reshape(shape).astype(np.float32) / 16


def active(counts: list[int], step: int) -> list[int]:
    """Give the ranks that have such a step."""
    return [rank for rank, count in enumerate(counts) if count > step]


def summed(counts: list[int], step: int) -> np.ndarray:
    """Sum the gradients of a step over the ranks that have it."""
    return np.sum([gradient(rank, step) for rank in active(counts, step)], axis=0)


def uneven(seed: int) -> list[int]:
    """Give a number of steps for each rank, the same on all ranks; one rank may have none after the first epoch."""
    return [random.Random(1000 * seed + rank).randrange(0, 6) for rank in range(hvd.size())]


def joined(counts: list[int]) -> int:
    """Join, and check that the rank that was the last has had all steps."""
    last = hvd.join()
    assert isinstance(last, int)
    assert counts[last] == max(counts)
    assert hvd.allgather_object(last) == [last] * hvd.size()
    return last


Make = Callable[[Any], Callable[[np.ndarray], None]]


def of_optimizer(variable: Any, **options: Any) -> Callable[[np.ndarray], None]:
    """Make eager steps of an optimizer: the weights become what was applied."""
    optimizer = hvd.DistributedOptimizer(SGD(1.0), op=hvd.Sum, **options)
    return lambda mine: optimizer.apply([tf.constant(mine)], [variable])


def of_traced_optimizer(variable: Any, **options: Any) -> Callable[[np.ndarray], None]:
    """Make traced steps of an optimizer."""
    optimizer = hvd.DistributedOptimizer(SGD(1.0), op=hvd.Sum, **options)
    optimizer.build([variable])
    step = tf.function(lambda mine: optimizer.apply([mine], [variable]))
    return lambda mine: step(tf.constant(mine))


def of_tape(variable: Any, *, traced: bool = False) -> Callable[[np.ndarray], None]:
    """Make steps of a training loop with a tape."""

    def step(mine: tf.Tensor) -> None:
        with tf.GradientTape() as plain:
            loss = tf.reduce_sum(variable * mine)
        tape = hvd.DistributedGradientTape(plain, op=hvd.Sum)
        variable.assign_sub(tape.gradient(loss, [variable])[0])

    compiled_step = tf.function(step) if traced else step
    return lambda mine: compiled_step(tf.constant(mine))


FORMS = {
    "eager": of_optimizer,
    "traced": of_traced_optimizer,
    "halves": lambda variable: of_traced_optimizer(variable, compression=hvd.Compression.fp16),
    "tape": of_tape,
    "traced tape": lambda variable: of_tape(variable, traced=True),
}


@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
def test_steps_of_any_uneven_numbers_sum_up_what_the_active_ranks_have_epoch_after_epoch(make: Make) -> None:
    variable = (
        tf.Variable(tf.zeros(SHAPE)) if make in (of_tape, FORMS["traced tape"]) else keras.Variable(np.zeros(SHAPE))
    )
    step = make(variable)
    for _ in range(2):  # the comparison of the weights of a tape ends with the second step
        step(gradient(hvd.rank(), 0))
    for epoch in range(4):
        counts = uneven(epoch)
        before = values([variable])[0]
        for number in range(counts[hvd.rank()]):
            step(gradient(hvd.rank(), number))
            before = before - summed(counts, number)
            np.testing.assert_array_equal(values([variable])[0], before)
        last = joined(counts)
        hvd.broadcast_variables([variable], root_rank=last)
        assert_same_bits_on_all_ranks([variable])


def test_a_rank_that_joins_before_the_weights_were_compared_compares_them_later() -> None:
    variable = tf.Variable(tf.zeros(SHAPE))
    step = of_tape(variable)
    counts = [1 if rank == 0 else 3 for rank in range(hvd.size())]
    for number in range(counts[hvd.rank()]):
        step(gradient(hvd.rank(), number))
    hvd.broadcast_variables([variable], root_rank=joined(counts))
    for number in range(3):
        step(gradient(hvd.rank(), number))
    assert_same_bits_on_all_ranks([variable])


def test_fit_with_uneven_numbers_of_batches_then_join_then_fit_again() -> None:
    trained = compiled(op=hvd.Sum)
    for epoch in range(3):
        counts = [count + (epoch == 0) for count in uneven(10 + epoch)]
        rows = 4 * counts[hvd.rank()]
        if rows:
            x, y = data(hvd.rank(), rows, salt=epoch)
            trained.fit(x, y, batch_size=4, epochs=1, shuffle=False, verbose=0)
        last = joined(counts)
        hvd.broadcast_variables([*trained.variables, *trained.optimizer.variables], root_rank=last)
        steps = int(trained.optimizer.iterations.numpy())
        assert hvd.allgather_object(steps) == [steps] * hvd.size()
        assert_same_bits_on_all_ranks(trained.weights)


@pytest.fixture
def far_hosts() -> Iterator[None]:
    """Two virtual hosts with slow links between them, between which gradients are selected."""
    restart(hosts_of(hvd.size()))
    yield
    as_launched()


CODECS = {
    "top-k": lambda: hvd.TopK(density=0.125, min_elements=10, wire="fp32"),
    "top-k of tensors": lambda: hvd.TopK(density=0.25, min_elements=10, wire="fp32", until=4),
    "sign": lambda: hvd.Sign(min_elements=10),
    "quantized": lambda: hvd.Quantized(bits=4, min_elements=10),
}


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.usefixtures("far_hosts")
def test_nothing_that_error_feedback_keeps_is_lost(codec: Callable[[], Any], traced: bool) -> None:
    variable = keras.Variable(np.zeros(SHAPE))
    optimizer = hvd.DistributedOptimizer(SGD(1.0), op=hvd.Sum, compression=codec())
    optimizer.build([variable])

    def step(mine: tf.Tensor) -> None:
        optimizer.apply([mine], [variable])

    run = tf.function(step) if traced else step
    given = np.zeros(SHAPE, np.float32)
    for epoch in range(3):
        counts = [count + (epoch == 0) for count in uneven(20 + epoch)]
        for number in range(counts[hvd.rank()]):
            run(tf.constant(gradient(hvd.rank(), number)))
        for number in range(max(counts)):
            given += summed(counts, number)
        hvd.broadcast_variables([variable, *optimizer.variables], root_rank=joined(counts))
    hvd.flush(optimizer)
    run(tf.zeros(SHAPE))
    np.testing.assert_allclose(-values([variable])[0], given, rtol=0, atol=1e-3)
    assert_same_bits_on_all_ranks([variable])
    steps = [channel.steps for channel in channels(optimizer)]
    assert hvd.allgather_object(steps) == [steps] * hvd.size()


REPLANNED = {"whole": lambda: None, "top-k": CODECS["top-k"]}


@pytest.mark.parametrize("codec", REPLANNED.values(), ids=REPLANNED)
@pytest.mark.usefixtures("far_hosts")
def test_buckets_are_planned_again_by_all_ranks_or_by_none(codec: Callable[[], Any]) -> None:
    options = {} if codec() is None else {"compression": codec()}
    optimizer = hvd.DistributedOptimizer(SGD(1.0), op=hvd.Sum, bucket_nbytes=64, **options)
    variables = [keras.Variable(np.zeros(SHAPE)) for _ in range(3)]
    optimizer.build(variables)
    step = tf.function(lambda mine: optimizer.apply([mine] * 3, variables))
    # rank 0 joins before the step after which buckets are planned again, then the last rank does
    for before in (0, hvd.size() - 1):
        counts = [15 if rank == before else 25 for rank in range(hvd.size())]
        for number in range(counts[hvd.rank()]):
            step(tf.constant(gradient(hvd.rank(), number)))
        hvd.broadcast_variables([*variables, *optimizer.variables], root_rank=joined(counts))
    for number in range(160):  # beyond step 200
        step(tf.constant(gradient(hvd.rank(), number)))
    assert_same_bits_on_all_ranks(variables)


def test_sums_and_averages_take_zeros_and_an_average_divides_by_all_ranks() -> None:
    counts = list(range(hvd.size()))  # rank 0 joins at once
    mine = gradient(hvd.rank(), 0)
    traced = tf.function(lambda tensor: hvd.allreduce(tensor, op=hvd.Sum))
    for number in range(counts[hvd.rank()]):
        total = np.sum([gradient(rank, 0) for rank in active(counts, number)], axis=0)
        np.testing.assert_array_equal(hvd.allreduce(mine, op=hvd.Sum), total)
        np.testing.assert_allclose(hvd.allreduce(mine), total / hvd.size(), rtol=1e-6)
        np.testing.assert_array_equal(traced(tf.constant(mine)), total)
        group = hvd.grouped_allreduce([mine, mine.astype(np.int64), 2 * mine], op=hvd.Sum)
        np.testing.assert_array_equal(group[0], total)
        np.testing.assert_array_equal(group[2], 2 * total)
        hvd.barrier()
    joined(counts)
    # the names that are counted meet again, of all kinds
    np.testing.assert_array_equal(hvd.allreduce(np.ones(3, np.float32), op=hvd.Sum), np.full(3, hvd.size()))
    assert hvd.allgather(np.full(1, hvd.rank())).numpy().tolist() == list(range(hvd.size()))
    hvd.barrier()


def refused(call: Callable[[], Any], *words: str) -> None:
    """Check that a call raises an `InvalidError` with these words."""
    with pytest.raises(InvalidError) as raised:
        call()
    for word in words:
        assert word in str(raised.value)


def test_what_needs_all_ranks_is_refused_with_words_on_all_ranks_that_call_it() -> None:
    first_step = of_optimizer(keras.Variable(np.zeros(3)))
    if hvd.rank() != hvd.size() - 1 or hvd.size() == 1:
        who = f"rank {hvd.size() - 1} has joined (hvd_ext.join)"
        mine = np.ones(hvd.size(), np.float32)
        if hvd.size() > 1:
            for op in (hvd.Min, hvd.Max, hvd.Product):
                refused(lambda op=op: hvd.allreduce(mine, op=op), who, f"with op {op.name.lower()}")
            refused(lambda: hvd.allgather(mine), "allgather", who, "sparse_as_dense=True")
            refused(lambda: hvd.broadcast(mine, root_rank=0), "broadcast", who)
            refused(lambda: hvd.alltoall(mine), "alltoall", who)
            refused(lambda: hvd.reducescatter(mine), "reducescatter", who)
            refused(lambda: hvd.broadcast_object(1), "broadcast_object", who)
            refused(lambda: first_step(np.ones(3, np.float32)), who, "hvd_ext.shard")
        np.testing.assert_array_equal(hvd.allreduce(mine, op=hvd.Sum), mine * max(1, hvd.size() - 1))
    hvd.join()
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


def test_gradients_that_some_ranks_lack_are_agreed_on_among_the_active_ranks() -> None:
    first, second = keras.Variable(np.zeros(3)), keras.Variable(np.zeros(3))
    optimizer = hvd.DistributedOptimizer(SGD(1.0), op=hvd.Sum)
    ones = tf.ones(3)
    optimizer.apply([ones, ones], [first, second])
    counts = [1 + rank for rank in range(hvd.size())]
    for number in range(counts[hvd.rank()]):
        lacks = hvd.rank() == hvd.size() - 1 and number % 2 == 1
        optimizer.apply([None if lacks else ones, ones], [first, second])
    last = joined(counts)
    hvd.broadcast_variables([first, second, *optimizer.variables], root_rank=last)
    size = hvd.size()
    assert second.numpy().tolist() == [-float(size + sum(counts))] * 3
    optimizer.apply([ones, ones], [first, second])
    assert second.numpy().tolist() == [-float(2 * size + sum(counts))] * 3


POLICIES = {
    "sync": {"sync": "solo"},
    "delay": {"delay": 1},
    "low rank": {"compression": hvd.LowRank(rank=1)},
    "local steps": {"local_steps": hvd.LocalSteps(2)},
}


@pytest.mark.parametrize("options", POLICIES.values(), ids=POLICIES)
def test_what_zeros_of_the_engine_cannot_serve_is_refused_at_the_call_of_join(options: dict[str, Any]) -> None:
    variable = keras.Variable(np.zeros((40, 40)))
    optimizer = hvd.DistributedOptimizer(SGD(1.0), **options)
    optimizer.apply([tf.ones((40, 40))], [variable])
    refused(hvd.join, "join: SGD was made with", "hvd_ext.shard")
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
    for each in [*runtime.current().gradient_sets]:
        if not each.policy.joins:
            each.close()


def test_join_is_refused_in_a_graph() -> None:
    refused(lambda: tf.function(lambda: hvd.join())(), "call it outside of tf.function")


def test_a_process_set_joins_by_itself() -> None:
    if hvd.size() < 4:
        pytest.skip("needs a process set of several ranks")
    some = hvd.add_process_set([1, 3])
    if some.included():
        variable = keras.Variable(np.zeros(3))
        optimizer = hvd.DistributedOptimizer(SGD(1.0), op=hvd.Sum, process_set=some)
        optimizer.apply([tf.ones(3)], [variable])
        refused(hvd.join, "in a process set; join its ranks")
        for _ in range(hvd.rank()):
            optimizer.apply([tf.ones(3)], [variable])
        assert hvd.join(process_set=some) == 3
        if hvd.rank() == 3:
            assert variable.numpy().tolist() == [-2.0 - 1 - 1 - 2] * 3
        for each in [*runtime.current().gradient_sets]:
            each.close()
    hvd.remove_process_set(some)
    assert hvd.join() in range(hvd.size())
